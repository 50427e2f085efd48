"""Built-in parts that touch a device."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider, hookimpl
from octavo.core.envvars import EnvVar, one_of

# Read by backends/cpu; declared here so that it is checked before anything is compiled.
CPU_ISA = EnvVar(
    "OCTAVO_CPU_ISA",
    "native, avx2 or generic",
    "native: everything this CPU has",
    "Instruction set that the native CPU kernels are compiled for.",
    one_of("native", "avx2", "generic", default="native"),
)


@hookimpl
def octavo_attention_backends() -> list[Provider[Any]]:
    from octavo.backends.attention import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_graph_runners() -> list[Provider[Any]]:
    from octavo.backends.graph_runners import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_samplers() -> list[Provider[Any]]:
    from octavo.backends.samplers import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_quantizations() -> list[Provider[Any]]:
    from octavo.backends.quantization import PROVIDERS

    return PROVIDERS
