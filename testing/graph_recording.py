"""CUDA graphs played on a CPU: operators are recorded once, and a replay runs them again on the
very tensors of the recording, without any Python of the pass.

So what holds for a real graph holds here: a tensor that is made anew each step is read where it was
when the pass was recorded, and results stand where they stood. Refused while recording, as a real
capture does: whatever needs a value on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from octavo.testing.conformance.device import READS


class Refused(RuntimeError):
    """What a real capture does not allow."""


Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any], Any]
"""What is called again with which arguments, and what it gave."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """calls: in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in READS:
            raise Refused(f"operation not permitted when stream is capturing: {name}")
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def kernels_recorded(recorder: Recorder) -> Iterator[None]:
    """Launches of Triton's interpreter are recorded as one call each."""
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        yield
        return
    original = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            original(self, *args, **kwargs)
        recorder.calls.append((_launch_again, (original, self, args, kwargs), {}, None))

    GridExecutor.__call__ = launch
    try:
        yield
    finally:
        GridExecutor.__call__ = original


def _launch_again(original: Any, executor: Any, args: Any, kwargs: Any) -> None:
    original(executor, *args, **kwargs)


class Graph:
    """A recorded pass."""

    def __init__(self, owner: RecordingCapture, calls: Sequence[Call]) -> None:
        self.owner, self.calls = owner, calls

    def replay(self) -> None:
        self.owner.num_replays += 1
        for func, args, kwargs, before in self.calls:
            made = func(*args, **kwargs)
            for old, new in zip(_tensors(before), _tensors(made), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


class RecordingCapture:
    """In place of `CudaCapture`."""

    def __init__(self) -> None:
        self.num_captures = self.num_replays = 0

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        self.num_captures += 1
        recorder = Recorder()
        # Compiled code hides its operators, and is not entered beneath a dispatch mode.
        with torch.compiler.set_stance("force_eager"), kernels_recorded(recorder), recorder:
            output = run()
        return Graph(self, recorder.calls), output

    def free_bytes(self) -> int:
        return 1 << 30

    def release(self) -> None:
        """Nothing was taken."""
