"""A model that changes while it is served: no graph runner serves the old forward pass.

The change is an adapter of low rank around one linear layer or a whole decoder layer, a hook,
another `forward`, another parameter. What is generated afterwards equals what an engine generates
that had it from the start.
"""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from octavo.backends.attention.torch_attention import TorchAttention
from octavo.backends.graph_runners.cuda_graph import CudaGraphRunner
from octavo.backends.graph_runners.options import CompileOptions, CudaGraphOptions
from octavo.core.contracts import Provider
from octavo.models.families.decoder import Decoder
from octavo.testing.fake_engine import Collector
from octavo.testing.tiny_model import generate, make_engine, make_requests, write_tiny_model

from .capture_double import FakeDevice

PLAIN = {"attention": {"backend": "torch"}, "model": {"quantization": "none"}}
PACKED = {"attention": {"backend": "cpu"}, "model": {"quantization": "packed"}}


class LowRank(nn.Module):
    """inner(x) + x a b"""

    def __init__(self, inner: nn.Module, size: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(5)
        self.inner = inner
        self.a = nn.Parameter(torch.randn(size, 4, generator=random), requires_grad=False)
        self.b = nn.Parameter(torch.randn(4, size, generator=random), requires_grad=False)

    def forward(self, x, *more):
        return self.inner(x, *more) + x @ self.a @ self.b


def wrap_a_linear_layer(model):
    layer = model.layers[1]
    layer.attention.o = LowRank(layer.attention.o, model.config.hidden_size)


def wrap_a_decoder_layer(model):
    model.layers[0] = LowRank(model.layers[0], model.config.hidden_size)


def hook_a_module(model):
    model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * 3)


def wrap_a_forward(model):
    layer = model.layers[1]
    inner = layer.forward
    layer.forward = lambda residual, positions: inner(residual, positions).mul_(-1)


def replace_a_parameter(model):
    random = torch.Generator().manual_seed(6)
    weight = torch.randn(model.config.hidden_size, generator=random)
    norm = model.layers[0].mlp_norm
    norm.weight = nn.Parameter(weight, requires_grad=False)
    norm.scaled = weight * model.config.hidden_size**0.5


CHANGES = [
    wrap_a_linear_layer,
    wrap_a_decoder_layer,
    hook_a_module,
    wrap_a_forward,
    replace_a_parameter,
]


class Capturable(TorchAttention):
    """Says that its decodes may be captured, as far as the double goes."""

    graph_support = "decode"


class Captured:
    """Plugins that capture with a double."""

    def __init__(self) -> None:
        self.device = FakeDevice(watch=False)
        self.runner: CudaGraphRunner | None = None

    def make(self, options, context):
        given = CudaGraphOptions(compile=CompileOptions(backend="eager"))
        self.runner = CudaGraphRunner(given, context, self.device.make_capture)
        return self.runner

    def objects(self):
        return [
            ("graph_runner", Provider(name="captured", factory=self.make)),
            ("attention_backend", Provider(name="capturable", factory=Capturable)),
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", num_layers=3)


@pytest.fixture
def engine(folder):
    """engine(runner, common, objects=): closed at the end."""
    engines = []

    def make(runner, common, objects=()):
        engines.append(make_engine(folder, {**common, "graph": {"runner": runner}}, objects))
        return engines[-1]

    yield make
    for item in engines:
        item.close()


def model_of(engine):
    return engine.executor._worker.model


def change_of(engine, change):
    change(model_of(engine))
    model_of(engine).forward_version += 1


def check(made, engine, common, change, monkeypatch):
    """What `made` generates before, after, and what another generates that was changed at first."""
    before = generate(made, make_requests())
    assert before == generate(engine("eager", common), make_requests())
    change_of(made, change)
    after = generate(made, make_requests())
    load = Decoder.load_weights

    def changed(self, tensors):
        load(self, tensors)
        change(self)

    monkeypatch.setattr(Decoder, "load_weights", changed)
    assert after == generate(engine("eager", common), make_requests())
    assert after != before


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES[:2])
def test_compiled(engine, change, monkeypatch):
    """With each change: `test_captured`, whose prompts run by `compile`."""
    made = engine({"name": "compile", "backend": "aot_eager"}, PLAIN)
    check(made, engine, PLAIN, change, monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports what torch deprecates
def test_compiled_by_inductor(engine, monkeypatch):
    check(engine("compile", PLAIN), engine, PLAIN, wrap_a_linear_layer, monkeypatch)


@pytest.mark.parametrize("change", CHANGES)
def test_captured(engine, change, monkeypatch):
    captured = Captured()
    common = {**PLAIN, "attention": {"backend": "capturable"}}
    made = engine("captured", common, captured.objects())
    graphs = captured.runner.captured()
    assert graphs.num_graphs == 4
    assert not graphs.notes
    check(made, engine, PLAIN, change, monkeypatch)
    assert captured.runner.captured() == graphs
    assert captured.device.num_replays > 10
    report = made.report
    assert (report.num_graphs, report.graph_bytes) == (4, graphs.num_bytes)
    assert report.graph_bytes_estimated >= report.graph_bytes
    assert {"compile", "estimate graphs", "capture"} <= report.phases.keys()


@pytest.mark.parametrize("change", CHANGES)
def test_native(engine, change, monkeypatch):
    check(engine("native", PACKED), engine, PACKED, change, monkeypatch)


@pytest.mark.parametrize("change", CHANGES)
def test_eager(engine, change, monkeypatch):
    check(engine("eager", PLAIN), engine, PLAIN, change, monkeypatch)


def test_the_null_block_is_zero_afterwards(engine):
    made = engine({"name": "compile", "backend": "eager"}, PLAIN)
    worker = made.executor._worker
    with torch.inference_mode():
        for layer in worker.pool.layers:
            layer.k[0].fill_(1)
        change_of(made, wrap_a_linear_layer)
        worker._renew()
    for layer in worker.pool.layers:
        assert not layer.k[0].any()
        assert not layer.v[0].any()


def test_a_whole_forward_that_is_replaced(engine, monkeypatch):
    def change(model):
        inner = model.forward
        model.forward = lambda token_ids, positions: inner(token_ids, positions) * -1

    captured = Captured()
    common = {**PLAIN, "attention": {"backend": "capturable"}}
    made = engine("captured", common, captured.objects())
    check(made, engine, PLAIN, change, monkeypatch)
    monkeypatch.undo()
    check(engine("native", PACKED), engine, PACKED, change, monkeypatch)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_change_in_the_middle_of_requests(engine, in_flight):
    captured = Captured()
    plain = {**PLAIN, "executor": {"kind": {"name": "local", "max_in_flight": in_flight}}}
    common = {**plain, "attention": {"backend": "capturable"}}
    tokens = []
    for made in (engine("captured", common, captured.objects()), engine("eager", plain)):
        collector = Collector(made)
        for item in make_requests():
            made.add(item)
        for step in range(12):
            collector.step()
            if step in (5, 8):
                change_of(made, CHANGES[step % 3])
        collector.run()
        tokens.append(collector.tokens)
    assert tokens[0] == tokens[1]


def seat(engine, manager, executor="local"):
    """One sequence at a time."""
    common = {
        **PLAIN,
        "kv_cache": {"manager": manager, "block_size": 4},
        "scheduler": {"max_num_seqs": 1},
        "executor": {"kind": executor},
    }
    return engine("eager", common)


def hits(made):
    return made.metrics()["prefix_hits"]


@pytest.mark.parametrize("manager", ["paged", "radix"])
def test_kv_of_an_earlier_forward_is_not_found(engine, manager, monkeypatch):
    """Not by a request that waited when the change came, nor in blocks that were filled after it
    by one that ran."""
    first, second, third = (
        msgspec.structs.replace(make_requests(3)[2], handle=handle) for handle in (1, 2, 3)
    )
    assert len(first.token_ids) > 16
    made = seat(engine, manager)
    collector = Collector(made)
    made.add(first)
    made.add(second)
    while len(collector.tokens.get(1, ())) < 3:
        collector.step()
    change_of(made, wrap_a_linear_layer)
    collector.run()
    assert hits(made) == 0
    (again,) = generate(made, [third])
    assert hits(made) >= 16, "what was computed by the same forward pass is found"
    assert again == collector.tokens[2] != collector.tokens[1]
    load = Decoder.load_weights

    def changed(self, tensors):
        load(self, tensors)
        wrap_a_linear_layer(self)

    monkeypatch.setattr(Decoder, "load_weights", changed)
    assert [again] == generate(seat(engine, manager), [first])


@pytest.mark.parametrize("executor", ["local", "wire", "threaded"])
def test_a_change_while_nothing_runs_frees_what_was_cached(engine, executor):
    made = seat(engine, "paged", executor)
    before = generate(made, make_requests())
    found = hits(made)
    assert made.scheduler.kv.stats().num_evictable
    change_of(made, wrap_a_linear_layer)
    (request, *_) = make_requests()
    made.add(request)
    made.step()
    assert made.scheduler.kv.stats().num_evictable == 0
    collector = Collector(made).run()
    assert hits(made) == found
    assert collector.reasons == {1: "length"}
    assert before


def test_the_report_names_who_cannot_be_captured(engine):
    captured = Captured()

    class Waits(Capturable):
        def run(self, layer, q, k, v, out):
            if captured.device.capturing:
                raise RuntimeError("operation not permitted when stream is capturing")
            super().run(layer, q, k, v, out)

    backend = ("attention_backend", Provider(name="waits", factory=Waits))
    common = {**PLAIN, "attention": {"backend": "waits"}}
    made = engine("captured", common, [*captured.objects(), backend])
    (note,) = [note for note in made.report.notes if "capture" in note]
    assert note.startswith(
        "graph runner cuda_graph could not capture a batch of 8 rows (model decoder, attention "
        "waits) and stops there, so that every pass runs by `compile`: RuntimeError: operation not"
    )
    assert "(raised in attention_backend 'waits' (" in note
    assert any(line == f"note       {note}" for line in made.report.lines())
    assert made.report.num_graphs == 0
    assert generate(made, make_requests()) == generate(engine("eager", PLAIN), make_requests())


def test_nothing_is_made_anew_while_nothing_changes(engine):
    captured = Captured()
    common = {**PLAIN, "attention": {"backend": "capturable"}}
    made = engine("captured", common, captured.objects())
    count = captured.device.num_captures
    generate(made, make_requests())
    assert captured.device.num_captures == count
    change_of(made, lambda model: None)
    generate(made, make_requests(1))
    assert captured.device.num_captures == count + 4
