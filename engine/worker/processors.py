"""The device logits processors of a worker, and which slots each has something to do for.

Legend: S slots, R sampling rows, V vocabulary, P processors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.contracts.logits_processor import DeviceLogitsProcessor
from octavo.core.errors import PluginFault
from octavo.core.messages import AdmittedRow
from octavo.engine.processor_faults import Failure, Faults, attached_request


class ProcessorSet:
    """Calls each processor with its own slots only. Lives in the worker; not thread-safe.

    errors: by slot, of requests that a processor refused or failed for; kept until the slot is
    released or attached again. Such a slot is left alone by every processor.
    """

    def __init__(
        self,
        processors: Sequence[DeviceLogitsProcessor],
        max_num_seqs: int,
        names: Sequence[str] = (),
    ) -> None:
        """`processors` in the order in which they edit; `names` are those of their plugins."""
        self.processors = tuple(processors)
        self.names = tuple(names) or tuple(type(item).__name__ for item in processors)
        if len(self.names) != len(self.processors):
            raise ValueError(f"{len(self.processors)} processors, but {len(self.names)} names")
        self.errors: dict[int, Failure] = {}
        self._attached = np.zeros((len(self.processors), max_num_seqs), np.bool_)
        self._counts = [0] * len(self.processors)
        self._faults = Faults()

    @property
    def active(self) -> bool:
        """Whether some slot has a processor. `apply` and `accept` cost nothing otherwise."""
        return any(self._counts)

    def device_bytes(self) -> int:
        """What tables of processors may come to take."""
        return sum(processor.device_bytes() for processor in self.processors)

    def attach(self, row: AdmittedRow) -> None:
        """A sequence got a slot; `token_ids` past `num_prompt` were generated in an earlier life.
        Never raises for what a processor does: see `errors`."""
        self.release(row.slot)
        request = attached_request(row)
        for number, processor in enumerate(self.processors):
            slots = np.array([row.slot], np.intp)
            wanted, ok = self._guard(number, slots, processor.attach, request)
            if not ok:
                return
            if wanted:
                self._attached[number, row.slot] = True
                self._counts[number] += 1

    def release(self, slot: int) -> None:
        """The slot is free. Releasing a free slot does nothing."""
        self.errors.pop(slot, None)
        self._detach(slot)

    def apply(self, logits: torch.Tensor, slots: NDArray[np.intp]) -> None:
        """Edit float32[R, V] in place; row i belongs to `slots[i]`."""
        for number, processor in enumerate(self.processors):
            if not self._counts[number]:
                continue
            rows = self._attached[number, slots].nonzero()[0]
            if rows.size:
                mine = slots[rows]
                shape = logits.shape
                self._guard(number, mine, processor.apply, logits, mine, rows)
                if logits.shape != shape:  # nobody's row is where it was
                    raise PluginFault(
                        f"logits processor '{self.names[number]}' failed: it gave the logits the "
                        f"shape {list(logits.shape)}, expected {list(shape)} as they came"
                    )

    def accept(self, slots: NDArray[np.intp], token_ids: NDArray[np.int32]) -> None:
        """The tokens int32[n] were sampled and kept for the slots intp[n]."""
        for number, processor in enumerate(self.processors):
            if not self._counts[number]:
                continue
            rows = self._attached[number, slots].nonzero()[0]
            if rows.size:
                mine = slots[rows]
                self._guard(number, mine, processor.accept, mine, token_ids[rows])

    def rollback(self, slot: int, num_tokens: int) -> None:
        """Take back the last accepted tokens of a slot."""
        for number, processor in enumerate(self.processors):
            if self._attached[number, slot]:
                slots = np.array([slot], np.intp)
                self._guard(number, slots, processor.rollback, slot, num_tokens)

    def _guard(
        self, number: int, slots: NDArray[np.intp], call: Callable[..., object], *args: object
    ) -> tuple[object, bool]:
        """`(result, True)`, or `(None, False)` after noting the error for these slots."""
        result, failure = self._faults.run(self.names[number], call, *args)
        if failure is None:
            return result, True
        for slot in slots.tolist():
            self.errors.setdefault(slot, failure)
            self._detach(slot)
        return None, False

    def _detach(self, slot: int) -> None:
        for number in range(len(self.processors)):
            if self._attached[number, slot]:
                self._attached[number, slot] = False
                self._counts[number] -= 1
                # What this raises has no request left that it could belong to.
                self._faults.run(self.names[number], self.processors[number].detach, slot)
