"""Where the Triton kernels can run and what they compute. Imports neither torch nor Triton."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from octavo.backends.attention.features import missing_feature, refused_model, uneven_heads
from octavo.core.contracts import Availability, Platform, ProbeContext
from octavo.core.contracts.model import AttentionSpec

HEAD_MOST = 256
"""Most values of a head."""

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "float8_e4m3fn", "float8_e5m2")
BLOCK_SIZES = (8, 16, 32, 64, 128)

CAPABILITY = (8, 0)
"""Least compute capability that the kernels are compiled and checked for."""

FP8_CAPABILITY = (8, 9)
"""From here the device converts e4m3 itself; below, the kernels do it from bytes."""


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the host."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def launchers() -> str | None:
    """Why Triton cannot launch a kernel here; None when it can. What starts a kernel is a C file
    that Triton compiles, whether or not the kernel itself is cached: with $CC, gcc or clang, and
    Python's headers, which slim images lack."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton builds its launchers with a C compiler, and neither gcc nor clang is found"
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme  # as Triton looks for it
    headers = Path(sysconfig.get_paths(scheme)["include"])
    if not (headers / "Python.h").exists():
        return f"Triton builds its launchers with Python's headers, and {headers} has no Python.h"
    return None


def _too_old(platform: Platform) -> str | None:
    if platform.capability is None or platform.capability >= CAPABILITY:
        return None
    have = ".".join(map(str, platform.capability))
    return f"the Triton kernels need compute capability 8.0, this device has {have}"


def unsupported(spec: AttentionSpec, platform: Platform) -> str | None:
    """None when the kernels can compute the layer there, else why not."""
    if platform.device != "cuda" and not interpreting():
        return f"the triton backend runs on cuda, this is {platform.device}"
    reason = _too_old(platform) or missing_feature(spec, "triton") or uneven_heads(spec)
    if reason is not None:
        return reason
    size = max(spec.head_size, spec.value_head_size)
    if size > HEAD_MOST:
        return f"head size {size} is above {HEAD_MOST}, the most that the triton backend supports"
    if spec.num_heads // spec.num_kv_heads > 64:
        group = spec.num_heads // spec.num_kv_heads
        return f"{group} query heads share a KV head; the triton backend supports at most 64"
    return None


def device(context: ProbeContext) -> Availability:
    """Whether the device runs the kernels. In the interpreter, and where Triton seems unable to
    launch them, only when they are named."""
    if context.platform.device != "cuda":
        if interpreting():
            return Availability(True, "in Triton's interpreter: slow, for tests", for_auto=False)
        return Availability(
            False,
            f"needs device cuda, this is {context.platform.device} (TRITON_INTERPRET=1 runs the "
            "kernels in Triton's interpreter)",
        )
    reason = _too_old(context.platform)
    if reason is not None:
        return Availability(False, reason)
    missing = launchers()
    return Availability(True, missing or "", for_auto=missing is None)


def probe(context: ProbeContext) -> Availability:
    """Whether attention of every layer of the model can be computed here."""
    answer = device(context)
    if not answer:
        return answer
    block_size = context.facts.get("block_size")
    if block_size is not None and block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        return Availability(False, f"takes blocks of {sizes} tokens, not {block_size}")
    reason = refused_model(context, unsupported, dtypes=DTYPES, kv_dtypes=KV_DTYPES)
    return answer if reason is None else Availability(False, reason)
