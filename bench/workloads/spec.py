"""What a workload is, as arguments of a command say it, and the requests that follow from it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from octavo.bench.arguments import fraction, natural, positive, positive_float, rate
from octavo.bench.simulate.traces import (
    Prompts,
    TraceRequest,
    guess_format,
    read_trace,
    shaped,
)
from octavo.bench.workloads.arrivals import arrivals
from octavo.bench.workloads.calls import Call
from octavo.bench.workloads.prompts import read_prompts
from octavo.core.errors import ConfigError

KINDS = ("synthetic", "shared-prefix", "multi-turn", "trace", "prompts")


@dataclass(frozen=True)
class WorkloadSpec:
    """kind: one of `KINDS`. Lengths are tokens; range_ratio r draws them from [(1-r) n, (1+r) n].
    rate: requests a second (inf: closed loop or all at once). concurrency: requests under way at
    most. prefix_len, num_prefixes: of `shared-prefix`. turns, think: of `multi-turn`, a
    conversation's requests and the mean seconds between an answer and the next. file, format,
    speedup, max_output: of traces and prompts. input_len, output_len of `None`: the kind's own."""

    kind: str = "synthetic"
    num_requests: int = 16
    input_len: int = 64
    output_len: int = 32
    range_ratio: float = 0.0
    rate: float = math.inf
    burstiness: float = 1.0
    ramp_to: float | None = None
    concurrency: int | None = None
    prefix_len: int = 128
    num_prefixes: int = 2
    turns: int = 4
    think: float = 0.0
    file: str | None = None
    format: str | None = None
    speedup: float = 1.0
    max_output: int | None = None
    seed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """As plain data; an infinite rate is None."""
        values = asdict(self)
        return {key: None if value == math.inf else value for key, value in values.items()}

    def calls(self, vocab_size: int, number: int = 0, repeat: int = 0) -> list[Call]:
        """The requests of round `number`. repeat: the same lengths and times with other contents,
        to run a round again where something remembers the first time."""
        shape = np.random.RandomState([self.seed % 2**32, number, 0])
        content = np.random.RandomState([self.seed % 2**32, number, 1 + repeat])
        if self.kind == "trace":
            return list(self._trace(vocab_size, number, repeat))
        if self.kind == "prompts":
            return self._prompts(shape, number)
        made = {
            "synthetic": self._synthetic,
            "shared-prefix": self._shared,
            "multi-turn": self._conversations,
        }
        return made[self.kind](vocab_size, shape, content)

    def _times(self, count: int, draw: np.random.RandomState) -> Any:
        return arrivals(
            count, self.rate, draw, burstiness=self.burstiness, ramp_to=self.ramp_to
        ).tolist()

    def _lengths(self, mean: int, count: int, draw: np.random.RandomState) -> list[int]:
        low = max(1, math.floor(mean * (1 - self.range_ratio)))
        high = max(low, math.ceil(mean * (1 + self.range_ratio)))
        found: list[int] = draw.randint(low, high + 1, count).tolist()
        return found

    def _synthetic(
        self, vocab_size: int, shape: np.random.RandomState, content: np.random.RandomState
    ) -> list[Call]:
        count = self.num_requests
        inputs = self._lengths(self.input_len, count, shape)
        outputs = self._lengths(self.output_len, count, shape)
        times = self._times(count, shape)
        return [
            Call(out, token_ids=_draw(content, vocab_size, length), arrival=time)
            for length, out, time in zip(inputs, outputs, times, strict=True)
        ]

    def _shared(
        self, vocab_size: int, shape: np.random.RandomState, content: np.random.RandomState
    ) -> list[Call]:
        """Prompts that begin with one of a few prefixes, chosen at random."""
        prefixes = [_draw(content, vocab_size, self.prefix_len) for _ in range(self.num_prefixes)]
        which = shape.randint(0, self.num_prefixes, self.num_requests).tolist()
        inputs = self._lengths(self.input_len, self.num_requests, shape)
        outputs = self._lengths(self.output_len, self.num_requests, shape)
        times = self._times(self.num_requests, shape)
        return [
            Call(out, token_ids=prefixes[k] + _draw(content, vocab_size, length), arrival=time)
            for k, length, out, time in zip(which, inputs, outputs, times, strict=True)
        ]

    def _conversations(
        self, vocab_size: int, shape: np.random.RandomState, content: np.random.RandomState
    ) -> list[Call]:
        """Conversations, each turn after the answer to the one before. The answers that history
        holds are made up, as long as the real ones: every side gets the same requests."""
        count = max(1, self.num_requests // self.turns)
        begins = self._times(count, shape)
        calls: list[Call] = []
        rows = []
        for begin in begins:
            history: tuple[int, ...] = ()
            inputs = self._lengths(self.input_len, self.turns, shape)
            outputs = self._lengths(self.output_len, self.turns, shape)
            pauses = shape.exponential(self.think, self.turns).tolist()
            for turn, (length, out) in enumerate(zip(inputs, outputs, strict=True)):
                history += _draw(content, vocab_size, length)
                rows.append((begin, turn, out, history, pauses[turn]))
                history += _draw(content, vocab_size, out)
        # First turns of all conversations, then second ones: an order that needs no sorting.
        for turn in range(self.turns):
            for place in range(count):
                begin, _, out, history, pause = rows[place * self.turns + turn]
                after = len(calls) - count if turn else None
                calls.append(Call(out, token_ids=history, arrival=begin, after=after, delay=pause))
        return calls

    def _trace(self, vocab_size: int, number: int, repeat: int) -> Iterator[Call]:
        """Round k replays the k-th part of the trace; past its end it begins again."""
        assert self.file is not None, "checked by `from_args`"
        path = Path(self.file)
        source = read_trace(path, self.format or guess_format(path))
        rows = _window(source, number, self.num_requests)
        prompts = Prompts(vocab_size)
        base = (number * 64 + repeat) * self.num_requests
        start = rows[0].arrival if rows else 0.0
        for place, row in enumerate(shaped(rows, self.speedup, None, 0, self.max_output)):
            tokens = prompts.tokens(row, base + place)
            yield Call(
                row.num_output,
                token_ids=tuple(tokens.tolist()),
                arrival=row.arrival - start / self.speedup,
                user=row.user,
                priority=row.priority,
            )

    def _prompts(self, draw: np.random.RandomState, number: int) -> list[Call]:
        assert self.file is not None, "checked by `from_args`"
        rows = read_prompts(Path(self.file), self.output_len)
        if not rows:
            raise ConfigError(f"'{self.file}' contains no prompts")
        count = self.num_requests
        chosen = [rows[(number * count + place) % len(rows)] for place in range(count)]
        times = self._times(count, draw)
        limit = self.max_output
        return [
            Call(
                row.output_len if limit is None else min(limit, row.output_len),
                text=row.text,
                messages=row.messages,
                arrival=time,
            )
            for row, time in zip(chosen, times, strict=True)
        ]

    def headline(self) -> str:
        """In one line, for people."""
        if self.kind in ("trace", "prompts"):
            what = f"{self.kind} {self.file}, {self.num_requests} requests a round"
        else:
            what = (
                f"{self.kind}: {self.num_requests} requests a round, {self.input_len} tokens in, "
                f"{self.output_len} out"
            )
        if self.kind == "shared-prefix":
            what += f", {self.num_prefixes} prefixes of {self.prefix_len} tokens"
        if self.kind == "multi-turn":
            what += f", {self.turns} turns a conversation"
        if not math.isinf(self.rate):
            what += f", {self.rate:g} a second"
            what += "" if self.ramp_to is None else f" rising to {self.ramp_to:g}"
            what += "" if self.burstiness == 1 else f" with burstiness {self.burstiness:g}"
        elif self.kind != "trace" and self.concurrency is None:
            what += ", all at once"
        if self.concurrency is not None:
            what += f", at most {self.concurrency} at a time"
        return f"{what}; seed {self.seed}"


def _draw(draw: np.random.RandomState, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(draw.randint(0, vocab_size, count).tolist())


def _window(source: Iterator[TraceRequest], number: int, count: int) -> list[TraceRequest]:
    rows = list(islice(source, number * count, (number + 1) * count))
    if rows or not number:
        return rows
    raise ConfigError(
        f"the trace ends before round {number + 1} of {count} requests; ask for fewer rounds or "
        "fewer requests a round"
    )


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """`--workload` and its options."""
    own = parser.add_argument_group("workload")
    own.add_argument(
        "--workload",
        default="synthetic",
        metavar="W",
        help="synthetic, shared-prefix, multi-turn, or a file: a trace (Mooncake, Azure, JSONL) or "
        "JSON lines with prompts (default: synthetic)",
    )
    add = own.add_argument
    add("--num-requests", type=positive, default=16, help="requests per round (16)")
    add("--input-len", type=positive, default=64, help="prompt tokens (64)")
    add("--output-len", type=positive, default=32, help="output tokens (32)")
    add("--range-ratio", type=fraction, default=0.0, help="relative spread of the lengths (0)")
    add("--rate", type=rate, default=math.inf, help="requests per second (default: all at once)")
    add("--burstiness", type=rate, default=1.0, help="1 is Poisson; lower is burstier (1)")
    add("--ramp-to", type=positive_float, metavar="RATE", help="request rate at the end of a round")
    add("--concurrency", type=positive, metavar="N", help="closed loop with N requests in flight")
    add(
        "--prefix-len", type=positive, default=128, help="length of shared prefixes in tokens (128)"
    )
    add("--num-prefixes", type=positive, default=2, help="number of shared prefixes (2)")
    add("--turns", type=positive, default=4, help="turns per conversation (4)")
    add("--think", type=float, default=0.0, help="mean think time between turns in seconds (0)")
    add(
        "--format",
        choices=["mooncake", "azure", "jsonl", "prompts"],
        help="format of the workload file",
    )
    add(
        "--speedup",
        type=positive_float,
        default=1.0,
        help="speed up a trace's arrivals by a factor of X",
    )
    add(
        "--max-output",
        type=positive,
        metavar="N",
        help="limit the output lengths of a file to N tokens",
    )
    add("--seed", type=natural, default=0, help="random seed (0)")


def spec_from_args(args: argparse.Namespace) -> WorkloadSpec:
    """The workload that the arguments name. Raises `ConfigError`."""
    kind, file, form = args.workload, None, args.format
    if kind not in KINDS[:3]:
        if not Path(kind).is_file():
            raise ConfigError(
                f"--workload: expected {', '.join(KINDS[:3])} or a file, got '{kind}'"
            )
        file = kind
        form = form or _look(Path(file))
        kind = "prompts" if form == "prompts" else "trace"
    if args.ramp_to is not None and math.isinf(args.rate):
        raise ConfigError("--ramp-to needs --rate, the request rate at the start of a round")
    if args.think < 0 or not math.isfinite(args.think):
        raise ConfigError(f"--think: expected seconds, got {args.think}")
    given = {f.name: getattr(args, f.name) for f in fields(WorkloadSpec) if hasattr(args, f.name)}
    given |= {"kind": kind, "file": file, "format": None if kind == "prompts" else form}
    return WorkloadSpec(**given)


def _look(path: Path) -> str:
    """The format of a file by its first line."""
    if path.suffix.lower() == ".csv":
        return "azure"
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline()
    if any(f'"{key}"' in first for key in ("prompt", "messages", "conversations")):
        return "prompts"
    return guess_format(path)
