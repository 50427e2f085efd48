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
        name="flashinfer",
        factory="octavo.backends.flashinfer.attention:FlashInferAttention",
        options="octavo.backends.flashinfer.options:FlashInferOptions",
        requires=(
            Requirement(devices=("cuda",), capability=(8, 0)),
            Requirement(package="flashinfer", extra="flashinfer"),
        ),
        probe="octavo.backends.flashinfer.support:probe",
        rank=20,
        summary="FlashInfer's paged kernels: shared prefixes read once (cascade), fp8 KV cache.",
    ),
    Provider(
        name="flex",
        factory="octavo.backends.attention.flex_attention:FlexAttention",
        options="octavo.backends.attention.flex_options:FlexOptions",
        rank=-1,
        summary="PyTorch's FlexAttention with a paged block mask, through torch.compile.",
    ),
    Provider(
        name="triton",
        factory="octavo.backends.triton.attention:TritonAttention",
        options="octavo.backends.triton.options:TritonAttentionOptions",
        requires=(Requirement(package="triton", extra="triton"),),
        probe="octavo.backends.triton.support:probe",
        rank=10,
        summary="Triton kernels: split-KV decode, chunked prefill, rope fused, fp8 KV cache.",
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
