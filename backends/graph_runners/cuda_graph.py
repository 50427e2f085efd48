"""Graph runner `cuda_graph`: decode-only passes captured per batch size, the others by `compile`.

A captured pass reads and writes the same addresses at every replay, so token ids and positions are
copied into buffers of its own, and a batch is padded to the next captured size with rows on the
null block. What the attention backend planned lies in buffers that it made once (`graph_support`).
"""

from __future__ import annotations

import bisect
import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tqdm import tqdm

from octavo.backends.graph_runners.compiled import CompileRunner
from octavo.backends.graph_runners.options import CudaGraphOptions
from octavo.core.byte_sizes import size as size_text
from octavo.core.contracts.graph_runner import Captured, GraphRunner, GraphRunnerContext

logger = logging.getLogger(__name__)

Pass = Callable[[], torch.Tensor]


class Replay(Protocol):
    """A captured pass."""

    def replay(self) -> None:
        """Run it again; the output of the capture is overwritten."""


class Capture(Protocol):
    """How passes are captured. Those of one object share memory."""

    def capture(self, run: Pass) -> tuple[Replay, torch.Tensor]:
        """Capture one call of `run`; the replay, and the tensor that each replay writes."""

    def free_bytes(self) -> int:
        """Memory that is free on the device."""

    def release(self) -> None:
        """Give back the memory of captures that nobody holds any more; it captures no more."""


_failed: list[torch.cuda.CUDAGraph] = []


class CudaCapture:
    """CUDA graphs that share one memory pool. All captures of a process run on torch's own stream
    for them: what libraries keep for a stream, as cuBLAS its workspace, is then made once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def capture(self, run: Pass) -> tuple[Replay, torch.Tensor]:
        # Not while a stream is recorded: what Python finds then may be graphs and memory of engines
        # before, and giving those back may be what a capture does not survive.
        collects = gc.isenabled()
        gc.disable()
        try:
            return self._record(run)
        finally:
            if collects:
                gc.enable()

    def _record(self, run: Pass) -> tuple[Replay, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        cause: Exception | None = None
        # The outer block gives the stream back, which torch does not when a capture cannot end.
        with torch.cuda.stream(torch.cuda.current_stream(self._device)):
            try:
                with torch.cuda.graph(graph, pool=self._pool):
                    try:
                        output = run()
                    except Exception as error:
                        cause = error
                        raise
            except Exception:
                # For the allocator it may go on for ever: no other capture can have its pool, and
                # the graph is still asked which stream was meant.
                self._pool = None
                _failed.append(graph)
                if cause is None:
                    raise
                raise cause from None  # not that the capture ended by an error
        self._pool = self._pool or graph.pool()
        return graph, output

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # as a capture does, whose memory would be hidden by it
        return int(torch.cuda.mem_get_info(self._device)[0])

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class _Graph:
    """replay writes `hidden` [size, E], from which draw writes `drawn` int64[2, size], tokens and
    whether they are valid. num_bytes: of the device's memory that it took."""

    replay: Replay
    hidden: torch.Tensor
    num_bytes: int
    draw: Replay | None = None
    drawn: torch.Tensor | None = None

    @property
    def output_bytes(self) -> int:
        """Memory that no other graph of the pool can share."""
        outputs = [self.hidden, *([] if self.drawn is None else [self.drawn])]
        return sum(output.numel() * output.element_size() for output in outputs)


class CudaGraphRunner(GraphRunner):
    """make_capture: what captures, once for the trial and once for use."""

    def __init__(
        self,
        options: CudaGraphOptions,
        context: GraphRunnerContext,
        make_capture: Callable[[], Capture] | None = None,
    ) -> None:
        self._context = context
        self._inner: GraphRunner = CompileRunner(options.compile, context)
        self._make_capture = make_capture or (lambda: CudaCapture(context.device))
        self._capture: Capture | None = None
        self._notes: list[str] = []
        self._logged: set[str] = set()
        self._wanted = list(self.batch_sizes(options, context.max_num_seqs))
        if context.graph_support == "none":
            self._wanted = []
            self._note(
                f"graph runner cuda_graph captures nothing: attention {self._attention()} cannot "
                "be captured; every pass runs by `compile`"
            )
        elif not self._wanted:
            self._note(
                "graph runner cuda_graph captures nothing: all capture_sizes are above "
                f"scheduler.max_num_seqs ({context.max_num_seqs}); every pass runs by `compile`"
            )
        self._unusable = list(self._notes)
        self._sizes = self._wanted
        self._graphs: dict[int, _Graph] = {}
        self._draw = context.draw
        largest = max(self._wanted, default=0)
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=context.device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=context.device)

    @staticmethod
    def batch_sizes(options: CudaGraphOptions, max_num_seqs: int) -> tuple[int, ...]:
        return tuple(capture_sizes(options.capture_sizes, max_num_seqs))

    def padded_rows(self, num_rows: int) -> int:
        place = bisect.bisect_left(self._sizes, num_rows)
        return self._sizes[place] if place < len(self._sizes) else num_rows

    def compile(self) -> dict[str, float]:
        return self._inner.compile()

    def estimate_bytes(self) -> int:
        """By a trial of the two largest sizes: the first takes what all share, and the others are
        counted as the second, beside it."""
        if not self._wanted:
            return 0
        capture = self._make_capture()
        self._draw = self._context.draw
        graphs: list[_Graph] = []
        try:
            for size in self._wanted[:-3:-1]:
                graphs.append(self._capture_one(capture, size))
        except Exception as error:
            # `warm_up` will meet it again, and report it.
            logger.info("the trial for the memory of graphs ended early: %s", error)
        shared = sum(graph.num_bytes for graph in graphs[:1])
        each = sum(max(graph.num_bytes, graph.output_bytes) for graph in graphs[1:])
        graphs.clear()
        capture.release()
        return shared + each * (len(self._wanted) - 1)

    def warm_up(self) -> dict[str, float]:
        """Capture every size, the largest first: smaller ones reuse its memory."""
        self._graphs.clear()
        if self._capture is not None:
            self._capture.release()
        self._notes, self._sizes = list(self._unusable), self._wanted
        self._draw = self._context.draw
        if not self._wanted:
            return {}
        started = time.perf_counter()
        self._capture = self._make_capture()
        self._capture_all(self._capture)
        seconds = time.perf_counter() - started
        found = self.captured()
        taken = size_text(found.num_bytes)
        logger.info("captured %d graphs in %.1f s, %s", found.num_graphs, seconds, taken)
        return {"capture": seconds}

    def captured(self) -> Captured:
        taken = sum(graph.num_bytes for graph in self._graphs.values())
        return Captured(len(self._graphs), taken, tuple(self._notes))

    def invalidate(self) -> None:
        """Compile and capture anew. Weights that were overwritten in place need it not: a replay
        reads them where they are."""
        self._inner.invalidate()
        self.warm_up()

    def _capture_all(self, capture: Capture) -> None:
        quiet = None  # a bar on terminals only
        with tqdm(self._wanted[::-1], desc="capturing graphs", unit="graph", disable=quiet) as bar:
            for size in bar:
                bar.set_postfix_str(f"{size} rows, {size_text(capture.free_bytes())} free")
                try:
                    self._graphs[size] = self._capture_one(capture, size)
                except Exception as error:
                    self._give_up(size, error)
                    break
        self._sizes = sorted(self._graphs)

    def _capture_one(self, capture: Capture, size: int) -> _Graph:
        self._context.dummy(size, 1)
        token_ids, positions = self._token_ids[:size], self._positions[:size]

        def run() -> torch.Tensor:
            return self._inner.forward(token_ids, positions, size)

        first = run()  # whatever allocates or compiles at its first call
        if self._draw is not None:
            self._draw(first)
        del first
        self._context.dummy(size, 1)  # nothing that was derived from the last plan is at hand
        free = capture.free_bytes()
        replay, hidden = capture.capture(run)
        draw = self._capture_draw(capture, hidden)
        return _Graph(replay, hidden, max(0, free - capture.free_bytes()), *draw)

    def _capture_draw(
        self, capture: Capture, hidden: torch.Tensor
    ) -> tuple[Replay | None, torch.Tensor | None]:
        draw = self._draw
        if draw is None:
            return None, None
        try:
            return capture.capture(lambda: _stacked(*draw(hidden)))
        except Exception as error:
            self._draw = None
            fault = self._context.blame(error)
            self._note(
                "graph runner cuda_graph could not capture the draw of tokens, which is launched "
                f"step by step: {type(error).__name__}: {error}"
                + (f" (raised in {fault})" if fault else "")
            )
            return None, None

    def _give_up(self, size: int, error: Exception) -> None:
        """Those that were captured stay in use: smaller batches are padded to them."""
        meaning = "every pass runs by `compile`"
        if self._graphs:
            meaning = f"batches below {min(self._graphs)} rows are padded to that many"
        fault = self._context.blame(error)
        self._note(
            f"graph runner cuda_graph could not capture a batch of {size} rows (model "
            f"{self._context.label(self._context.model)}, attention {self._attention()}) and stops "
            f"there, so that {meaning}: {type(error).__name__}: {error}"
            + (f" (raised in {fault})" if fault else "")
        )

    def _attention(self) -> str:
        """The attention backends, as messages call them."""
        labels = dict.fromkeys(map(self._context.label, self._context.attention_backends))
        return ", ".join(labels) or "none"

    def _note(self, text: str) -> None:
        """For the report; the log has it once, though the trial meets what the capture does."""
        if text not in self._logged:
            logger.warning("%s", text)
            self._logged.add(text)
        self._notes.append(text)

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

    def draw(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        graph = self._graphs.get(len(hidden))
        if graph is None or graph.hidden is not hidden or graph.draw is None:
            return None
        assert graph.drawn is not None, "a captured draw has its output"
        graph.draw.replay()
        token_ids, valid = graph.drawn.clone()
        return token_ids, valid.bool()


def _stacked(token_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """int64[2, B]: one tensor, as a capture has one output."""
    return torch.stack((token_ids, valid.long()))


def capture_sizes(given: Sequence[int] | None, max_num_seqs: int) -> list[int]:
    """Sizes in ascending order: as given, at most `max_num_seqs`; else 1, 2, 4, then steps of 8 and
    `max_num_seqs` itself."""
    if given is None:
        given = [1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs]
    return sorted({size for size in given if size <= max_num_seqs})
