"""Graph runner `cuda_graph` through a double that refuses what a real capture refuses."""

from __future__ import annotations

import io
import logging
import re

import pytest
import torch

from octavo.backends.graph_runners.cuda_graph import CudaGraphRunner, capture_sizes
from octavo.backends.graph_runners.options import CompileOptions, CudaGraphOptions
from octavo.core.contracts.graph_runner import GraphRunnerContext

from .capture_double import EACH, SHARED, FakeCapture, FakeDevice, Refused

PLAIN = CompileOptions(backend="eager")


class Blind(FakeCapture):
    """Memory that comes in pieces so large that a graph may fit into what is there."""

    def free_bytes(self) -> int:
        return 1 << 30


class Toy(torch.nn.Module):
    """Sums what stands in the buffers of a plan, as attention over fixed buffers would."""

    def __init__(self, planned: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(50, 8)
        self.planned = planned

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows = self.planned[: len(token_ids), None]
        return self.embedding(token_ids) + positions[:, None] * 0.1 + rows


class Planned:
    """Stands for the attention backend in messages."""


class Setup:
    """A runner of 10 seats, with a plan buffer that the test writes."""

    def __init__(self, sizes=None, support="decode", fails_at=None) -> None:
        self.planned = torch.zeros(64)
        self.dummies: list[tuple[int, int]] = []
        self.model = Toy(self.planned)
        self.device = FakeDevice(fails_at=fails_at)
        self.start = self.device.memory

        def dummy(rows, tokens):
            self.dummies.append((rows, tokens))
            self.planned[:] = 0
            return torch.zeros(rows * tokens, dtype=torch.int64), torch.arange(tokens).repeat(rows)

        context = GraphRunnerContext(
            self.model.forward,
            self.model,
            torch.device("cpu"),
            support,
            10,
            64,
            attention_backends=[Planned()],
            dummy=dummy,
            blame=lambda error: "attention_backend 'planned'" if "capturing" in str(error) else "",
        )
        options = CudaGraphOptions(capture_sizes=sizes, compile=PLAIN)
        self.runner = CudaGraphRunner(options, context, self.device.make_capture)

    def decode(self, rows: int, seed: int) -> None:
        """A padded decode batch gives what the plain forward pass gives for its rows."""
        random = torch.Generator().manual_seed(seed)
        padded = self.runner.padded_rows(rows)
        token_ids = torch.zeros(padded, dtype=torch.int64)
        positions = torch.zeros(padded, dtype=torch.int64)
        token_ids[:rows] = torch.randint(0, 50, (rows,), generator=random)
        positions[:rows] = torch.randint(0, 90, (rows,), generator=random)
        self.planned[:rows] = torch.randn(rows, generator=random)
        got = self.runner.forward(token_ids, positions, padded)[:rows]
        wanted = self.model(token_ids, positions)[:rows]
        torch.testing.assert_close(got, wanted)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def test_sizes():
    assert capture_sizes(None, 1) == [1]
    assert capture_sizes(None, 20) == [1, 2, 4, 8, 16, 20]
    assert capture_sizes(None, 256)[:5] == [1, 2, 4, 8, 16]
    assert capture_sizes(None, 256)[-2:] == [248, 256]
    assert capture_sizes([64, 3, 3, 900], 100) == [3, 64]


def test_every_size_is_captured_once_the_largest_first():
    setup = Setup()
    assert setup.runner.compile().keys() == {"compile"}
    assert setup.runner.warm_up().keys() == {"capture"}
    assert setup.device.num_captures == 5
    planned = [rows for rows, tokens in setup.dummies if tokens == 1][-10:]
    assert planned == [10, 10, 8, 8, 4, 4, 2, 2, 1, 1]  # to warm up, and to be captured
    found = setup.runner.captured()
    assert found.num_graphs == 5
    assert found.num_bytes == SHARED + 5 * EACH + (10 + 8 + 4 + 2 + 1) * 8 * 4
    assert found.num_bytes == setup.start - setup.device.memory
    assert not found.notes


def test_memory_is_estimated_before_and_given_back():
    setup = Setup()
    estimate = setup.runner.estimate_bytes()
    assert setup.device.num_captures == 2
    assert setup.device.memory == setup.start
    assert estimate == SHARED + EACH + 10 * 32 + 4 * (EACH + 8 * 32)
    setup.runner.warm_up()
    assert 0.9 < setup.runner.captured().num_bytes / estimate <= 1
    alone = Setup([4])
    estimate = alone.runner.estimate_bytes()
    alone.runner.warm_up()
    assert estimate == alone.runner.captured().num_bytes == SHARED + EACH + 4 * 32
    assert Setup(support="none").runner.estimate_bytes() == 0


def test_graphs_count_with_their_outputs_where_no_memory_is_seen_to_go():
    setup = Setup([2, 4, 8])
    setup.runner._make_capture = lambda: Blind(setup.device)
    assert setup.runner.estimate_bytes() == 2 * 4 * 32


def test_a_trial_that_fails_leaves_nothing():
    for fails_at, graphs in ((0, 0), (1, 1)):
        setup = Setup(fails_at=fails_at)
        assert setup.runner.estimate_bytes() == graphs * (SHARED + EACH + 10 * 32)
        assert setup.device.memory == setup.start
        assert not setup.runner.captured().notes


def test_batches_are_padded_to_the_next_size_and_replayed():
    setup = Setup()
    setup.runner.warm_up()
    assert [setup.runner.padded_rows(n) for n in range(1, 11)] == [1, 2, 4, 4, 8, 8, 8, 8, 10, 10]
    for seed, rows in enumerate((1, 3, 2, 10, 9, 5, 3, 7, 1, 4)):
        setup.decode(rows, seed)
    assert setup.device.num_replays == 10
    assert setup.device.num_captures == 5


def test_prefill_and_mixed_batches_are_not_replayed():
    setup = Setup()
    setup.runner.warm_up()
    for tokens, decodes in ((8, 0), (8, 3), (33, 10)):
        ids, positions = torch.arange(tokens) % 50, torch.arange(tokens)
        got = setup.runner.forward(ids, positions, decodes)
        torch.testing.assert_close(got, setup.model(ids, positions))
    assert setup.device.num_replays == 0


def test_inputs_are_copied_to_fixed_addresses():
    setup = Setup([4])
    setup.runner.warm_up()
    ids = torch.tensor([1, 2, 3, 4])
    first = setup.runner.forward(ids, ids, 4).clone()
    again = setup.runner.forward(ids.clone(), ids.clone(), 4)
    assert torch.equal(first, again)
    assert setup.runner.forward(ids, ids, 4).data_ptr() == again.data_ptr()


def test_a_new_pool_is_captured_anew():
    setup = Setup([2])
    setup.runner.warm_up()
    taken = setup.start - setup.device.memory
    setup.runner.warm_up()
    assert setup.device.num_captures == 2
    assert setup.start - setup.device.memory == taken
    setup.decode(2, 1)


def test_a_backend_that_cannot_be_captured(caplog):
    with caplog.at_level(logging.WARNING):
        setup = Setup(support="none")
    assert "attention Planned cannot be captured; every pass runs by `compile`" in caplog.text
    setup.runner.warm_up()
    assert setup.device.num_captures == 0
    assert setup.runner.captured().notes == tuple(caplog.messages)
    assert setup.runner.padded_rows(3) == 3
    setup.decode(3, 1)


def test_sizes_that_are_all_too_large_capture_nothing_and_say_so(caplog):
    with caplog.at_level(logging.WARNING):
        setup = Setup([4096])
    assert "all capture_sizes are above scheduler.max_num_seqs" in caplog.text
    setup.runner.warm_up()
    assert setup.device.num_captures == 0
    setup.decode(3, 1)


def test_a_capture_that_fails_falls_back_and_names_what_was_inside(caplog):
    setup = Setup(fails_at=2)
    with caplog.at_level(logging.WARNING):
        setup.runner.warm_up()
    (note,) = setup.runner.captured().notes
    assert note == (
        "graph runner cuda_graph could not capture a batch of 4 rows (model Toy, attention "
        "Planned) and stops there, so that batches below 8 rows are padded to that many: Refused: "
        "operation not permitted when stream is capturing (raised in attention_backend 'planned')"
    )
    assert caplog.messages == [note]
    assert setup.runner.captured().num_graphs == 2
    assert [setup.runner.padded_rows(n) for n in (1, 4, 9)] == [8, 8, 10]
    for rows in (1, 5, 9):
        setup.decode(rows, rows)


def test_nothing_that_can_be_captured():
    setup = Setup(fails_at=0)
    setup.runner.warm_up()
    assert "so that every pass runs by `compile`" in setup.runner.captured().notes[0]
    assert setup.runner.captured().num_graphs == setup.runner.captured().num_bytes == 0
    setup.decode(3, 1)


def test_another_forward_is_captured_anew():
    setup = Setup()
    setup.runner.compile()
    setup.runner.warm_up()
    taken = setup.start - setup.device.memory
    setup.decode(3, 1)
    setup.model.embedding.weight.mul_(2)  # in place: a replay reads it
    setup.decode(3, 2)
    setup.model.embedding = torch.nn.Embedding(50, 8)
    setup.runner.invalidate()
    assert setup.device.num_captures == 10
    assert setup.start - setup.device.memory == taken
    for seed, rows in enumerate((3, 10, 1)):
        setup.decode(rows, seed)
    assert setup.device.num_replays == 5


def test_the_double_refuses_what_a_capture_refuses():
    capture, x = FakeDevice().make_capture(), torch.arange(4.0)
    with pytest.raises(Refused, match=r"item|_local_scalar_dense"):
        capture.capture(lambda: x * float(x.sum()))
    sizes = iter((4, 3))
    graph, _ = capture.capture(lambda: x[: next(sizes)] * 2)
    with pytest.raises(Refused, match="cannot change shapes"):
        graph.replay()
    with pytest.raises(Refused, match="still held"):
        capture.release()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_on_terminals_only(monkeypatch, caplog):
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    with caplog.at_level(logging.INFO):
        Setup().runner.warm_up()
    assert "0/5" in screen.getvalue()
    assert "10 rows, 1.00 GiB free" in screen.getvalue()
    assert re.fullmatch(r"captured 5 graphs in \d+\.\d s, 11 KiB", caplog.messages[-1])
    monkeypatch.setattr("sys.stderr", log := io.StringIO())
    Setup().runner.warm_up()
    assert not log.getvalue()
