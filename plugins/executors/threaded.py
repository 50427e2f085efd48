"""Executor `threaded`: one worker in a thread of its own, two steps in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from octavo.core.contracts import NoOptions
from octavo.core.contracts.executor import (
    Executor,
    ExecutorContext,
    Ticket,
    WarmUp,
    Worker,
    WorkerReport,
)
from octavo.core.errors import EngineDeadError
from octavo.core.messages import LogitMasks, StepPlan, StepResult

T = TypeVar("T")


class ThreadedExecutor(Executor):
    """Calls are queued to the thread in order. An exception of a step is raised by its `collect`;
    what was queued behind it does not run, and fails with the same cause."""

    max_in_flight = 2

    def __init__(self, options: NoOptions, context: ExecutorContext) -> None:
        self._make_worker = context.make_worker
        self._worker: Worker | None = None
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._tickets = 0
        self._results: dict[Ticket, Future[StepResult]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="octavo-worker", daemon=True)
        self._thread.start()

    @property
    def forward_version(self) -> int:
        return self._ready.forward_version

    def start(self) -> WorkerReport:
        def build() -> WorkerReport:
            self._worker = self._make_worker(0, 1)
            return self._worker.load()

        return self._call(build).result()

    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> WarmUp | None:
        return self._call(lambda: self._ready.allocate_kv(num_blocks, num_host_blocks)).result()

    def submit(self, plan: StepPlan) -> Ticket:
        self._call(lambda: self._ready.forward(plan))
        self._tickets += 1
        return Ticket(self._tickets)

    def sample(self, ticket: Ticket, masks: LogitMasks | None) -> None:
        self._results[ticket] = self._call(lambda: self._ready.sample(masks))

    def collect(self, ticket: Ticket) -> StepResult:
        return self._results.pop(ticket).result()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._queue.put(self._close_worker)
        self._queue.put(None)
        self._thread.join()

    @property
    def _ready(self) -> Worker:
        assert self._worker is not None, "the executor was not started"
        return self._worker

    def _close_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _call(self, function: Callable[[], T]) -> Future[T]:
        if self._closed:
            raise EngineDeadError("the executor is closed")
        future: Future[T] = Future()

        def task() -> None:
            self._fulfil(future, function)

        self._queue.put(task)
        return future

    def _fulfil(self, future: Future[Any], function: Callable[[], Any]) -> None:
        if self._failure is not None:
            future.set_exception(self._failure)
            return
        try:
            future.set_result(function())
        except BaseException as error:
            # A step that failed leaves state that later steps would build on.
            self._failure = error
            future.set_exception(error)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task()
