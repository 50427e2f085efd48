"""A step on its way: the forward pass, then the result that is waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.messages import StepPlan, StepResult
from octavo.engine.worker.clock import DeviceClock
from octavo.engine.worker.logprobs import PendingPromptLogprobs
from octavo.engine.worker.sampling_step import LaunchedDraw, SamplingStep


@dataclass(slots=True)
class ForwardPass:
    """A forward pass that was launched."""

    plan: StepPlan
    slots: NDArray[np.intp]
    """Of the rows that sample."""
    prompt_logprobs: list[PendingPromptLogprobs]
    prepare_s: float
    """Seconds from the plan to the launch."""
    began: Any
    ended: Any
    """Marks of the device's clock."""


@dataclass(slots=True)
class SamplingInputs:
    """What sampling needs of a forward pass, and nothing after: a result that is waited for holds
    none of it."""

    hidden: torch.Tensor
    """[R, E] of the rows that sample, with padding behind them."""
    logits: torch.Tensor | None
    """float32[R, V]; None where a graph may draw without them, or no row samples."""


@dataclass(slots=True)
class PendingResult:
    """A step whose tokens are being drawn."""

    forward: ForwardPass
    launched: LaunchedDraw | None
    """None when no row samples."""
    began: Any
    ended: Any
    """Marks of the device's clock, around the draw."""
    copy_seconds: Callable[[], float]

    @torch.inference_mode()
    def wait(self, sampling_step: SamplingStep, clock: DeviceClock) -> StepResult:
        """The result, once the device has come that far."""
        forward = self.forward
        result = StepResult(
            step=forward.plan.step,
            token_ids=np.zeros((forward.slots.size, 1), np.int32),
            prompt_logprobs=[pending.take() for pending in forward.prompt_logprobs],
            prepare_s=forward.prepare_s,
            forward_s=clock.seconds(forward.began, forward.ended),
            sample_s=clock.seconds(self.began, self.ended),
            copy_s=self.copy_seconds(),
        )
        if self.launched is not None:
            finished = sampling_step.finish(self.launched)
            result.token_ids[:, 0] = finished.token_ids
            result.logprobs = finished.logprobs
            if finished.errors:
                result.errors = {row: each.message for row, each in finished.errors.items()}
                result.faults = [row for row, each in finished.errors.items() if each.fault]
        return result
