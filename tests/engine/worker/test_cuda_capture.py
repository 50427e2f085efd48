"""Captures that fail, with `torch.cuda` played by a double that behaves as torch 2.11 does then."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from octavo.backends.graph_runners import cuda_graph
from octavo.backends.graph_runners.cuda_graph import CudaCapture

CPU = torch.device("cpu")


class Cuda:
    """Streams by name. A capture whose pass raised cannot end: its stream stays current, and the
    allocator goes on filling its pool."""

    def __init__(self) -> None:
        self.current, self.recording, self.num_pools = "default", set(), 0
        outer = self

        class CUDAGraph:
            def pool(self):
                return self.own_pool

        class Stream:
            def __init__(self, stream):
                self.stream = stream

            def __enter__(self):
                self.before, outer.current = outer.current, self.stream

            def __exit__(self, *error):
                outer.current = self.before

        class Graph:
            def __init__(self, graph, pool=None):
                if pool is None:
                    outer.num_pools += 1
                self.pool = graph.own_pool = pool or (outer.num_pools, 0)

            def __enter__(self):
                self.stream = Stream("captures")
                self.stream.__enter__()
                if self.pool in outer.recording:
                    raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
                outer.recording.add(self.pool)

            def __exit__(self, kind, *error):
                if kind is not None:
                    raise RuntimeError("operation failed due to a previous error during capture")
                outer.recording.discard(self.pool)
                self.stream.__exit__()

        self.module = SimpleNamespace(
            CUDAGraph=CUDAGraph,
            graph=Graph,
            stream=Stream,
            current_stream=lambda device: self.current,
            synchronize=lambda device: None,
        )


@pytest.fixture
def cuda(monkeypatch):
    double = Cuda()
    monkeypatch.setattr(torch, "cuda", double.module)
    monkeypatch.setattr(cuda_graph, "_failed", [])
    return double


def refused():
    raise ValueError("the pass waits for the device")


def passes():
    return torch.zeros(2)


def test_captures_share_a_pool(cuda):
    capture = CudaCapture(CPU)
    first, second = (capture.capture(passes)[0] for _ in range(2))
    assert first.pool() == second.pool()
    assert cuda.current == "default"


def test_a_capture_that_fails_leaves_nothing_behind(cuda):
    capture = CudaCapture(CPU)
    first, _ = capture.capture(passes)
    with pytest.raises(ValueError, match="waits for the device"):  # not how the capture ended
        capture.capture(refused)
    assert cuda.current == "default"
    second, output = capture.capture(passes)
    assert output.shape == (2,)
    assert second.pool() != first.pool()


def test_no_garbage_is_collected_while_a_stream_is_recorded(cuda):
    found = []

    def run():
        found.append(gc.isenabled())
        return torch.zeros(2)

    CudaCapture(CPU).capture(run)
    with pytest.raises(ValueError, match="waits"):
        CudaCapture(CPU).capture(refused)
    assert found == [False]
    assert gc.isenabled()


def test_the_allocator_can_ask_a_graph_that_failed(cuda, monkeypatch):
    made = []
    original = cuda.module.CUDAGraph

    def counted():
        graph = original()
        made.append(weakref.ref(graph))
        return graph

    monkeypatch.setattr(cuda.module, "CUDAGraph", counted)
    with pytest.raises(ValueError, match="waits"):
        CudaCapture(CPU).capture(refused)
    assert made[0]() is not None
