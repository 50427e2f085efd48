"""What tensor code does behind the scenes: values read back to the host, copies that wait.

Two ways to see it without a GPU. `synchronisations` watches code that runs on the CPU and names
what would have waited for a device. `asynchronous_device` runs it on a device without values, where
nothing can be read, so that the branches for devices are taken and not those for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "unique", "equal")
"""Operators whose result the host needs, so that it waits for the device (or their shape does)."""

_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
_MASKS = (torch.bool, torch.uint8)


class WouldWait(RuntimeError):
    """The host would have waited for everything that was launched before."""


def _name(func: Any) -> str:
    name: str = func.name().removeprefix("aten::").split(".")[0]
    return name


def _masked(name: str, args: Sequence[Any]) -> bool:
    """Whether the operator indexes with a mask, whose number of hits is the result's shape."""
    return name in _INDEXING and any(
        index is not None and index.dtype in _MASKS for index in args[1]
    )


def synchronisations(call: Callable[[], Any]) -> set[str]:
    """Names of the operators of `call` that make the host wait on a GPU."""
    found: set[str] = set()

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = _name(func)
            if name in READS:
                found.add(name)
            elif _masked(name, args):
                found.add(f"{name} with a mask")
            return func(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]
        call()
    return found


@contextmanager
def asynchronous_device() -> Iterator[torch.device]:
    """A device (torch's `meta`) that code of a `with` block can launch on and not wait for.

    Reading a value, or a shape that depends on values, fails there by itself. Refused besides, with
    `WouldWait`: copies from and to memory that is not pinned, or without `non_blocking`; operators
    that get a tensor of the host; assignments of a Python number by index. Memory counts as pinned
    when it was made so in the block; nothing really is, since no device may be there. Copies to the
    host that do not wait arrive as zeros.
    """
    pinned = _Pinned()
    with _Calls(pinned), _Operators(pinned):  # type: ignore[no-untyped-call]
        yield torch.device("meta")


@contextmanager
def waiting_allowed() -> Iterator[None]:
    """Within `asynchronous_device`: copies to the device may wait here, as when a worker starts."""
    _allowed.append(True)
    try:
        yield
    finally:
        _allowed.pop()


_allowed: list[bool] = []


def _refuse(what: str) -> None:
    if not _allowed:
        raise WouldWait(what)


class _Pinned:
    """Tensors that were made in pinned memory."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() in self._kept


class _Calls(TorchFunctionMode):
    """What can only be told from the call as it was written."""

    def __init__(self, pinned: _Pinned) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pinned = pinned

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.pin_memory:
            return self._pinned.add(args[0].clone())
        if func is torch.Tensor.__setitem__ and _on_device(args[0]):
            _refuse_number(*args)
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "meta":
            _refuse("torch.tensor copies a Python value to the device")
        if kwargs.get("pin_memory"):
            return self._pinned.add(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    """Copies, and operators on tensors of both sides."""

    def __init__(self, pinned: _Pinned) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pinned = pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, given = _name(func), dict(zip(_argument_names(func), args, strict=False)) | kwargs
        if name in ("to", "_to_copy"):
            source, device = given["self"], _device_of(given)
            if _on_device(source) and device.type == "cpu" and given.get("non_blocking"):
                return torch.zeros(source.shape, dtype=given.get("dtype") or source.dtype)
            if not _on_device(source) and device.type == "meta":
                plain = given.get("dtype") in (None, source.dtype) and source.is_contiguous()
                self._copy(source, plain, bool(given.get("non_blocking")))
        elif name == "copy_" and _on_device(given["self"]) != _on_device(given["src"]):
            target, source = given["self"], given["src"]
            plain = target.shape == source.shape and target.dtype == source.dtype
            plain = plain and target.is_contiguous() and source.is_contiguous()
            host = source if _on_device(target) else target
            self._copy(host, plain, bool(given.get("non_blocking")))
            if host is target:
                return target.zero_()
        else:
            if _masked(name, args):
                _refuse(f"{name} with a mask: its hits have to be counted")
            self._one_side(name, args)
        return func(*args, **kwargs)

    def _copy(self, host: torch.Tensor, plain: bool, non_blocking: bool) -> None:
        """host: the side in the host's memory. plain: nothing is converted or rearranged on the
        way."""
        what = f"a copy of {tuple(host.shape)} between host and device"
        if not self._pinned.has(host):
            _refuse(f"{what} in pageable memory")
        if not non_blocking:
            _refuse(f"{what} without non_blocking")
        if not plain:
            _refuse(f"{what} by way of a copy in pageable memory")

    @staticmethod
    def _one_side(name: str, args: Sequence[Any]) -> None:
        """Operands of no dimension may be the host's: they are numbers of the launch."""
        tensors = [item for arg in args for item in (arg if isinstance(arg, list) else [arg])]
        tensors = [item for item in tensors if isinstance(item, torch.Tensor)]
        if any(map(_on_device, tensors)):
            for tensor in tensors:
                if not _on_device(tensor) and tensor.dim():
                    _refuse(f"{name} of a tensor {tuple(tensor.shape)} of the host")


def _argument_names(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


def _device_of(given: dict[str, Any]) -> torch.device:
    """Where a conversion leads."""
    like = given.get("other", given["self"])
    device: torch.device = given.get("device") or like.device
    return device


def _on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"


def _refuse_number(tensor: torch.Tensor, key: Any, value: Any) -> None:
    """A Python number that is assigned by index, or to one element, is copied like a tensor."""
    if isinstance(value, torch.Tensor):
        return
    keys = key if isinstance(key, tuple) else (key,)
    if any(isinstance(item, (torch.Tensor, list)) for item in keys):
        _refuse("a number assigned by index: assign a tensor of the device")
    if not tensor[key].dim():
        _refuse("a number assigned to one element: use fill_")
