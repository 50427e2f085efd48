"""How long a step takes: from what it computes (`StepShape`) to seconds.

`RooflineModel` follows the roofline model (Williams et al., CACM 52(4), 2009) from the facts of an
accelerator and a model; `FittedModel` is a non-negative least squares fit of measured steps. Both
see a step through `StepTracker`, which follows plans as a worker does.

Legend: B rows of the batch, T tokens computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.core.messages import StepPlan
from octavo.plugins.executors.accelerators import Accelerator
from octavo.plugins.executors.model_size import ModelSize, bits

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepShape:
    """prefill: tokens of rows that compute a prompt (or recompute). decodes: rows that compute one
    token. sampled: rows that sample. context: tokens of KV that attention reads, summed over the
    rows. pairs: query-key pairs of the prefill rows. window_context, window_pairs: the same in
    layers with a window. copied, swapped: tokens of KV copied inside the device, and between device
    and host."""

    prefill: int
    decodes: int
    sampled: int
    context: int
    pairs: int
    window_context: int = 0
    window_pairs: int = 0
    copied: int = 0
    swapped: int = 0

    @property
    def tokens(self) -> int:
        return self.prefill + self.decodes


class StepTracker:
    """Follows plans; knows how many tokens of each slot are computed. num_slots: slots at most.
    window: of the layers that have one."""

    def __init__(self, num_slots: int, window: int | None = None) -> None:
        self._computed = np.zeros(num_slots, np.int64)
        self._window = window
        self._layout = -1
        self._slots: NDArray[np.intp] = np.empty(0, np.intp)

    def follow(self, plan: StepPlan) -> StepShape:
        """Take in a plan and describe it."""
        for row in plan.admitted:
            self._computed[row.slot] = row.num_computed
        if plan.layout != self._layout:
            self._layout, self._slots = plan.layout, plan.slots.astype(np.intp)
        slots, counts, decodes = self._slots, plan.counts, plan.num_decodes
        before = self._computed[slots]
        after = before + counts
        self._computed[slots] = after
        prefill = pairs = window_context = window_pairs = 0
        if decodes < len(slots):
            new, old = counts[decodes:].astype(np.int64), before[decodes:]
            prefill = int(new.sum())
            pairs = int((new * old + new * (new + 1) // 2).sum())
        if self._window is not None:
            window_context = int(np.minimum(after, self._window + counts - 1).sum())
            if prefill:
                window_pairs = int(_window_pairs(old, new, self._window).sum())
        copied, swapped = _copied(plan.copies)
        return StepShape(
            prefill=prefill,
            decodes=decodes,
            sampled=len(plan.sample_rows),
            context=int(after.sum()),
            pairs=pairs,
            window_context=window_context,
            window_pairs=window_pairs,
            copied=copied,
            swapped=swapped,
        )


def _window_pairs(old: NDArray[np.int64], new: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    """Sum over the positions p of old .. old + new - 1 of min(p + 1, window)."""
    growing = np.clip(window - old, 0, new)  # positions that see everything before them
    pairs: NDArray[np.int64] = (
        growing * old + growing * (growing + 1) // 2 + (new - growing) * window
    )
    return pairs


def _copied(copies: NDArray[np.int32]) -> tuple[int, int]:
    """Tokens copied inside the device, and from or to the host. Groups share block numbers, so that
    one group's copies stand for all."""
    if not copies.shape[1]:
        return 0, 0
    first = copies[:, copies[1] == copies[1, 0]]
    inside = first[0] == 0
    return int(first[4][inside].sum()), int(first[4][~inside].sum())


class CostModel(Protocol):
    """Seconds of a step."""

    def seconds(self, shape: StepShape) -> float: ...


class RooflineModel:
    """From facts. A step's time is its overhead, the linear layers, the head, attention and copies,
    one after another; each part takes the longer of its arithmetic and its memory traffic."""

    def __init__(self, device: Accelerator, model: ModelSize, dtype: str) -> None:
        bandwidth = device.memory_bandwidth * device.bandwidth_efficiency
        flops = device.flops_of(dtype)
        linear = device.flops_of(_math_type(dtype, model.weight_bits)) * device.compute_efficiency
        attention = flops * device.attention_efficiency
        full = model.num_layers - model.num_windowed
        layer_bytes = model.kv_bytes_per_token / model.num_layers
        layer_flops = 4 * model.num_heads * model.head_size  # q k^T and the weighted sum of v
        self._model, self._overhead = model, device.step_overhead
        # What does not depend on the step: seconds per token, byte, pair, ...
        self._token = 2 * model.active_params / linear
        self._byte = 1 / bandwidth
        self._dense_bytes = model.read_bytes(1)
        self._head_read = model.head_params * model.other_bits / 8 / bandwidth
        self._head_row = 2 * model.head_params / (flops * device.compute_efficiency)
        self._full_read = full * layer_bytes / bandwidth
        self._window_read = model.num_windowed * layer_bytes / bandwidth
        self._full_pair = full * layer_flops / attention
        self._window_pair = model.num_windowed * layer_flops / attention
        self._copy = 2 * model.kv_bytes_per_token / bandwidth
        self._swap = model.kv_bytes_per_token / device.host_bandwidth

    def seconds(self, shape: StepShape) -> float:
        tokens = shape.tokens
        read = self._model.read_bytes(tokens) if self._model.num_experts else self._dense_bytes
        linear = max(tokens * self._token, read * self._byte)
        head = max(shape.sampled * self._head_row, self._head_read) if shape.sampled else 0.0
        attention = max(
            shape.pairs * self._full_pair + shape.window_pairs * self._window_pair,
            shape.context * self._full_read + shape.window_context * self._window_read,
        )
        copies = shape.copied * self._copy + shape.swapped * self._swap
        return self._overhead + linear + head + attention + copies


def _math_type(dtype: str, weight_bits: int) -> str:
    """In which type the linear layers multiply: 8-bit weights in fp8, fewer bits are expanded."""
    return "fp8" if weight_bits == 8 and bits(dtype) > 8 else dtype


FEATURES = ("step", "prefill", "decodes", "sampled", "context", "pairs")
"""What `FittedModel` is linear in; `step` is 1."""


@dataclass(frozen=True)
class FittedModel:
    """Seconds per unit of each of `FEATURES`, none negative; copies take no time. error: mean
    absolute error of the fit as a fraction of the mean step."""

    weights: tuple[float, ...]
    error: float

    def seconds(self, shape: StepShape) -> float:
        one, prefill, decodes, sampled, context, pairs = self.weights
        return (
            one
            + prefill * shape.prefill
            + decodes * shape.decodes
            + sampled * shape.sampled
            + context * shape.context
            + pairs * shape.pairs
        )


def step_records(shapes: Sequence[StepShape], seconds: Sequence[float]) -> dict[str, list[float]]:
    """Columns as `fit` reads them, one entry a step."""
    names = [field.name for field in fields(StepShape)]
    columns: dict[str, list[float]] = {n: [getattr(s, n) for s in shapes] for n in names}
    return {"tokens": [s.tokens for s in shapes], **columns, "seconds": list(seconds)}


def fit(records: Mapping[str, Sequence[float]]) -> FittedModel:
    """Fit measured steps, as `step_records` gives them. Raises `ValueError` when they are not
    such."""
    missing = [n for n in ("seconds", *FEATURES[1:]) if n not in records]
    if missing:
        raise ValueError(f"the step records lack {', '.join(missing)}")
    seconds = np.asarray(records["seconds"], np.float64)
    columns = [np.ones(len(seconds))] + [np.asarray(records[n], np.float64) for n in FEATURES[1:]]
    if len(seconds) < len(FEATURES) or any(len(c) != len(seconds) for c in columns):
        raise ValueError(
            f"expected columns of one length, at least {len(FEATURES)} steps, got "
            f"{sorted({len(c) for c in (*columns, seconds)})}"
        )
    matrix = np.stack(columns, axis=1)
    weights = nonnegative_least_squares(matrix, seconds)
    # Total time is what a simulation adds up: the fit is unbiased over the run.
    total = float((matrix @ weights).sum())
    if total > 0:
        weights *= float(seconds.sum()) / total
    error = float(np.abs(matrix @ weights - seconds).mean() / seconds.mean())
    return FittedModel(tuple(map(float, weights)), error)


def nonnegative_least_squares(matrix: Float64, target: Float64) -> Float64:
    """x >= 0 that minimizes |matrix x - target|, by the active set method (Lawson and Hanson,
    Solving Least Squares Problems, 1974, chapter 23). Columns are scaled to unit length first."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    a = matrix / scale
    count = a.shape[1]
    x, passive = np.zeros(count), np.zeros(count, bool)
    tolerance = 1e-10 * float(np.abs(a.T @ target).max(initial=0.0))
    for _ in range(10 * count):
        gradient = a.T @ (target - a @ x)
        gradient[passive] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        passive[best] = True
        x = _solve_passive(a, target, x, passive)
    unscaled: Float64 = x / scale
    return unscaled


def _solve_passive(a: Float64, target: Float64, x: Float64, passive: NDArray[np.bool_]) -> Float64:
    """Least squares over the passive columns; those that would turn negative leave the set."""
    while True:
        solution = np.zeros_like(x)
        solution[passive] = np.linalg.lstsq(a[:, passive], target, rcond=None)[0]
        wrong = passive & (solution <= 0)
        if not wrong.any():
            return solution
        step = float((x[wrong] / np.maximum(x[wrong] - solution[wrong], 1e-300)).min())
        x = x + step * (solution - x)
        passive &= x > 1e-15
        x[~passive] = 0.0
