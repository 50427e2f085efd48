"""From a step's logits to its tokens: launched on the device, finished when the host needs them.

Legend: R sampling rows, m rows that want logprobs, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.contracts.sampler import SampledTokens, Sampler, SamplingBatch
from octavo.core.errors import PluginFault
from octavo.core.messages import Int32, LogitMasks, Logprobs
from octavo.engine.processor_faults import Failure
from octavo.engine.worker.logprobs import LogprobColumns
from octavo.engine.worker.masks import apply_masks
from octavo.engine.worker.mirror import Mirror
from octavo.engine.worker.processors import ProcessorSet
from octavo.engine.worker.sampling_state import SamplingState
from octavo.engine.worker.transfer import HostCopy
from octavo.kernels import upload

_NOTHING_ALLOWED = "no token can be sampled: every logit is masked, or some are not numbers"
_NO_NUMBERS = "no token can be sampled: some logits are not numbers, or a plugin masked them all"


Draw = Callable[[], tuple[torch.Tensor, torch.Tensor] | None]
"""See `GraphRunner.draw`."""


@dataclass(slots=True)
class LaunchedDraw:
    """Tokens of a step as the device draws them. slots: intp[R]. token_ids: int64[R], on the
    device. logprobs: of the rows that want them. places: where the mirror has placeholders, None
    as long as nothing had to go on without the tokens. fed: see `TokenFeed`. known: the tokens and
    which of them are valid, once the host and the processors have them; errors: by row, from then
    on."""

    slots: NDArray[np.intp]
    token_ids: torch.Tensor
    copy: HostCopy
    logprobs: LogprobColumns | None
    places: NDArray[np.intp] | None = None
    fed: bool = False
    known: tuple[Int32, NDArray[np.bool_]] | None = None
    errors: dict[int, Failure] = field(default_factory=dict)


@dataclass(frozen=True)
class SampledStep:
    """token_ids: int32[R]. errors: by row. logprobs: see `StepResult`."""

    token_ids: Int32
    errors: dict[int, Failure]
    logprobs: Logprobs | None


class SamplingStep:
    """Steps are launched one after the other and finished in the same order; `unfinished` are those
    in between, oldest first. Not thread-safe."""

    def __init__(
        self,
        mirror: Mirror,
        state: SamplingState,
        processors: ProcessorSet,
        sampler: Sampler,
        name: str = "",
    ) -> None:
        """name: the sampler's, for errors."""
        self._name = name or type(sampler).__name__
        self._mirror, self._state = mirror, state
        self._processors, self._sampler = processors, sampler
        self.unfinished: deque[LaunchedDraw] = deque()

    def reserve(self) -> None:
        """Another step is planned before the unfinished ones are known."""
        for launched in self.unfinished:
            if launched.places is None:
                launched.places = self._mirror.reserve(launched.slots)

    def launch(
        self,
        slots: NDArray[np.intp],
        compute_logits: Callable[[], torch.Tensor],
        masks: LogitMasks | None,
        draw: Draw | None = None,
    ) -> LaunchedDraw:
        """Draw a token for each of the slots intp[R] from float32[R, V]. draw: draws them from a
        captured graph, where nothing is asked of the rows that it cannot do. The processors see
        every token before they edit the next logits, so with one in use this waits for the step
        before, while the forward pass of this one runs."""
        batch = self._state.batch(slots, self._mirror.num_tokens[slots])
        if draw is not None and masks is None and self._unfiltered(batch):
            self._state.fill(batch)
            drawn = draw()
            if drawn is not None:
                token_ids, valid = drawn
                rows = len(slots)  # padding follows
                return self._launched(slots, SampledTokens(token_ids[:rows], valid[:rows]))
        logits = compute_logits()
        raw, wanted, num = self._raw(slots, logits, batch)
        if self._processors.active:
            for before in self.unfinished:
                self._accept(before)
            self._processors.apply(logits, slots)
        if masks is not None:
            apply_masks(logits, masks)
        sampled = self._sampler.sample(logits, batch)
        self._check(sampled, len(slots))
        logprobs = None
        if raw is not None:
            chosen = sampled.token_ids.index_select(0, upload(wanted, logits.device))
            logprobs = LogprobColumns(self._sampler, raw, chosen, wanted, num)
        return self._launched(slots, sampled, logprobs)

    def _check(self, sampled: object, rows: int) -> None:
        """What everything after the sampler relies on."""
        if isinstance(sampled, SampledTokens):
            tensors = sampled.token_ids, sampled.valid
            shapes = [list(item.shape) for item in tensors if isinstance(item, torch.Tensor)]
            if shapes == [[rows], [rows]]:
                return
            got = f"token_ids and valid of the shapes {shapes}"
        else:
            got = f"{type(sampled).__name__}"
        raise PluginFault(
            f"sampler '{self._name}' failed: it returned {got}, expected SampledTokens with "
            f"token_ids int64[{rows}] and valid bool[{rows}]",
            kind="sampler",
            name=self._name,
        )

    def _check_tokens(self, token_ids: NDArray[np.int64]) -> None:
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= self._state.vocab_size:
            raise PluginFault(
                f"sampler '{self._name}' failed: it drew token id {low if low < 0 else high}, "
                f"expected 0 to {self._state.vocab_size - 1}",
                kind="sampler",
                name=self._name,
            )

    def _unfiltered(self, batch: SamplingBatch) -> bool:
        """Whether the rows ask for nothing but a temperature."""
        filters = batch.any_top_k or batch.any_top_p or batch.any_min_p
        return not filters and batch.max_logprobs < 0 and not self._processors.active

    def _raw(
        self, slots: NDArray[np.intp], logits: torch.Tensor, batch: SamplingBatch
    ) -> tuple[torch.Tensor | None, NDArray[np.int32], NDArray[np.int32]]:
        """(logits before any edit, rows, alternatives) of the rows that want logprobs."""
        if batch.max_logprobs < 0:
            return None, _NO_ROWS, _NO_ROWS
        num = self._state.num_logprobs(slots)
        wanted = np.flatnonzero(num >= 0).astype(np.int32)
        if not wanted.size:
            return None, _NO_ROWS, _NO_ROWS
        return logits.index_select(0, upload(wanted, logits.device)), wanted, num[wanted]

    def _launched(
        self,
        slots: NDArray[np.intp],
        sampled: SampledTokens,
        logprobs: LogprobColumns | None = None,
    ) -> LaunchedDraw:
        copy = HostCopy((sampled.token_ids, sampled.valid))
        launched = LaunchedDraw(slots, sampled.token_ids, copy, logprobs)
        self.unfinished.append(launched)
        return launched

    def _accept(self, launched: LaunchedDraw) -> tuple[Int32, NDArray[np.bool_]]:
        """Wait for the tokens, once let the processors see them and note which rows have failed by
        then; the tokens, and which of them are valid."""
        if launched.known is not None:
            return launched.known
        drawn, valid = launched.copy.wait()
        self._check_tokens(drawn)
        slots, token_ids = launched.slots, drawn.astype(np.int32)
        launched.known = token_ids, valid
        if self._processors.active:
            self._processors.accept(slots[valid], token_ids[valid])
        if not valid.all():
            for row in np.flatnonzero(~valid).tolist():
                own = self._state.restricted(slots[row])  # by what its caller asked for
                launched.errors[row] = Failure(_NOTHING_ALLOWED if own else _NO_NUMBERS, not own)
        failed = self._processors.errors
        if failed:
            for row, slot in enumerate(slots.tolist()):
                if slot in failed:
                    launched.errors[row] = failed[slot]
        return launched.known

    def finish(self, launched: LaunchedDraw) -> SampledStep:
        """Wait for the tokens of the oldest unfinished step, and take them over."""
        assert self.unfinished[0] is launched, "steps finish in the order of their launch"
        token_ids, valid = self._accept(launched)
        if launched.places is None:
            self._mirror.append(launched.slots, token_ids)
        else:
            self._mirror.settle(launched.slots, launched.places, token_ids)
        self.unfinished.popleft()
        logprobs = None
        if launched.logprobs is not None:
            kept = valid[launched.logprobs.rows]
            logprobs = launched.logprobs.take(kept) if kept.any() else None
        return SampledStep(token_ids, launched.errors, logprobs)


_NO_ROWS = np.zeros(0, np.int32)
