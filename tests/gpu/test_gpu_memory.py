"""Memory on a GPU: what is estimated, what is taken, and what is said when it does not suffice."""

from __future__ import annotations

import pytest
import torch

from octavo.core.errors import CapacityError
from octavo.core.testing.tiny_model import generate, make_engine, make_requests, write_tiny_model

CAPTURED = {
    "graph": {"runner": "cuda_graph"},
    "attention": {"backend": "triton"},
    "executor": {"device": "cuda"},
}
PLAIN = {**CAPTURED, "graph": {"runner": "eager"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", num_layers=4)


@pytest.fixture
def engine(folder):
    engines = []

    def make(config):
        engines.append(make_engine(folder, config))
        return engines[-1]

    yield make
    for item in engines:
        item.close()
    torch.cuda.empty_cache()


def used():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free, total


def test_graphs_take_what_was_estimated(engine):
    """All sizes to 64. Memory comes in pieces of some MiB: 64 MiB are too little to tell apart."""
    config = {"scheduler": {"max_num_seqs": 64, "max_num_batched_tokens": 256}}
    report = engine({**CAPTURED, **config}).report
    assert report.num_graphs == 11
    assert not [note for note in report.notes if "graph" in note]
    assert {"compile", "estimate graphs", "capture"} <= report.phases.keys()
    assert report.graph_bytes <= report.graph_bytes_estimated + 64 * 2**20
    assert report.graph_bytes_estimated <= 2 * report.graph_bytes + 64 * 2**20


def test_the_trial_gives_its_memory_back(engine):
    """Another start finds as much as the first, but for what the libraries keep."""
    sizes = []
    for _ in range(3):
        engine(CAPTURED).close()
        torch.cuda.empty_cache()
        sizes.append(used()[0])
    assert sizes[2] - sizes[1] < 32 * 2**20


def test_everything_stays_within_the_utilization(engine):
    """Also once it has generated."""
    taken, total = used()
    share = (taken + 3 * 2**30) / total
    config = {
        **CAPTURED,
        "kv_cache": {"num_blocks": None, "memory_utilization": share},
        "scheduler": {"max_num_seqs": 4000, "max_num_batched_tokens": 4096},
        "graph": {"runner": {"name": "cuda_graph", "capture_sizes": [1, 8, 64]}},
    }
    made = engine(config)
    assert "of memory hold" in made.report.pool_reason
    generate(made, make_requests())
    assert used()[0] <= share * total + 64 * 2**20


def test_a_context_that_does_not_fit(engine):
    taken, total = used()
    share = max(1e-3, (taken - 2**20) / total)
    with pytest.raises(CapacityError, match="no memory is left for the KV cache"):
        engine({**CAPTURED, "kv_cache": {"num_blocks": None, "memory_utilization": share}})
    config = {
        "model": {"max_model_len": 256},
        "kv_cache": {"num_blocks": None, "memory_bytes": 50_000},
    }
    with pytest.raises(
        CapacityError, match=r"one sequence of 256 tokens needs .* that fits is \d+"
    ):
        engine({**CAPTURED, **config})


def test_running_out_says_what_helps(engine):
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(CapacityError, match=r"while loading the weights: .* model\.dtype"):
            engine(CAPTURED)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_changed_forward_is_captured_anew(engine):
    tokens = []
    for config in (CAPTURED, PLAIN):
        made = engine({**config, "sampler": {"backend": "torch"}})
        before = generate(made, make_requests())
        model = made.executor._worker.model
        model.layers[1].register_forward_hook(lambda module, inputs, output: output * -1.5)
        model.forward_version += 1
        made.reset_prefix_cache()
        after = generate(made, make_requests())
        assert after != before
        tokens += [before, after]
    same = sum(a == b for a, b in zip(tokens[0] + tokens[1], tokens[2] + tokens[3], strict=True))
    assert same >= 2 * len(tokens[0]) - 2
