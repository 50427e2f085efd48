"""An executor without a model, to test and measure everything around it: also as a plugin, with
`plugins.load: [octavo.testing.instant_executor]` and `executor.kind: instant`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time

import numpy as np
from pydantic import Field

from octavo.core.contracts.executor import Executor, ExecutorContext, Ticket, WorkerReport
from octavo.core.contracts.model import KVSpec
from octavo.core.contracts.provider import Options
from octavo.core.messages import LogitMasks, StepPlan, StepResult


class InstantOptions(Options):
    """What it pretends to be."""

    vocab_size: int = Field(default=285, gt=0, description="Rows of the head.")
    token: int = Field(default=64, ge=0, description="What every row samples; 64 is the letter a")
    step_s: float = Field(default=0.0, ge=0, description="Seconds that a step takes.")
    load_s: float = Field(default=0.0, ge=0, description="Seconds that loading takes.")
    load_exit: bool = Field(default=False, description="Whether the process ends while it loads.")
    raise_token: int | None = Field(default=None, description="A prompt with it makes a step raise")
    hang_token: int | None = Field(default=None, description="A prompt with it makes a step hang.")
    freeze_token: int | None = Field(
        default=None, description="A prompt with it makes a step hang in C, holding the interpreter"
    )
    kill_token: int | None = Field(
        default=None, description="A prompt with it ends the process by SIGKILL."
    )


class InstantExecutor(Executor):
    """Answers every plan with one and the same token, and breaks when a prompt asks for it."""

    name = "instant"
    Options = InstantOptions
    computes = False

    def __init__(self, options: InstantOptions, context: ExecutorContext) -> None:
        self._options = options
        self._results: dict[int, StepResult] = {}

    def start(self) -> WorkerReport:
        time.sleep(self._options.load_s)
        if self._options.load_exit:
            os._exit(3)
        return WorkerReport(
            kv_specs=(KVSpec(0, "full", 1, 1, 1),),
            num_parameters=0,
            weight_bytes=0,
            activation_bytes=0,
            block_bytes=8,
            kv_budget=1 << 20,
            vocab_size=self._options.vocab_size,
            dtype="float32",
            step_token_limit=2048,
        )

    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Nothing is kept."""

    def submit(self, plan: StepPlan) -> Ticket:
        for row in plan.admitted:
            self._misbehave(set(row.token_ids.tolist()))
        tokens = np.full((len(plan.sample_rows), 1), self._options.token, np.int32)
        self._results[plan.step] = StepResult(step=plan.step, token_ids=tokens)
        return Ticket(plan.step)

    def _misbehave(self, prompt: set[int]) -> None:
        if self._options.raise_token in prompt:
            raise RuntimeError("the prompt asked for it")
        if self._options.kill_token in prompt:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._options.freeze_token in prompt:
            ctypes.PyDLL(None).sleep(3600)
        if self._options.hang_token in prompt:
            while True:
                time.sleep(3600)

    def sample(self, ticket: Ticket, masks: LogitMasks | None) -> None:
        """The token is known already."""

    def collect(self, ticket: Ticket) -> StepResult:
        if self._options.step_s:
            time.sleep(self._options.step_s)
        return self._results.pop(ticket)
