"""What is measured, in the order of what matters most, with what it takes as far as it is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

ATTENTION: dict[str, dict[str, Any]] = {
    "flashinfer": {"backend": "flashinfer"},
    "triton": {"backend": "triton"},
    "mixed": {"prefill": "flashinfer", "decode": "triton"},
    "torch": {"backend": "torch"},
    "flex": {"backend": "flex"},
    "cpu": {"backend": "cpu"},
}
RUNNERS = ("cuda_graph", "triton", "compile", "eager")
CAPTURED = [1, 32, 256]
GIB = 2**30


@dataclass(frozen=True)
class Part:
    """kind: one of `measure.PARTS`. given: its settings. estimate: seconds it may take."""

    name: str
    kind: str
    estimate: float
    given: dict[str, Any] = field(default_factory=dict)


def full_parts() -> list[Part]:
    """On a GPU, for the default of seven minutes. What most users run comes first, `triton` before
    `flashinfer`, which may compile for long or not be there."""
    parts = [
        Part(
            "device",
            "facts",
            20,
            {"sizes": [GIB, 2 * GIB, 4 * GIB], "dtype": "bfloat16", "size": 8192},
        )
    ]
    both = ("triton", "flashinfer")
    parts += [_engine("llama-1b", a, "cuda_graph") for a in both]
    parts += [_engine("llama-1b", a, "triton") for a in both]
    parts += [_overlap("llama-1b")]
    parts += [_engine("demo", a, "cuda_graph") for a in both]
    parts += list(_comparisons())
    parts += [_overlap("demo")]
    parts += [_engine("demo", a, "triton") for a in both]
    done = {part.name for part in parts}
    for attention in ("mixed", *both):
        for model in ("llama-1b", "demo"):
            rest = [_engine(model, attention, runner) for runner in RUNNERS]
            parts += [part for part in rest if part.name not in done]
    return [*parts, *(_engine(model, "torch", "eager") for model in ("llama-1b", "demo"))]


_SIZES = {
    "dtype": "bfloat16",
    "context": 1024,
    "batches": [1, 32, 256],
    "prompts": [2048, 8000],
    "max_num_batched_tokens": 8192,
    "warm": 8,
    "steps": 48,
    "rounds": 3,
}


def _engine(model: str, attention: str, runner: str) -> Part:
    given = _SIZES | {"model": model, "attention": ATTENTION[attention], "graph": runner}
    if attention == "torch":  # it gathers the whole context of every row
        given["batches"] = [1, 32]
    if runner == "cuda_graph":
        given["graph"] = {"name": runner, "capture_sizes": CAPTURED}
    estimate = 30 if runner in ("cuda_graph", "compile") else 20
    return Part(f"{model} {attention} {runner}", "engine", estimate, given)


def _overlap(model: str) -> Part:
    """With the sizes that are captured by default, so that its start tells what that costs."""
    given = _SIZES | {"model": model, "attention": ATTENTION["triton"], "graph": "cuda_graph"}
    given |= {"batches": [32, 256], "prompts": []}
    return Part(f"overlap {model}", "overlap", 50, given)


def _comparisons() -> Iterator[Part]:
    given = _SIZES | {"model": "demo", "prompts": [], "batches": [32], "context": 512}
    given |= {"attention": ATTENTION["triton"], "graph": "triton", "rounds": 6, "seconds": 20.0}
    given |= {"requests": 64, "input_len": 256, "output_len": 64, "check_prompts": 8}
    graphs = {"name": "cuda_graph", "capture_sizes": [1, 2, 4, 8, 16, 32]}
    sides: dict[str, Any] = {
        name: {"attention": ATTENTION[name], "graph": graphs} for name in ("flashinfer", "triton")
    }
    yield Part("compare attention", "compare", 60, given | {"sides": sides})
    sides = {"cuda_graph": {"graph": graphs}, "triton": {"graph": "triton"}}
    yield Part("compare graph", "compare", 60, given | {"sides": sides})


def quick_parts(device: str) -> list[Part]:
    """A rehearsal with a tiny model, the same way on a CPU and a GPU: figures mean little."""
    cuda = device == "cuda"
    sizes = _SIZES | {
        "model": "tiny",
        "dtype": "bfloat16" if cuda else "float32",
        "context": 24,
        "batches": [1, 2, 4],
        "prompts": [32, 64],
        "max_num_batched_tokens": 64,
        "warm": 1,
        "steps": 4,
        "rounds": 1,
        "executor": {} if cuda else {"num_threads": 1},
    }
    pairs = [("torch", "eager"), ("flex", "eager"), ("cpu", "eager")]
    if cuda:
        pairs = [("flashinfer", "cuda_graph"), ("triton", "cuda_graph"), ("torch", "eager")]
    parts = [Part("device", "facts", 5, {"sizes": [2**23], "dtype": "float32", "size": 256})]
    for attention, runner in pairs:
        given = sizes | {"attention": ATTENTION[attention], "graph": runner}
        if attention == "flex":  # slow where it is not compiled
            given |= {"batches": [1], "prompts": [32]}
        parts.append(Part(f"tiny {attention} {runner}", "engine", 5, given))
    attention, runner = pairs[1] if cuda else pairs[0]
    given = sizes | {"attention": ATTENTION[attention], "graph": runner}
    given |= {"batches": [2, 4], "prompts": []}
    parts.append(Part("overlap tiny", "overlap", 8, given))
    sides = {name: {"attention": ATTENTION[name], "graph": graph} for name, graph in pairs[::2]}
    given = given | {"batches": [4], "rounds": 2, "seconds": 5.0, "requests": 4, "input_len": 16}
    given |= {"output_len": 4, "check_prompts": 2, "sides": sides}
    parts.append(Part("compare attention", "compare", 15, given))
    return parts
