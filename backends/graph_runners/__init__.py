"""Built-in graph runners. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider, Requirement

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="eager",
        factory="octavo.backends.graph_runners.eager:EagerRunner",
        summary="Runs the model's forward pass as it is written.",
    ),
    Provider(
        name="triton",
        factory="octavo.backends.triton.decoder:TritonDecoder",
        requires=(Requirement(package="triton", extra="triton"),),
        probe="octavo.backends.triton.support:device",
        rank=5,
        summary="A plain decoder with norms, residual sums and gates fused, in Triton kernels.",
    ),
    Provider(
        name="compile",
        factory="octavo.backends.graph_runners.compiled:CompileRunner",
        options="octavo.backends.graph_runners.options:CompileOptions",
        rank=-1,
        summary="torch.compile of one decoder layer, which serves all layers and batch sizes.",
    ),
    Provider(
        name="cuda_graph",
        factory="octavo.backends.graph_runners.cuda_graph:CudaGraphRunner",
        options="octavo.backends.graph_runners.options:CudaGraphOptions",
        requires=(Requirement(devices=("cuda",)),),
        rank=-1,
        summary="Compiled decode passes captured per batch size, one CUDA graph each.",
    ),
    Provider(
        name="native",
        factory="octavo.backends.cpu.decoder:NativeDecoder",
        requires=(Requirement(devices=("cpu",)),),
        probe="octavo.backends.cpu.support:decoder_probe",
        rank=10,
        summary="A whole decoder in one call of the native CPU kernels; needs packed weights and "
        "attention backend cpu.",
    ),
]
