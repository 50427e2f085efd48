"""Engines under measurement: built from a part's settings, filled with sequences, stepped."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.bench.gpu.clocks import Clock
from octavo.bench.gpu.models import model_section
from octavo.core.errors import OctavoError
from octavo.core.messages import EngineRequest
from octavo.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.core.contracts.executor import Executor
    from octavo.core.registry import Registry
    from octavo.engine.core import EngineCore
    from octavo.engine.resolve import Resolved

BLOCK_SIZE = 16
ROOM = 384
"""Tokens that a sequence may generate: more than all steps of a part together."""
PROFILED_STEPS = 8
LONGEST_S = 4.0
"""Steps are measured for so long at most."""


class InvalidRun(OctavoError):
    """The engine did not do what was to be measured; the message says what."""


def engine_config(given: Mapping[str, Any], device: str, folder: Path) -> dict[str, Any]:
    """The configuration of an engine part, as in a YAML file. given: `model`, `dtype`, `attention`,
    `graph`, `context` (tokens a sequence has when decoding is measured), `batches`, `prompts`
    (lengths), `max_num_batched_tokens`, and perhaps `executor`."""
    most, longest = max(given["batches"]), max(given["prompts"], default=0)
    sequence = given["context"] + ROOM
    blocks = most * -(-sequence // BLOCK_SIZE) + -(-longest // BLOCK_SIZE) + 8
    model = model_section(given["model"], folder)
    length = max(sequence, longest + 1)
    return {
        "model": {**model, "dtype": given["dtype"], "max_model_len": length},
        "kv_cache": {"block_size": BLOCK_SIZE, "num_blocks": blocks, "prefix_caching": False},
        "scheduler": {
            "max_num_seqs": most,
            "max_num_batched_tokens": given["max_num_batched_tokens"],
        },
        "attention": given["attention"],
        "graph": {"runner": given["graph"]},
        "executor": {"device": device, **given.get("executor", {})},
    }


def settle(config: dict[str, Any]) -> tuple[Resolved, Registry]:
    """The resolved configuration. Raises the `OctavoError` that says what cannot be had here."""
    from octavo.core.registry import Registry
    from octavo.engine.resolve import resolve
    from octavo.frontend.config import load_config

    registry = Registry.discover()
    return resolve(load_config(mapping=config), registry), registry


@contextmanager
def running(resolved: Resolved, registry: Registry) -> Iterator[tuple[EngineCore, dict[str, Any]]]:
    """An engine and its `start_facts`. Nothing of the one before it is left on the device, once the
    caller has let go of it."""
    from octavo.engine.builder import build_engine

    _forget()
    free = _free_bytes()
    started = time.perf_counter()
    engine = build_engine(resolved, registry)
    facts = start_facts(engine.report.as_dict(), resolved.model_config)
    facts["seconds"] = time.perf_counter() - started
    if free is not None:
        facts["taken_bytes"] = free - (_free_bytes() or 0)
    try:
        yield engine, facts
    finally:
        engine.close()
        _forget()


def _forget() -> None:
    """Free what engines before have left: compiled code, which is kept by the class of a layer and
    for a few engines at most, and memory."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _free_bytes() -> int | None:
    import torch

    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def start_facts(report: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """What a start took, and what floors are computed from. report: the engine's. model: its
    config.json. Bytes, seconds."""
    head = model["vocab_size"] * model["hidden_size"]
    tied = bool(model.get("tie_word_embeddings"))
    each = report["weight_bytes"] / report["num_parameters"]
    head_size = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    chosen = {choice["kind"]: choice["name"] for choice in report["plugins"]}
    return {
        "phases": report["phases"],
        "weight_bytes": report["weight_bytes"],
        "num_parameters": report["num_parameters"],
        "head_parameters": head,
        "tied": tied,
        "embedding_bytes": 0 if tied else int(head * each),
        "kv_token_bytes": report["kv_bytes"] / report["num_blocks"] / report["block_size"],
        "num_layers": model["num_hidden_layers"],
        "attention_width": model["num_attention_heads"] * head_size,
        "activation_bytes": report["activation_bytes"],
        "graphs": {
            "number": report["num_graphs"],
            "bytes": report["graph_bytes"],
            "estimated_bytes": report["graph_bytes_estimated"],
        },
        "memory": report["memory"],
        "chosen": chosen,
        "notes": list(report["notes"]),
    }


@dataclass
class Steps:
    """seconds: of each step, by the device's clock. host: by the host's, a step. kv_tokens: in
    context of all rows together, mean. phases: of the host's seconds a step. computed: seconds a
    step of forward pass and sampling, as the worker gives them."""

    seconds: list[float]
    host: float
    kv_tokens: float
    phases: dict[str, float]
    computed: float

    def as_dict(self) -> dict[str, Any]:
        """As plain data, with the median."""
        return {
            "step_s": float(np.median(self.seconds)),
            "steps_s": self.seconds,
            "host_s": self.host,
            "kv_tokens": self.kv_tokens,
            "phases_s": self.phases,
            "computed_s": self.computed,
        }


class Watch:
    """Seconds that the engine's thread spends in calls of its executor, in a `with` block."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.seconds = {"submit": 0.0, "sample": 0.0, "collect": 0.0}

    def __enter__(self) -> Watch:
        for name in self.seconds:
            setattr(self._executor, name, self._timed(name, getattr(self._executor, name)))
        return self

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds[name] += time.perf_counter() - started

        return timed

    def __exit__(self, *error: object) -> None:
        for name in self.seconds:
            delattr(self._executor, name)  # the class has it

    def phases(self, engine: Mapping[str, Any], steps: int) -> dict[str, float]:
        """Seconds a step: `schedule`, `prepare` and `commit` by the engine's own timing, `launch`
        of forward pass and sampling, `wait` for results. engine: the phases of its summary."""
        each = {name: seconds / steps for name, seconds in self.seconds.items()}
        own = {name: phase["mean_ms"] * 1e-3 for name, phase in engine.items()}
        return {
            "schedule": own["schedule"],
            "prepare": own["prepare"],
            "launch": max(0.0, each["submit"] + each["sample"] - own["prepare"]),
            "wait": each["collect"],
            "commit": own["commit"],
        }


class Rows:
    """The sequences of an engine that decode, one row a sequence."""

    def __init__(self, engine: EngineCore, clock: Clock, context: int) -> None:
        self._engine, self._clock, self._context = engine, clock, context
        self._draw = np.random.RandomState(0)
        self._handles: list[int] = []
        self._next = 1
        self._tokens = 0  # in context of all rows

    def _add(self, length: int, max_tokens: int) -> int:
        handle, self._next = self._next, self._next + 1
        vocab = self._engine.scheduler.limits.vocab_size
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add(
            EngineRequest(
                handle=handle,
                request_id=f"row-{handle}",
                token_ids=self._draw.randint(0, vocab, length, dtype=np.int32),
                sampling=sampling,
                seed=handle,
                max_tokens=max_tokens,
            )
        )
        return handle

    def _step(self) -> list[int]:
        """Handles that got a token."""
        outputs = self._engine.step()
        if outputs is None:
            return []
        errors = [finish.error for finish in outputs.finished if finish.error]
        if errors:
            raise InvalidRun(f"a request failed: {errors[0]}")
        handles: list[int] = outputs.handles.tolist()
        self._tokens += len(handles)
        return handles

    def grow(self, count: int) -> None:
        """Have `count` rows, all of which decode."""
        new = {self._add(self._context, ROOM) for _ in range(count - len(self._handles))}
        self._handles += new
        self._tokens += self._context * len(new)
        waiting = set(new)
        while waiting:
            waiting -= set(self._step())
        for _ in range(self._engine.executor.max_in_flight):
            self._step()  # planned while the last of them was computed

    def decode(self, warm: int, count: int) -> Steps:
        """Measure steps in which every row gets a token. Raises `InvalidRun` when one does not."""
        for _ in range(warm):
            self._step()
        clock, rows = self._clock, len(self._handles)
        self._engine.timing.reset()
        clock.synchronize()
        started = time.perf_counter()
        marks = [clock.mark()]
        context: list[int] = []
        with Watch(self._engine.executor) as watch:
            while len(context) < count and time.perf_counter() - started < LONGEST_S:
                context.append(self._tokens)
                got = self._step()
                if len(got) != rows:
                    raise InvalidRun(f"a step gave {len(got)} tokens for {rows} rows")
                marks.append(clock.mark())
        seconds = clock.between(marks)
        host = (time.perf_counter() - started) / len(context)
        phases = self._engine.timing.summary()["phases"]
        return Steps(
            seconds,
            host,
            float(np.mean(context)),
            watch.phases(phases, len(context)),
            (phases["forward"]["median_ms"] + phases["sample"]["median_ms"]) * 1e-3,
        )

    def busy(self) -> float | None:
        """Seconds a step in which the device works."""

        def run() -> None:
            for _ in range(PROFILED_STEPS):
                self._step()

        found = self._clock.busy(run)
        return None if found is None else found / PROFILED_STEPS

    def end(self) -> None:
        """Nothing runs any more."""
        self._engine.abort(self._handles)
        self._handles.clear()
        self._tokens = 0
        while self._engine.has_work():
            self._engine.step()

    def prompt(self, length: int, rounds: int) -> float:
        """Seconds until a prompt has its first token, the least of some rounds."""
        best = float("inf")
        for _ in range(1 + rounds):
            self._clock.synchronize()
            started = time.perf_counter()
            handle = self._add(length, 1)
            while handle not in self._step():
                pass
            self._clock.synchronize()
            best = min(best, time.perf_counter() - started)
            while self._engine.has_work():
                self._step()
        self._tokens = 0
        return best


Tell = Callable[..., None]
"""`tell(value, *path)`: a figure is there. path: its place in the part's result."""
