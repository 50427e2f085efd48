"""Memory on a GPU: what is estimated, what is taken, and what is said when it does not suffice."""

from __future__ import annotations

import gc

import pytest
import torch

from octavo.core.errors import CapacityError

PIECES = 64 * 2**20
"""Memory comes in pieces of some MiB, and libraries keep some: less is not told apart."""
CAPTURED = {"attention": "triton", "graph": {"runner": "cuda_graph"}}


@pytest.fixture
def engine(tiny, make_engine):
    """engine(**configuration): of the tiny model, closed at the end."""
    engines = []

    def make(**parts):
        engines.append(make_engine(tiny(), **parts))
        return engines[-1]

    yield make
    for item in engines:
        item.close()
    gc.collect()  # engines that could not be made
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def used(rehearsing):
    """used(): (bytes that are taken, all there are)."""
    if rehearsing:
        pytest.skip("a CPU's memory follows other rules")

    def measure():
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free, total

    return measure


def test_graphs_take_what_was_estimated(used, engine):
    report = engine(
        **CAPTURED, scheduler={"max_num_seqs": 64, "max_num_batched_tokens": 256}
    ).report
    assert report.num_graphs == 11  # 1, 2, 4, 8, 16, 24, ... 64
    assert not [note for note in report.notes if "graph" in note]
    assert {"compile", "estimate graphs", "capture"} <= report.phases.keys()
    assert report.graph_bytes <= report.graph_bytes_estimated + PIECES
    assert report.graph_bytes_estimated <= 2 * report.graph_bytes + PIECES


def test_everything_stays_within_the_utilization(used, engine):
    """Also once it has generated; and what a start took, the next one finds free."""
    taken, total = used()
    share = (taken + 3 * 2**30) / total
    for _ in range(2):
        made = engine(
            attention="triton",
            graph={"runner": {"name": "cuda_graph", "capture_sizes": [1, 8, 64]}},
            kv_cache={"num_blocks": None, "memory_utilization": share},
            scheduler={"max_num_seqs": 4000, "max_num_batched_tokens": 4096},
        )
        assert "of memory hold" in made.report.pool_reason
        _tokens(made)
        assert used()[0] <= share * total + PIECES
        made.close()
        torch.cuda.empty_cache()
    assert used()[0] <= taken + 4 * PIECES


def test_nothing_is_left(used, engine):
    taken, total = used()
    share = max(1e-3, (taken - 2**20) / total)
    with pytest.raises(CapacityError, match="no memory is left for the KV cache"):
        engine(**CAPTURED, kv_cache={"num_blocks": None, "memory_utilization": share})


def test_a_context_that_does_not_fit(engine):
    with pytest.raises(
        CapacityError, match=r"one sequence of 200 tokens needs .* that fits is \d+"
    ):
        engine(
            **CAPTURED,
            model={"max_model_len": 200},
            kv_cache={"num_blocks": None, "memory_bytes": 200_000},
        )


def test_running_out_says_what_helps(used, engine):
    gc.collect()  # memory that the allocator has is given out whatever the limit
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(CapacityError, match=r"while loading the weights: .* model\.dtype"):
            engine(**CAPTURED)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("runner", ["cuda_graph", "compile", "triton"])
def test_a_changed_forward_is_captured_anew(engine, runner):
    tokens = []
    for name in (runner, "eager"):
        made = engine(attention="triton", sampler={"backend": "torch"}, graph={"runner": name})
        before = _tokens(made)
        model = made.executor._worker.model
        model.layers[1].register_forward_hook(lambda module, inputs, output: output * -1.5)
        model.forward_version += 1
        made.reset_prefix_cache()
        after = _tokens(made)
        assert after != before
        tokens.append([before, after])
    assert tokens[0] == tokens[1]


def _tokens(engine):
    from octavo.testing.tiny_model import generate, make_requests

    return generate(engine, make_requests())
