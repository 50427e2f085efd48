"""The supported API for authors of kernels, samplers, backends and other implementations.

    from octavo.kernels import RopeTable, apply_rope, upload

Octavo's own implementations import the same names from here, and nothing else beside `octavo.core`.
Everything is imported lazily. docs/kernels.md has an example of each.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "PinnedTwin": "transfer",
    "pin": "transfer",
    "upload": "transfer",
    "RopeTable": "rope",
    "apply_rope": "rope",
    "RowGroups": "sampling_rows",
    "SamplingRows": "sampling_rows",
    "WideNucleus": "sampling_rows",
    "argmax": "sampling_rows",
    "group_rows": "sampling_rows",
    "select_rows": "sampling_rows",
    "min_p_floor": "selection",
    "nucleus_mask": "selection",
    "nucleus_weight": "selection",
    "token_weights": "selection",
    "order_keys": "token_order",
    "token_logprobs": "token_order",
    "top_tokens": "token_order",
    "DrawKeys": "noise",
    "draw_all": "noise",
    "noise_at": "noise",
    "GUMBEL_MAX": "random",
    "GUMBEL_MIN": "random",
    "GUMBEL_VECTORS": "random",
    "PHILOX_MULTIPLIERS": "random",
    "PHILOX_ROUNDS": "random",
    "PHILOX_WEYL": "random",
    "gumbel": "random",
    "gumbel_blocks": "random",
    "philox4x32": "random",
    "is_plain": "plain_modules",
    "Codec": "codec",
    "end_with_parent": "child_process",
    "ignore_signals": "child_process",
    "kill_process": "child_process",
    "limit_memory": "child_process",
    "spawn_connected": "child_process",
}

__all__ = [
    "GUMBEL_MAX",
    "GUMBEL_MIN",
    "GUMBEL_VECTORS",
    "PHILOX_MULTIPLIERS",
    "PHILOX_ROUNDS",
    "PHILOX_WEYL",
    "Codec",
    "DrawKeys",
    "PinnedTwin",
    "RopeTable",
    "RowGroups",
    "SamplingRows",
    "WideNucleus",
    "apply_rope",
    "argmax",
    "draw_all",
    "end_with_parent",
    "group_rows",
    "gumbel",
    "gumbel_blocks",
    "ignore_signals",
    "is_plain",
    "kill_process",
    "limit_memory",
    "min_p_floor",
    "noise_at",
    "nucleus_mask",
    "nucleus_weight",
    "order_keys",
    "philox4x32",
    "pin",
    "select_rows",
    "spawn_connected",
    "token_logprobs",
    "token_weights",
    "top_tokens",
    "upload",
]

if TYPE_CHECKING:
    from octavo.kernels.child_process import (
        end_with_parent,
        ignore_signals,
        kill_process,
        limit_memory,
        spawn_connected,
    )
    from octavo.kernels.codec import Codec
    from octavo.kernels.noise import DrawKeys, draw_all, noise_at
    from octavo.kernels.plain_modules import is_plain
    from octavo.kernels.random import (
        GUMBEL_MAX,
        GUMBEL_MIN,
        GUMBEL_VECTORS,
        PHILOX_MULTIPLIERS,
        PHILOX_ROUNDS,
        PHILOX_WEYL,
        gumbel,
        gumbel_blocks,
        philox4x32,
    )
    from octavo.kernels.rope import RopeTable, apply_rope
    from octavo.kernels.sampling_rows import (
        RowGroups,
        SamplingRows,
        WideNucleus,
        argmax,
        group_rows,
        select_rows,
    )
    from octavo.kernels.selection import (
        min_p_floor,
        nucleus_mask,
        nucleus_weight,
        token_weights,
    )
    from octavo.kernels.token_order import order_keys, token_logprobs, top_tokens
    from octavo.kernels.transfer import PinnedTwin, pin, upload


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'octavo.kernels' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"octavo.kernels.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
