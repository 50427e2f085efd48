"""Triton's kernels in its interpreter on the host."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def interpreter():
    """The interpreter is chosen when Triton is first imported; tests/conftest.py does that where
    there is no GPU."""
    from octavo.backends.triton.support import interpreting

    if not interpreting():
        pytest.skip("a GPU is here: tests/gpu runs the compiled kernels")
