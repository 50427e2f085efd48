"""A comparison from start to result: warm-up, rounds in turns, A/A rounds, output checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.bench.compare.analysis import analyze, values_of_rounds
from octavo.bench.compare.differences import differences
from octavo.bench.compare.outputs import compare_greedy, compare_samples
from octavo.bench.compare.rounds import turns
from octavo.bench.compare.sides import Side, SideError
from octavo.bench.compare.statistics import LEAST_ROUNDS
from octavo.bench.slo import Slo
from octavo.bench.workloads.calls import Call
from octavo.bench.workloads.spec import WorkloadSpec

NOISE, WARM_UP = 1, 2  # repeats: the same lengths and times with other contents
TOP = {"engine": 20, "server": 5}
"""Candidates a position that are asked for; the protocol promises no more than 5."""


@dataclass(frozen=True)
class Plan:
    """How to measure; see the command's flags."""

    rounds: int = 8
    noise_rounds: int = 2
    warm_up: int = 1
    restart_every: int = 0
    time_limit_s: float = 240.0
    slo: Slo = field(default_factory=Slo)
    min_effect: float = 0.01
    check_prompts: int = 8
    check_tokens: int = 32
    check_samples: int = 128


class Session:
    """sides: not started; who made them closes them. tell: gets lines for people. shown: whether
    progress bars are."""

    def __init__(
        self,
        sides: Sequence[Side],
        spec: WorkloadSpec,
        plan: Plan,
        *,
        tell: Callable[[str], None] = lambda text: None,
        shown: bool = False,
    ) -> None:
        self.sides, self.spec, self.plan = sides, spec, plan
        self._tell, self._shown = tell, shown
        self._notes: list[str] = []
        self._vocab_size: int | None = None

    def start(self) -> None:
        """Start the sides, one after another."""
        for side in self.sides:
            self._tell(f"starting {side.name}")
            side.start()
        sizes = [side.facts["vocab_size"] for side in self.sides]
        if None in sizes:
            self._note("a side takes text only: prompts are words, whose tokens each side counts")
        else:
            self._vocab_size = min(sizes)

    def result_of_start(self) -> dict[str, Any]:
        """What is known before anything is measured: sides, and what differs."""
        facts = [side.facts for side in self.sides]
        return {
            "sides": [{"name": side.name, **side.facts} for side in self.sides],
            "differences": [[key, values] for key, values in differences(facts)],
        }

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._tell(f"note: {text}")

    def _calls(self, number: int, repeat: int = 0, count: int | None = None) -> list[Call]:
        spec = self.spec if count is None else replace(self.spec, num_requests=count)
        calls = spec.calls(self._vocab_size or 32_000, number, repeat)
        if self._vocab_size is None:
            return [
                call if call.token_ids is None else replace(call, token_ids=None, text=call.as_text)
                for call in calls
            ]
        return calls

    def run(self) -> dict[str, Any]:
        """Measure. Raises `SideError` when a side breaks or answers nothing."""
        began = time.monotonic()
        rounds = self._fit(began)
        data, noise = self._rounds(rounds)
        values = [values_of_rounds(side) for side in data]
        noise_values = [(a, b) for a, b in noise]
        rows = analyze(values, noise_values, min_effect=self.plan.min_effect)
        slo = {key: value for key, value in vars(self.plan.slo).items() if value is not None}
        return {
            "benchmark": "compare",
            **self.result_of_start(),
            "workload": self.spec.as_dict(),
            "headline": self.spec.headline(),
            "rounds": rounds,
            "noise_rounds": len(noise),
            "slo": slo,
            "min_effect": self.plan.min_effect,
            "metrics": rows,
            "checks": self._checks(),
            "notes": self._notes,
            "data": data,
        }

    # ---- rounds ----------------------------------------------------------------------------------

    def _fit(self, began: float) -> int:
        """Warm up, and cut rounds or requests to the time that there is."""
        plan, seconds = self.plan, 0.0
        for _ in range(plan.warm_up):
            seconds = 0.0
            for side in self.sides:
                at = time.monotonic()
                self._one(side, self._calls(0, WARM_UP), None)
                seconds += time.monotonic() - at
        if plan.rounds < LEAST_ROUNDS:
            self._note(f"from under {LEAST_ROUNDS} rounds no difference can be shown")
        if not plan.warm_up:
            return plan.rounds
        left = plan.time_limit_s - (time.monotonic() - began)
        share = plan.noise_rounds / len(self.sides)
        rounds = max(1, int(left / max(seconds, 1e-9) - share))
        if rounds >= plan.rounds:
            return plan.rounds
        least = min(LEAST_ROUNDS, plan.rounds)
        if rounds < least and self.spec.kind not in ("trace", "prompts"):
            fits = left / max(seconds, 1e-9) / (least + share)
            count = max(4, int(self.spec.num_requests * fits))
            if count < self.spec.num_requests:
                self._note(
                    f"a round takes {seconds:.0f} s: {count} requests each instead of "
                    f"{self.spec.num_requests}, to end within --time-limit"
                )
                self.spec = replace(self.spec, num_requests=count)
        rounds = max(rounds, least)
        if rounds < plan.rounds:
            self._note(f"{rounds} rounds instead of {plan.rounds}, to end within --time-limit")
        return rounds

    def _rounds(self, count: int) -> tuple[list[list[dict[str, Any]]], list[Any]]:
        """The data of every side's rounds, and the values of pairs of rounds of the first side:
        the same lengths and times, one right after the other."""
        data: list[list[dict[str, Any]]] = [[] for _ in self.sides]
        pairs: list[Any] = []
        total = count * len(self.sides) + min(self.plan.noise_rounds, (count + 1) // 2)
        with self._bar(total) as bar:
            for number, index in turns(len(self.sides), count):
                side = self.sides[index]
                every = self.plan.restart_every
                if every and number and number % every == 0:
                    self._restart(side)
                bar.set_description(f"round {number + 1}/{count} {side.name}")
                data[index].append(self._one(side, self._calls(number), bar))
                # In odd rounds the first side comes last: what follows it is its own A/A round.
                wants_pair = number % 2 == 1 or count == 1
                if index == 0 and wants_pair and len(pairs) < self.plan.noise_rounds:
                    bar.set_description(f"A/A round {len(pairs) + 1} {side.name}")
                    again = self._one(side, self._calls(number, NOISE), bar)
                    pairs.append(tuple(values_of_rounds([data[0][-1], again])))
        return data, pairs

    def _restart(self, side: Side) -> None:
        """A new process, warmed up: what differs between two starts becomes part of the noise."""
        side.close()
        side.start()
        for _ in range(self.plan.warm_up):
            self._one(side, self._calls(0, WARM_UP), None)

    def _one(self, side: Side, calls: Sequence[Call], bar: Any) -> dict[str, Any]:
        tokens = 0
        began = time.monotonic()

        def on_tokens(more: int) -> None:
            nonlocal tokens
            tokens += more
            if bar is not None:
                rate = tokens / max(time.monotonic() - began, 1e-9)
                bar.set_postfix_str(f"{rate:,.0f} tokens/s")

        data = side.round(calls, self.spec.concurrency, self.plan.slo, on_tokens)
        if not data["completed"]:
            why = "; ".join(data["errors"]) or "no answers"
            raise SideError(f"{side.name}: no request of a round was answered: {why}")
        if bar is not None:
            bar.update(1)
            if data["failed"]:
                self._note(f"{side.name}: {data['failed']} failed: {'; '.join(data['errors'])}")
        return data

    def _bar(self, total: int) -> Any:
        from tqdm import tqdm

        return tqdm(total=total, unit="round", disable=not self._shown, dynamic_ncols=True)

    # ---- outputs ---------------------------------------------------------------------------------

    def _checks(self) -> list[dict[str, Any]]:
        """Output checks of every side against the first."""
        plan = self.plan
        if not plan.check_prompts or any(side.facts.get("simulated") for side in self.sides):
            return []
        calls = [
            replace(call, arrival=0.0, after=None, max_tokens=plan.check_tokens)
            for call in self._calls(0, count=plan.check_prompts)[: plan.check_prompts]
        ]
        self._tell("comparing outputs")
        tops = [TOP[side.facts["kind"]] for side in self.sides]
        greedy = [
            self._ask(side, side.greedy, calls, top)
            for side, top in zip(self.sides, tops, strict=True)
        ]
        sampled: list[Any] = [None] * len(self.sides)
        if plan.check_samples:
            few = calls[:2]
            sampled = [
                self._ask(side, side.sample, few, plan.check_samples, 1000 * n)
                for n, side in enumerate(self.sides)
            ]
        checks = []
        for number in range(1, len(self.sides)):
            check: dict[str, Any] = {"side": number, "greedy": None, "sampled": None}
            if greedy[0] and greedy[number]:
                dtype = _dtype(self.sides[0].facts, self.sides[number].facts)
                check["greedy"] = compare_greedy(greedy[0], greedy[number], dtype)
            if sampled[0] and sampled[number] and _comparable(sampled[0], sampled[number]):
                check["sampled"] = compare_samples(sampled[0], sampled[number])
            checks.append(check)
        return checks

    def _ask(self, side: Side, question: Callable[..., Any], *arguments: Any) -> Any:
        """A server may lack what a check needs; that is a note, not an end."""
        try:
            return question(*arguments)
        except SideError as error:
            if side.facts["kind"] != "server":
                raise
            self._note(f"outputs cannot be compared: {error}")
            return None


def _dtype(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The coarser of both."""
    names = [
        str(facts.get("dtype") or (facts.get("config") or {}).get("model.dtype") or "bfloat16")
        for facts in (first, other)
    ]
    return next((d for d in ("bfloat16", "float16") if d in names), "float32")


def _comparable(first: Sequence[Mapping[str, int]], other: Sequence[Mapping[str, int]]) -> bool:
    """Whether both name tokens by numbers, or both by texts."""
    forms = [all(name.isdigit() for name in counts) for counts in (first[0], other[0])]
    return forms[0] == forms[1]
