"""What FlashInfer's kernels compute, and whether there are any. Imports neither torch nor
FlashInfer."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from octavo.backends.attention.features import missing_feature, refused_model, uneven_heads
from octavo.core.contracts import Availability, Platform, ProbeContext
from octavo.core.contracts.model import AttentionSpec

HEAD_SIZES = (64, 128, 256)
DTYPES = ("float16", "bfloat16")
KV_DTYPES = (*DTYPES, "float8_e4m3fn", "float8_e5m2")
CAPABILITY = (8, 0)


def unsupported(spec: AttentionSpec, platform: Platform) -> str | None:
    """None when the kernels can compute the layer there, else why not."""
    if platform.device != "cuda":
        return f"the flashinfer backend runs on cuda, this is {platform.device}"
    reason = missing_feature(spec, "flashinfer") or uneven_heads(spec)
    if reason is not None:
        return reason
    if spec.head_size != spec.value_head_size:
        return (
            f"keys have {spec.head_size} values and values {spec.value_head_size}, the flashinfer "
            "backend takes equal sizes"
        )
    if spec.head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        return f"the flashinfer backend takes heads of {sizes} values, not {spec.head_size}"
    return None


def kernels() -> Availability:
    """FlashInfer compiles its kernels when they are first used, unless they came with a package.
    `auto` leaves it alone where no compiler is found; who names it may have them from before."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if (
        importlib.util.find_spec("flashinfer_jit_cache")
        or os.environ.get("FLASHINFER_NVCC")
        or shutil.which("nvcc")
        or Path(home, "bin", "nvcc").exists()
    ):
        return Availability(True)
    reason = (
        "FlashInfer compiles its kernels with nvcc, which is not found: install the CUDA toolkit, "
        "or the package flashinfer-jit-cache"
    )
    return Availability(True, reason, for_auto=False)


def sampler_probe(context: ProbeContext) -> Availability:
    """Whether the sampler's filters run here."""
    return kernels()


def probe(context: ProbeContext) -> Availability:
    """Whether attention of every layer of the model can be computed here."""
    reason = refused_model(context, unsupported, dtypes=DTYPES, kv_dtypes=KV_DTYPES)
    return kernels() if reason is None else Availability(False, reason)
