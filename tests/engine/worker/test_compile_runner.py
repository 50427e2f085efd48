"""Graph runner `compile`: one piece of code for all layers and batch sizes."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from octavo.backends.graph_runners.compiled import CompileRunner, repeated_layers
from octavo.backends.graph_runners.options import CompileOptions
from octavo.core.contracts.graph_runner import GraphRunner, GraphRunnerContext
from octavo.testing.tiny_model import generate, make_engine, make_requests, write_tiny_model

REFERENCE = {
    "attention": {"backend": "torch"},
    "model": {"quantization": "none"},
    "sampler": {"backend": "torch"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", num_layers=4)


@pytest.fixture
def engine(model):
    engines = []

    def make(runner, **more):
        config = {**REFERENCE, "graph": {"runner": runner}, **more}
        engines.append(make_engine(model, config))
        return engines[-1]

    yield make
    for item in engines:
        item.close()


def runner_of(engine) -> GraphRunner:
    return engine.executor._worker._graph_runner


def test_no_code_is_made_after_the_warm_up(engine):
    """500 steps of random batches, chunked and preempted, after the warm-up."""
    made = engine(
        {"name": "compile", "backend": "aot_eager"},
        kv_cache={"num_blocks": 40, "block_size": 8},
        scheduler={"max_num_seqs": 6, "max_num_batched_tokens": 48, "max_chunk_tokens": 17},
    )
    runner = runner_of(made)
    assert isinstance(runner, CompileRunner)
    compiled = runner.num_compiled
    assert compiled <= 2  # a batch of one token may have code of its own; four layers share it
    random, steps, handle = np.random.default_rng(0), 0, 0
    sizes = set()
    while steps < 500:
        if random.random() < 0.2 or not made.has_work():
            for item in make_requests(int(random.integers(1, 4))):
                handle += 1
                item.handle, item.request_id = handle, f"r{handle}"
                item.token_ids = item.token_ids[: int(random.integers(1, 40))]
                made.add(item)
        made.step()
        sizes.add(made.executor._worker._builder._slots.size)
        steps += 1
    assert len(sizes) == 6
    assert runner.num_compiled == compiled


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports what torch deprecates
def test_inductor_gives_the_tokens_of_eager(engine):
    made = engine("compile")
    assert runner_of(made).num_compiled <= 2
    assert generate(made, make_requests()) == generate(engine("eager"), make_requests())


@pytest.mark.parametrize("runner", ["eager", {"name": "compile", "backend": "eager"}])
def test_a_closed_engine_holds_no_memory(engine, runner):
    """Weights and KV cache are freed though the engine object is still there."""
    made = engine(runner)
    worker = made.executor._worker
    held = [weakref.ref(worker.pool.layers[0].k), weakref.ref(next(worker.model.parameters()))]
    made.close()
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    made.close()


def test_a_model_without_layers_is_compiled_whole():
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert repeated_layers(plain) == []
    mixed = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.ReLU()])
    assert repeated_layers(torch.nn.Sequential(mixed)) == []
    pair = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    assert len(repeated_layers(torch.nn.Sequential(mixed, pair))) == 2


def test_the_null_block_is_zero_after_the_warm_up(engine):
    made = engine({"name": "compile", "backend": "eager"})
    for layer in made.executor._worker.pool.layers:
        assert not layer.k[0].any()
        assert not layer.v[0].any()


class Pair(torch.nn.Module):
    """Two equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Inner(), Inner()])

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = positions[:, None] * torch.ones(4)
        for layer in self.layers:
            x = layer(x)
        return x


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


@pytest.mark.slow
@torch.inference_mode()
def test_any_number_of_changes():
    """More often than torch.compile makes code for one function, hooks included."""
    model, positions = Pair(), torch.arange(5)

    def dummy(rows, tokens):
        return torch.zeros(rows * tokens, dtype=torch.int64), torch.arange(tokens).repeat(rows)

    context = GraphRunnerContext(
        model.forward, model, torch.device("cpu"), "all", 8, 64, dummy=dummy
    )
    runner = CompileRunner(CompileOptions(backend="eager"), context)
    for number in range(12):
        got = runner.forward(positions, positions, 0)
        again = runner.num_compiled
        assert torch.equal(runner.forward(positions, positions, 0), got)
        assert runner.num_compiled == again
        plain = positions[:, None] * torch.ones(4)
        for layer in model.layers:
            plain = Inner.forward(layer, plain)
        torch.testing.assert_close(got, plain)
        hook = lambda module, inputs, output, number=number: output * number  # noqa: E731
        model.layers[number % 2].linear.register_forward_hook(hook)
        runner.invalidate()
        assert runner.num_compiled > again
