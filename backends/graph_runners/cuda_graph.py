"""Graph runner `cuda_graph`: decode-only passes captured per batch size, the others by `compile`.

A captured pass reads and writes the same addresses at every replay, so token ids and positions are
copied into buffers of its own, and a batch is padded to the next captured size with rows on the
null block. What the attention backend planned lies in buffers that it made once (`graph_support`).
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tqdm import tqdm

from octavo.backends.graph_runners.compiled import CompileRunner
from octavo.backends.graph_runners.options import CudaGraphOptions
from octavo.core.contracts.graph_runner import GraphRunner, GraphRunnerContext

logger = logging.getLogger(__name__)

Pass = Callable[[], torch.Tensor]


class Replay(Protocol):
    """A captured pass."""

    def replay(self) -> None:
        """Run it again; the output of the capture is overwritten."""


class Capture(Protocol):
    """How passes are captured."""

    def capture(self, run: Pass) -> tuple[Replay, torch.Tensor]:
        """Capture one call of `run`; the replay, and the tensor that each replay writes."""

    def free_bytes(self) -> int:
        """Memory that is free on the device."""


class CudaCapture:
    """CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream = torch.cuda.Stream(device)

    def capture(self, run: Pass) -> tuple[Replay, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = run()
        self._pool = self._pool or graph.pool()
        return graph, output

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0])


@dataclass(frozen=True)
class _Graph:
    """replay writes `hidden` [size, E]."""

    replay: Replay
    hidden: torch.Tensor


class CudaGraphRunner(GraphRunner):
    """captured: bytes that the graphs took, by size, as measured when each was captured."""

    def __init__(
        self,
        options: CudaGraphOptions,
        context: GraphRunnerContext,
        capture: Capture | None = None,
    ) -> None:
        self._context = context
        self._inner: GraphRunner = CompileRunner(options.compile, context)
        self._sizes = list(self.batch_sizes(options, context.max_num_seqs))
        if context.graph_support == "none":
            self._sizes = []
            logger.warning(
                "graph runner cuda_graph captures nothing: the attention backend says that its "
                "batches cannot be captured; every pass runs by `compile`"
            )
        self._capture = capture
        self._graphs: dict[int, _Graph] = {}
        self.captured: dict[int, int] = {}
        largest = max(self._sizes, default=0)
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=context.device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=context.device)

    @staticmethod
    def batch_sizes(options: CudaGraphOptions, max_num_seqs: int) -> tuple[int, ...]:
        return tuple(capture_sizes(options.capture_sizes, max_num_seqs))

    def padded_rows(self, num_rows: int) -> int:
        place = bisect.bisect_left(self._sizes, num_rows)
        return self._sizes[place] if place < len(self._sizes) else num_rows

    def warm_up(self) -> dict[str, float]:
        """Compile, then capture every size, the largest first: smaller ones reuse its memory."""
        seconds = dict(self._inner.warm_up())
        started = time.perf_counter()
        if self._sizes:
            self._capture_all(self._capture or CudaCapture(self._context.device))
        seconds["capture"] = time.perf_counter() - started
        return seconds

    def _capture_all(self, capture: Capture) -> None:
        self._graphs.clear()
        self.captured.clear()
        before = capture.free_bytes()
        quiet = None  # a bar on terminals only
        for size in tqdm(self._sizes[::-1], desc="capturing", unit="graph", disable=quiet):
            free = capture.free_bytes()
            try:
                self._graphs[size] = self._capture_one(capture, size)
            except Exception as error:
                self._give_up(size, error)
                break
            self.captured[size] = free - capture.free_bytes()
        taken = (before - capture.free_bytes()) / 2**20
        logger.info("captured %d graphs in %.0f MiB", len(self._graphs), taken)
        self._sizes = sorted(self._graphs)

    def _capture_one(self, capture: Capture, size: int) -> _Graph:
        self._context.dummy(size, 1)
        token_ids, positions = self._token_ids[:size], self._positions[:size]

        def run() -> torch.Tensor:
            return self._inner.forward(token_ids, positions, size)

        run()  # whatever allocates or compiles at its first call
        replay, hidden = capture.capture(run)
        return _Graph(replay, hidden)

    def _give_up(self, size: int, error: Exception) -> None:
        """Those that were captured stay in use: smaller batches are padded to them."""
        culprits = {type(backend).__module__ for backend, _ in self._context.attention_layers()}
        logger.warning(
            "graph runner cuda_graph could not capture a batch of %d rows (model %s, attention %s) "
            "and stops there; batches that are larger than all that were captured run by "
            "`compile`: %s: %s",
            size,
            type(self._context.model).__name__,
            ", ".join(sorted(culprits)) or "none",
            type(error).__name__,
            error,
        )

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, num_decodes: int
    ) -> torch.Tensor:
        count = len(token_ids)
        graph = self._graphs.get(count) if num_decodes == count else None
        if graph is None:
            return self._inner.forward(token_ids, positions, num_decodes)
        self._token_ids[:count].copy_(token_ids, non_blocking=True)
        self._positions[:count].copy_(positions, non_blocking=True)
        graph.replay.replay()
        return graph.hidden


def capture_sizes(given: Sequence[int] | None, max_num_seqs: int) -> list[int]:
    """Sizes in ascending order: as given, at most `max_num_seqs`; else 1, 2, 4, then steps of 8 and
    `max_num_seqs` itself."""
    if given is None:
        given = [1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs]
    return sorted({size for size in given if size <= max_num_seqs})
