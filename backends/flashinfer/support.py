"""What FlashInfer's kernels compute, and whether there are any. Imports neither torch nor
FlashInfer."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from octavo.backends.attention.features import missing_feature, refused_model, uneven_heads
from octavo.backends.triton.support import device
from octavo.core.contracts import Availability, Platform, ProbeContext
from octavo.core.contracts.model import AttentionSpec
from octavo.core.errors import PluginUnavailable

HEAD_SIZES = (64, 128, 256)
DTYPES = ("float16", "bfloat16")
KV_DTYPES = (*DTYPES, "float8_e4m3fn", "float8_e5m2")
CAPABILITY = (8, 0)


def unsupported(spec: AttentionSpec, platform: Platform) -> str | None:
    """None when the kernels can compute the layer there, else why not."""
    if platform.device != "cuda":
        return f"the flashinfer backend needs cuda, this is {platform.device}"
    reason = missing_feature(spec, "flashinfer") or uneven_heads(spec)
    if reason is not None:
        return reason
    if spec.head_size != spec.value_head_size:
        return (
            f"head sizes differ ({spec.head_size} for keys, {spec.value_head_size} for values), "
            "which the flashinfer backend does not support"
        )
    if spec.head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        return f"the flashinfer backend supports head sizes {sizes}, not {spec.head_size}"
    return None


def _compiles() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return bool(
        os.environ.get("FLASHINFER_NVCC")
        or shutil.which("nvcc")
        or Path(home, "bin", "nvcc").exists()
    )


def kernels(kv_dtype: str | None = None) -> Availability:
    """FlashInfer compiles its kernels when they are first used, unless they came with a package,
    which has none for e5m2. `auto` leaves it alone where no compiler is found; who names it may
    have them from before."""
    packaged = importlib.util.find_spec("flashinfer_jit_cache") is not None
    if _compiles() or (packaged and kv_dtype != "float8_e5m2"):
        return Availability(True)
    what = f"those for a {kv_dtype} KV cache" if packaged else "its kernels"
    advice = "" if packaged else ", or the package flashinfer-jit-cache"
    return Availability(
        True,
        f"FlashInfer compiles {what} with nvcc, which is not found: install the CUDA toolkit"
        + advice,
        for_auto=False,
    )


def load(kernels: Callable[[], object]) -> None:
    """Load some kernels, or have them compiled. Where that fails it raises `PluginUnavailable` with
    the library's reason, so that `auto` goes on without it, and a start that named it says why."""
    try:
        kernels()
    except Exception as error:  # whatever its build tools, its packages or the driver raise
        why = " ".join(str(error).split())[:400]
        raise PluginUnavailable(
            f"FlashInfer cannot load its kernels: {type(error).__name__}: {why}"
        ) from error


def sampler_probe(context: ProbeContext) -> Availability:
    """Whether the sampler's filters, and the draw in Triton's kernels, run here."""
    mine, draw = kernels(), device(context)
    return mine if not mine.for_auto or (draw and draw.for_auto) else draw


def probe(context: ProbeContext) -> Availability:
    """Whether attention of every layer of the model can be computed here."""
    reason = refused_model(context, unsupported, dtypes=DTYPES, kv_dtypes=KV_DTYPES)
    if reason is not None:
        return Availability(False, reason)
    return kernels(context.facts.get("kv_dtype"))
