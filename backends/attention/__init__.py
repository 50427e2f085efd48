"""Built-in attention. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider, Requirement

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="torch",
        factory="octavo.backends.attention.torch_attention:TorchAttention",
        summary="Reference in PyTorch: any device, any head size, sliding window, soft cap.",
    ),
    Provider(
        name="cpu",
        factory="octavo.backends.cpu.attention:CpuAttention",
        requires=(Requirement(devices=("cpu",)),),
        probe="octavo.backends.cpu.support:attention_probe",
        rank=10,
        summary="Native CPU kernels: bit-identical in any batch, rope fused, 8-bit KV cache.",
    ),
]
