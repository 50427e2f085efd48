"""What tensor code does behind the scenes: values read back to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

READS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "unique", "equal")
"""Operators whose result the host needs, so that it waits for the device (or their shape does)."""


def synchronisations(call: Callable[[], Any]) -> set[str]:
    """Names of the operators of `call` that make the host wait on a GPU."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: set[str] = set()

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func.name().removeprefix("aten::").split(".")[0]
            if name in READS:
                found.add(name)
            return func(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]
        call()
    return found
