"""The attention function that models call: rope, handles, and the operator under torch.compile."""

from __future__ import annotations

import math
import weakref

import pytest
import torch

from octavo.core.contracts.attention_backend import AttentionBackend
from octavo.core.contracts.model import AttentionSpec, KVSpec
from octavo.engine.worker.attention_op import AttentionOp, _table
from octavo.engine.worker.kv_pool import LayerCache
from octavo.kernels.rope import RopeTable, apply_rope

POSITIONS = torch.tensor([3, 0, 7])


def table(size, length=10):
    angles = torch.arange(length)[:, None] * 0.7 ** torch.arange(size // 2)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rotate_pairs(x, cos_sin, interleaved):
    """Pair by pair as complex numbers."""
    out, half = x.clone(), cos_sin.shape[1] // 2
    for token, position in enumerate(POSITIONS.tolist()):
        for pair in range(half):
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
            turn = complex(cos_sin[position, pair], cos_sin[position, half + pair])
            for head in range(x.shape[1]):
                value = complex(x[token, head, first], x[token, head, second]) * turn
                out[token, head, first], out[token, head, second] = value.real, value.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 4])
def test_rope(interleaved, rotated):
    x, cos_sin = torch.randn(3, 2, 8), table(rotated)
    cos, sin = RopeTable(cos_sin, interleaved).rows(POSITIONS)
    result = apply_rope(x, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(result, rotate_pairs(x, cos_sin, interleaved))
    half = apply_rope(x.bfloat16(), cos, sin, interleaved=interleaved)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), result, atol=2e-2, rtol=2e-2)


class Summing(AttentionBackend):
    """Adds q and v, and keeps what it was given."""

    def __init__(self, fuses_rope=False):
        self.fuses_rope, self.given, self.planned = fuses_rope, [], None

    @staticmethod
    def supports(spec, platform):
        return None

    @staticmethod
    def kv_layouts(spec):
        return []

    def plan(self, batch):
        self.planned = batch

    def run(self, layer, q, k, v, out):
        self.given.append((layer.layer, q, k))
        out.copy_(q + v.repeat_interleave(2, 1))


SPEC = AttentionSpec(4, 2, 8, 8, 1.0, rope_dim=8)


@pytest.fixture
def op():
    made = AttentionOp()
    yield made
    made.close()


def bind(op, backends, groups):
    empty = torch.zeros(1, 4, 2, 8)
    caches = [
        LayerCache(KVSpec(layer, "full", 2, 8, 8, group=group), empty, empty)
        for layer, group in groups.items()
    ]
    op.bind(caches, list(enumerate(backends)))


def test_layers_reach_the_backend_of_their_group(op):
    first, second = Summing(), Summing(fuses_rope=True)
    cos_sin = table(8)
    functions = [op.register(layer, SPEC, cos_sin) for layer in range(3)]
    bind(op, [first, second], {0: 0, 1: 1, 2: 0})
    op.plan(["batch of 0", "batch of 1"])
    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    results = [attend(q, k, v, POSITIONS) for attend in functions]
    assert (first.planned, second.planned) == ("batch of 0", "batch of 1")
    assert [layer for layer, *_ in first.given] == [0, 2]
    assert results[0].shape == (3, 32)
    rotated = rotate_pairs(q, cos_sin, False)
    torch.testing.assert_close(results[0].view(3, 4, 8), rotated + v.repeat_interleave(2, 1))
    torch.testing.assert_close(first.given[1][2], rotate_pairs(k, cos_sin, False))
    assert torch.equal(second.given[0][1], q)  # it rotates by itself


def test_a_table_is_made_ready_for_those_who_need_it(op):
    """It takes twice the memory of the model's own."""
    attend = op.register(0, SPEC, table(8))
    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    for fuses, number in ((True, 0), (False, 1)):
        bind(op, [Summing(fuses_rope=fuses)], {0: 0})
        attend(q, k, v, POSITIONS)
        assert len(op._tables) == number


def test_a_new_step_reads_positions_anew(op):
    """The tensor of positions is the same object from step to step, with other values."""
    backend = Summing()
    attend = op.register(0, SPEC, table(8))
    bind(op, [backend], {0: 0})
    positions = POSITIONS.clone()
    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.zeros(3, 2, 8)
    for _ in range(2):
        op.plan([None])
        attend(q, k, v, positions)
        positions += 1
    torch.testing.assert_close(
        backend.given[1][1][1], rotate_pairs(q[[1, 1, 1]], table(8)[[1] * 10], False)[0]
    )


def test_without_rope(op):
    backend = Summing()
    attend = op.register(5, AttentionSpec(4, 2, 8, 8, 1.0), None)
    bind(op, [backend], {5: 0})
    q = torch.randn(3, 4, 8)
    attend(q, torch.randn(3, 2, 8), torch.randn(3, 2, 8), POSITIONS)
    assert backend.given[0][1] is q


def test_registering_twice_and_forgetting(op):
    op.register(0, SPEC, table(8))
    with pytest.raises(ValueError, match="layer 0 is registered twice"):
        op.register(0, SPEC, table(8))
    known = len(_table)
    op.close()
    assert len(_table) == known - 1


def test_under_torch_compile_it_is_an_opaque_operator(op):
    backend = Summing()
    attend = op.register(0, SPEC, table(8))
    bind(op, [backend], {0: 0})
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def block(q, k, v, positions):
        return attend(q * 2, k, v, positions) + 1

    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    compiled = torch.compile(block, backend=keep, fullgraph=True)
    op.plan([None])
    torch.testing.assert_close(compiled(q, k, v, POSITIONS), block(q, k, v, POSITIONS))
    calls = [node for node in graphs[0].graph.nodes if "octavo.attention" in str(node.target)]
    assert len(calls) == 1
    assert all(isinstance(arg, int) or hasattr(arg, "op") for arg in calls[0].args)
    assert math.prod(calls[0].meta["example_value"].shape) == 3 * 32


def test_caches_go_when_they_are_unbound(op):
    """The pool that was made to measure a step is gone before the KV pool is sized."""
    op.register(0, AttentionSpec(4, 2, 8, 8, 1.0), None)
    bind(op, [Summing()], {0: 0})
    cache = weakref.ref(op.bound()[0][1].k_cache)
    op.unbind()
    assert cache() is None
