"""The engine's side of its extensions: what they may read, and when they are called."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.engine_extension import EngineExtension, EngineState, SequenceView
from octavo.core.errors import ContractError, OctavoError, RequestError, ReturnedWrong, nearest
from octavo.core.messages import EngineRequest
from octavo.engine.observers import overrides
from octavo.engine.scheduler.scheduler import Scheduler


class SchedulerState(EngineState):
    """A scheduler as extensions see it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def num_steps(self) -> int:
        return self._scheduler.num_steps

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    @property
    def num_free_slots(self) -> int:
        return self._scheduler.slots.num_free

    @property
    def max_num_batched_tokens(self) -> int:
        return self._scheduler.limits.max_num_batched_tokens

    def sequence(self, handle: int) -> SequenceView | None:
        sequence = self._scheduler.sequences.get(handle)
        if sequence is None:
            return None
        slots, slot = self._scheduler.slots, sequence.slot
        return SequenceView(
            handle=handle,
            request_id=sequence.request.request_id,
            index=sequence.request.index,
            slot=slot,
            arrival=sequence.arrival,
            num_prompt=sequence.num_prompt,
            num_tokens=len(sequence.known) if slot < 0 else int(slots.num_tokens[slot]),
            num_computed=0 if slot < 0 else int(slots.num_computed[slot]),
            max_tokens=sequence.request.max_tokens,
            num_preemptions=sequence.num_preemptions,
            swapped=sequence.swapped is not None,
            lost_to=sequence.lost_to,
        )

    def handles(self) -> Sequence[int]:
        sequences = self._scheduler.sequences
        return sorted(sequences, key=lambda handle: sequences[handle].slot < 0)

    def next_waiting(self) -> int | None:
        head = self._scheduler.policy.peek()
        return None if head is None else head.handle

    def waits_for_parent(self, handle: int) -> bool:
        sequence = self._scheduler.sequences[handle]
        parent = sequence.request.parent
        found = None if parent is None else self._scheduler.sequences.get(parent)
        return found is not None and sequence in found.children

    def block_states(self) -> NDArray[np.uint8] | None:
        return self._scheduler.kv.block_states()


class Extensions:
    """Calls only what an extension overrides, as looked up once."""

    def __init__(self, extensions: Sequence[EngineExtension]) -> None:
        self.all = extensions
        self._gates = self._overriding("admit")
        self.held: set[int] = set()
        """Handles of the requests that extensions hold."""
        self.on_queued = [each.on_queued for each in self._overriding("on_queued")]
        self.on_plan = [each.on_plan for each in self._overriding("on_plan")]
        self.on_commit = [each.on_commit for each in self._overriding("on_commit")]
        self.on_finished = [each.on_finished for each in self._overriding("on_finished")]
        self.host_processors = [one for each in extensions for one in each.host_processors()]
        self._metrics = [each.metrics for each in self._overriding("metrics")]
        self._queries: dict[str, Callable[..., Any]] = {}
        for extension in extensions:
            for name, answer in extension.queries().items():
                if name in self._queries:
                    raise ContractError(
                        f"{type(extension).__name__}.queries: another extension answers '{name}'"
                    )
                self._queries[name] = answer

    def _overriding(self, method: str) -> list[EngineExtension]:
        return [each for each in self.all if overrides(each, EngineExtension, method)]

    @property
    def has_gates(self) -> bool:
        """Whether an extension may hold or refuse requests."""
        return bool(self._gates)

    def admit(self, request: EngineRequest, first: int = 0) -> bool:
        """Whether every gate, from the first on, lets the request through; one that does not has
        it now. Raises `RequestError` where a gate refuses it."""
        for gate in self._gates[first:]:
            if not gate.admit(request):
                self.held.add(request.handle)
                return False
        return True

    def poll(self, wait_s: float) -> Iterator[tuple[EngineRequest, RequestError | None]]:
        """Requests that are held no longer, with None, or with why they are refused. wait_s: how
        long to wait for the first."""
        for index, gate in enumerate(self._gates):
            for request, error in gate.poll(wait_s):
                self._let_go(gate, "poll", request.handle)
                wait_s = 0.0
                if error is not None:
                    yield request, error
                    continue
                try:
                    if self.admit(request, index + 1):
                        yield request, None
                except RequestError as refusal:
                    yield request, refusal

    def abort(self, handles: Sequence[int]) -> list[int]:
        """Forget those of these requests that are held, and return their handles."""
        gone: list[int] = []
        if self.held:
            for gate in self._gates:
                for handle in gate.abort(handles):
                    self._let_go(gate, "abort", handle)
                    gone.append(handle)
        return gone

    def _let_go(self, gate: EngineExtension, method: str, handle: int) -> None:
        if handle not in self.held:
            raise ReturnedWrong(gate, method, handle, "requests that it holds")
        self.held.remove(handle)

    def query(self, name: str, *args: Any) -> Any:
        """What an extension answers. Raises `OctavoError` where none knows the question."""
        if name not in self._queries:
            raise OctavoError(
                f"no engine extension answers '{name}'; {nearest(name, self._queries)}"
            )
        return self._queries[name](*args)

    def metrics(self) -> dict[str, Any]:
        """Of all extensions, by name."""
        return {name: value for source in self._metrics for name, value in source().items()}

    def close(self) -> None:
        """Close all of them, also where one raises."""
        with contextlib.ExitStack() as stack:
            for extension in reversed(self.all):
                stack.callback(extension.close)
