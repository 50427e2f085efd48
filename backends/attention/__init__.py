"""Built-in attention. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="torch",
        factory="octavo.backends.attention.torch_attention:TorchAttention",
        summary="Reference in PyTorch: any device, any head size, sliding window, soft cap.",
    ),
]
