"""One attention backend for prompts, another for decodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.backends.attention.flex_attention import FlexAttention
from octavo.backends.attention.flex_options import FlexOptions
from octavo.backends.attention.torch_attention import TorchAttention
from octavo.core.contracts import NoOptions, Platform
from octavo.core.contracts.attention_backend import KVLayout
from octavo.core.errors import PluginUnavailable
from octavo.engine.worker.phased_attention import PhasedAttention, shared_layouts
from octavo.kernels.rope import RopeTable, apply_rope
from octavo.testing.device_attention import DeviceCase, attention_spec

ROWS = [(40, 1), (0, 1), (5, 1), (17, 9), (0, 20), (3, 1)]


class Rotating(TorchAttention):
    """Fuses rope, and remembers the tokens of each call."""

    fuses_rope = True
    graph_support = "all"

    def plan(self, batch):
        super().plan(batch)
        self.positions, self.seen = batch.positions, batch.num_tokens

    def run(self, layer, q, k, v, out):
        assert len(q) == self.seen
        cos, sin = RopeTable(layer.cos_sin, layer.spec.rope_interleaved).rows(self.positions)
        q, k = (apply_rope(x, cos, sin, interleaved=layer.spec.rope_interleaved) for x in (q, k))
        super().run(layer, q, k, v, out)


def backend(kind, context):
    if kind == "flex":
        return FlexAttention(FlexOptions(), context)
    return {"torch": TorchAttention, "rotating": Rotating}[kind](NoOptions(), context)


def make(prefill, decode):
    return lambda context: PhasedAttention(
        backend(prefill, context), backend(decode, context), context
    )


@pytest.mark.parametrize("rows", [ROWS, ROWS[:3], ROWS[3:]], ids=["both", "decodes", "prompts"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("torch", "flex"), ("flex", "torch"), ("rotating", "torch"), ("torch", "rotating")],
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_each_row_goes_to_its_backend(prefill, decode, rows, interleaved):
    spec = attention_spec(4, 2, 16, window=30, rope_dim=8, rope_interleaved=interleaved)
    case = DeviceCase(make(prefill, decode), spec, rows)
    assert case.backend.fuses_rope == ("rotating" in (prefill, decode))
    case.check()


def test_graph_support_is_that_of_decodes():
    def support(prefill, decode):
        case = DeviceCase(make(prefill, decode), attention_spec(), [(1, 1)])
        return case.backend.graph_support

    assert support("torch", "rotating") == "decode"
    assert support("rotating", "torch") == "none"
    assert support("rotating", "rotating") == "all"


class Layouts:
    def __init__(self, *layouts):
        self.kv_layouts = lambda spec: list(layouts)


NHD = ("kv", "block", "token", "head", "dim")
HND = ("kv", "block", "head", "token", "dim")


def test_the_layout_is_the_decode_backends_first_that_prefill_has_too():
    both = Layouts(KVLayout(HND), KVLayout(NHD, ("float16", "float8_e4m3fn"), (16, 32)))
    wide = Layouts(KVLayout(NHD, ("float16", "bfloat16"), (8, 16)), KVLayout(HND))
    first, second = shared_layouts(both, wide, attention_spec())
    assert first == KVLayout(NHD, ("float16",), (16,))
    assert second == KVLayout(HND)
    first, second = shared_layouts(wide, both, attention_spec())
    assert (first.dims, second.dims) == (HND, NHD)


@pytest.mark.parametrize(
    "other",
    [
        KVLayout(HND),
        KVLayout(NHD, ("float32",), (64,)),
        KVLayout(NHD, ("float16",)),
        KVLayout(NHD, extra=2),
    ],
)
def test_nothing_in_common_is_refused(other):
    mine = Layouts(KVLayout(NHD, ("float32",), (16,)))
    with pytest.raises(PluginUnavailable, match="share no KV cache layout"):
        shared_layouts(mine, Layouts(other), attention_spec())


def test_the_phase_that_cannot_compute_a_layer_is_named():
    case = DeviceCase(make("torch", "flex"), attention_spec(), [(1, 1)])
    assert case.backend.supports(attention_spec(), Platform("cpu")) is None
    reason = case.backend.supports(attention_spec(size=8), Platform("cuda", (9, 0)))
    assert reason.startswith("decode: ")


def test_copies_are_done_by_the_backend_that_has_a_kernel():
    case = DeviceCase(make("torch", "torch"), attention_spec(), [(1, 1)])
    nothing = np.zeros(0, np.int32)
    assert not case.backend.copy_blocks([], nothing, nothing, nothing)
    case.backend.prefill.copy_blocks = lambda *arguments: True
    assert case.backend.copy_blocks([torch.ones(1)], nothing, nothing, nothing)
