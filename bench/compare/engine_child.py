"""One side as an engine in a process of its own: memory and threads of the sides do not mix.

Requests are mappings with the name of a method (`do`) and its arguments.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from octavo.bench.child import Progress, serve
from octavo.bench.compare.rounds import round_data
from octavo.bench.load.engine import EngineDriver
from octavo.bench.slo import Slo
from octavo.bench.workloads.calls import Call
from octavo.core.messages import EngineRequest
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore

TELL_S = 0.2


class EngineChild:
    """Answers the parent's requests."""

    def __init__(self) -> None:
        self._send: Progress = lambda tokens: None
        self._engine: EngineCore | None = None
        self._inputs: Any = None
        self._resolved: Any = None
        self._registry: Any = None
        self._tokens, self._told = 0, 0.0

    def answer(self, request: dict[str, Any], progress: Progress) -> Any:
        """Call the method that the request names."""
        self._send = progress
        return getattr(self, "do_" + request.pop("do"))(**request)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _progress(self, count: int) -> None:
        self._tokens += count
        if time.monotonic() - self._told > TELL_S:
            self._send(self._tokens)
            self._tokens, self._told = 0, time.monotonic()

    @property
    def engine(self) -> EngineCore:
        assert self._engine is not None, "start comes first"
        return self._engine

    # ---- requests --------------------------------------------------------------------------------

    def do_start(self, file: str, overrides: list[str]) -> dict[str, Any]:
        """Build the engine; what there is to know of it."""
        from octavo.bench.compare.differences import flat_config, plugin_versions
        from octavo.engine.builder import build_engine
        from octavo.engine.resolve import resolve
        from octavo.frontend.config import load_config
        from octavo.server.command_line.config import registry_from_config

        config = load_config(file, overrides=overrides)
        self._registry = registry_from_config(config)
        if config.executor.kind.name == "simulated":
            from octavo.bench.simulate.setup import simulated_engine

            self._engine = simulated_engine(config, self._registry).core
            resolved = self._engine.resolved
        else:
            resolved = resolve(config, self._registry)
            self._engine = build_engine(resolved, self._registry)
        self._resolved = resolved
        self._driver = EngineDriver(self._engine, self._encode)
        report = self._engine.report.as_dict()
        return {
            "vocab_size": self._engine.scheduler.limits.vocab_size,
            "max_model_len": self._engine.scheduler.limits.max_model_len,
            "dtype": report["dtype"],
            "simulated": config.executor.kind.name == "simulated",
            "config": flat_config(resolved.config),
            "plugins": plugin_versions(self._engine.report),
            "report": report,
        }

    def do_round(
        self,
        calls: list[dict[str, Any]],
        concurrency: int | None,
        slo: dict[str, float | None],
    ) -> dict[str, Any]:
        """Run a workload from an empty prefix cache."""
        from octavo.engine.worker.memory import peak_resident, reset_peak_resident

        self.engine.reset_prefix_cache()
        made = [_call(given) for given in calls]
        reset_peak_resident()
        _reset_device_peak()
        run = self._driver.run(made, concurrency, self._progress)
        data = round_data(run.answers, run.seconds, Slo(**slo))
        return data | {
            "peak_memory": peak_resident(),
            "device_memory": _device_peak(),
            "kv_mean": run.kv_mean,
            "kv_peak": run.kv_peak,
            "preemptions": run.num_preemptions,
            "prefix_hit_rate": run.prefix_hits / run.prefix_queries if run.prefix_queries else 0.0,
            "phases": run.phases,
            "num_steps": run.num_steps,
            "series": run.series,
        }

    def do_greedy(self, calls: list[dict[str, Any]], top: int) -> list[dict[str, Any]]:
        """Greedy outputs: for every prompt token ids, and for every position the `top` most
        probable tokens with log probabilities (empty where the executor gives none)."""
        made = [_call(given) for given in calls]
        requests = [
            self._request(1 + n, call, n, temperature=0.0, logprobs=top)
            for n, call in enumerate(made)
        ]
        self.engine.reset_prefix_cache()
        found: list[dict[str, Any]] = [{"tokens": [], "top": []} for _ in made]
        for outputs in self._steps(requests):
            tops = [] if outputs.logprobs is None else _tops(outputs.logprobs)
            rows = [] if outputs.logprobs is None else outputs.logprobs.rows.tolist()
            by_row: dict[int, list[Any]] = {}
            for row, top_tokens in zip(rows, tops, strict=True):
                by_row.setdefault(row, []).append(top_tokens)
            for place, handle in enumerate(outputs.handles.tolist()):
                counts = outputs.counts
                count = outputs.token_ids.shape[1] if counts is None else int(counts[place])
                found[handle - 1]["tokens"] += outputs.token_ids[place, :count].tolist()
                found[handle - 1]["top"] += by_row.get(place, [])
        return found

    def do_sample(self, calls: list[dict[str, Any]], count: int, seed: int) -> list[dict[str, int]]:
        """How often each token came first, of `count` draws a prompt at temperature 1."""
        found: list[dict[str, int]] = []
        for number, given in enumerate(calls):
            call = _call(given | {"max_tokens": 1})
            first = self._request(1, call, seed + number, temperature=1.0)
            requests = [first]
            for index in range(1, count):
                copy = self._request(1 + index, call, seed + number, temperature=1.0)
                copy.index, copy.parent = index, 1
                requests.append(copy)
            counts: dict[str, int] = {}
            for outputs in self._steps(requests):
                for token in outputs.token_ids[:, 0].tolist():
                    counts[str(token)] = counts.get(str(token), 0) + 1
            found.append(counts)
        return found

    # ---- the engine ------------------------------------------------------------------------------

    def _steps(self, requests: Sequence[EngineRequest]) -> Any:
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work():
            outputs = self.engine.step()
            if outputs is not None:
                self._progress(len(outputs.handles))
                yield outputs

    def _request(self, handle: int, call: Call, seed: int, **sampling: Any) -> EngineRequest:
        return EngineRequest(
            handle=handle,
            request_id=f"check-{handle}",
            token_ids=np.asarray(self._encode(call), np.int32),
            sampling=SamplingParams(
                max_tokens=call.max_tokens, ignore_eos=True, detokenize=False, **sampling
            ),
            seed=seed,
            max_tokens=call.max_tokens,
        )

    def _encode(self, call: Call) -> Sequence[int]:
        if call.token_ids is not None:
            return call.token_ids
        if self._inputs is None:
            from octavo.engine.tokenizer import make_tokenizer
            from octavo.frontend.assembly import make_inputs

            tokenizer = make_tokenizer(self._resolved, self._registry)
            self._inputs = make_inputs(self._resolved, tokenizer)
        if call.messages is not None:
            from octavo.frontend.text.chat import render_chat

            prompt = render_chat(self._inputs, list(call.messages))
            ids: Sequence[int] = prompt["prompt_token_ids"]
            return ids
        encoded: Sequence[int] = self._inputs.encode_prompt(call.as_text)
        return encoded


def _tops(columns: Any) -> list[list[tuple[int, float]]]:
    """The alternatives of each position, best first, without the column of the sampled token."""
    return [
        [(int(t), float(v)) for t, v in zip(tokens[1:], values[1:], strict=True)]
        for tokens, values in zip(columns.token_ids.tolist(), columns.values.tolist(), strict=True)
    ]


def call_dict(call: Call) -> dict[str, Any]:
    """As JSON carries it, without what is as by default."""
    values = {field.name: (getattr(call, field.name), field.default) for field in fields(Call)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _call(given: dict[str, Any]) -> Call:
    for name in ("token_ids", "messages"):
        if given.get(name) is not None:
            given = given | {name: tuple(given[name])}
    return Call(**given)


def _torch_cuda() -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return torch.cuda


def _reset_device_peak() -> None:
    cuda = _torch_cuda()
    if cuda is not None:
        cuda.reset_peak_memory_stats()


def _device_peak() -> int | None:
    cuda = _torch_cuda()
    return None if cuda is None else int(cuda.max_memory_allocated())


def main(fd: int, parent: int) -> None:
    """The process."""
    engine = EngineChild()
    serve(fd, parent, engine.answer)
    engine.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
