"""Samplers that run on kernels of their own. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider, Requirement

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="cpu",
        factory="octavo.backends.cpu.sampler:CpuSampler",
        requires=(Requirement(devices=("cpu",)),),
        probe="octavo.backends.cpu.build:probe",
        rank=20,
        summary="Sort-free CPU sampler.",
    ),
    Provider(
        name="flashinfer",
        factory="octavo.backends.flashinfer.sampler:FlashInferSampler",
        requires=(
            Requirement(devices=("cuda",), capability=(8, 0)),
            Requirement(package="flashinfer", extra="flashinfer"),
            Requirement(package="triton", extra="triton"),
        ),
        probe="octavo.backends.flashinfer.support:sampler_probe",
        rank=30,
        summary="Sort-free top_k and top_p by FlashInfer; draws the reference's tokens.",
    ),
    Provider(
        name="triton",
        factory="octavo.backends.triton.sampler:TritonSampler",
        requires=(Requirement(package="triton", extra="triton"),),
        probe="octavo.backends.triton.support:device",
        rank=20,
        summary="Triton kernels; top_k and top_p as in the reference.",
    ),
]
