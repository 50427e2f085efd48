"""The kernels, compiled once a machine: the native build, and the others that this CPU can run."""

from __future__ import annotations

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


@pytest.fixture(
    scope="session", params=["native", "avx2", pytest.param("generic", marks=pytest.mark.slow)]
)
def library(request: pytest.FixtureRequest, compiler: None) -> Any:
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
