"""The kernels, compiled once a machine: the native build, and the others that this CPU can run."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.backends.cpu import build, native
from octavo.core.contracts import Platform, ProbeContext


def _runs_avx2() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return all(f" {flag} " in flags for flag in ("avx2", "fma", "f16c"))


@pytest.fixture(scope="session", autouse=True)
def compiler() -> None:
    """These tests need a C compiler."""
    answer = build.probe(ProbeContext(Platform("cpu")))
    if not answer:
        pytest.skip(answer.reason)


SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1")
"""Flags of the build that test_cpu_sanitizers.py runs these tests with."""


@pytest.fixture(scope="session", autouse=True)
def sanitized(compiler: None) -> Any:
    """In the process that checks memory accesses, every test gets the sanitized kernels."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("OCTAVO_TEST_SANITIZED"):
            checked = functools.cache(
                lambda isa="native": native.open_library(build.library(isa, SANITIZERS))
            )
            patch.setattr(native, "kernels", checked)
        yield


@pytest.fixture(
    scope="session", params=["native", "avx2", pytest.param("generic", marks=pytest.mark.slow)]
)
def library(request: pytest.FixtureRequest, sanitized: None) -> Any:
    """The kernels of one instruction set."""
    if request.param == "avx2" and not _runs_avx2():
        pytest.skip("this CPU has no AVX2")
    return native.kernels(request.param)


@pytest.fixture
def two_threads() -> Any:
    """Two threads for the length of a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
