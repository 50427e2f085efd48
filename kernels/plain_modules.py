"""Whether a module still computes what its class says, for whoever computes it instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def is_plain(module: torch.nn.Module | None, kind: type) -> bool:
    """Exactly of that class, with no `forward` of its own and no hooks around it."""
    return (
        module is not None
        and type(module) is kind
        and "forward" not in vars(module)
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )
