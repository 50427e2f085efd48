"""FlexAttention over the paged pool, by the cases of the reference."""

from __future__ import annotations

import pytest
import torch

from octavo.backends.attention.flex_attention import FlexAttention
from octavo.backends.attention.flex_options import FlexOptions
from octavo.core.contracts import Platform
from octavo.testing.builtin_suites import known
from octavo.testing.conformance.attention_backend import AttentionBackendSuite
from octavo.testing.device_attention import DeviceCase, attention_spec

ROWS = [(40, 1), (0, 1), (5, 1), (17, 9), (0, 20), (3, 12)]


def make(**options):
    return lambda context: FlexAttention(FlexOptions(**options), context)


@pytest.mark.parametrize("block_size", [8, 64])
@pytest.mark.parametrize(
    "spec",
    [
        attention_spec(4, 2, 8),
        attention_spec(3, 3, 20, window=5, rope_dim=8),
        attention_spec(6, 2, 16, value_size=24, window=30, soft_cap=0.5),
    ],
)
def test_unfused_equals_the_reference(spec, block_size):
    DeviceCase(make(), spec, ROWS, block_size=block_size).check()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("spec", [attention_spec(4, 2, 16, window=20, soft_cap=0.5)])
def test_compiled_equals_the_reference(spec):
    torch.compiler.reset()
    DeviceCase(make(compile=True), spec, ROWS[:1] + ROWS[3:4]).check()
    # Another batch of the same powers of two takes the same code.
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    DeviceCase(make(compile=True), spec, [(37, 1), (18, 10)]).check()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


def test_other_dtypes():
    spec = attention_spec(4, 2, 16)
    DeviceCase(make(), spec, ROWS, dtype=torch.bfloat16).check(2e-2)
    DeviceCase(make(), spec, ROWS, kv_dtype=torch.float16).check(2e-3)


def test_what_it_cannot_compute_is_refused():
    cuda = Platform("cuda", (9, 0))
    assert "a head size of at least 16" in FlexAttention.supports(attention_spec(size=8), cuda)
    assert FlexAttention.supports(attention_spec(), Platform("cpu")) is None
    assert "evenly" in FlexAttention.supports(attention_spec(5, 2), Platform("cpu"))


@pytest.mark.slow
class TestContract(AttentionBackendSuite):
    entry = known("attention_backend", "flex")
