"""Executors: equal results however plans travel, and errors that reach the engine."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from octavo.core.contracts import NoOptions
from octavo.core.contracts.executor import ExecutorContext, WarmUp, Worker, WorkerReport
from octavo.core.errors import EngineDeadError
from octavo.core.messages import LogitMasks, StepResult
from octavo.plugins.executors.local import LocalExecutor, LocalOptions
from octavo.plugins.executors.threaded import ThreadedExecutor
from octavo.plugins.executors.wire import WireExecutor

EXECUTORS = {"local": LocalExecutor, "wire": WireExecutor, "threaded": ThreadedExecutor}
POOL = 16 * 16 + 1


def make(kind, worker):
    options = NoOptions() if kind == "threaded" else LocalOptions()
    return EXECUTORS[kind](options, ExecutorContext(lambda rank, world: worker, {}))


@pytest.fixture(params=sorted(EXECUTORS))
def kind(request):
    return request.param


def script(executor, driver):
    """Chunks, decodes, logprobs of all sorts, seeded sampling, a bias, a mask, a full mask."""
    results = []

    def step(counts, masks=None):
        plan = driver.plan(counts)
        ticket = executor.submit(plan)
        executor.sample(ticket, masks)
        result = executor.collect(ticket)
        assert result.step == plan.step
        driver.take(plan, result)
        results.append(result)

    random = np.random.default_rng(0)
    driver.admit(0, random.integers(0, 97, 9), prompt_logprobs=1, logprobs=-1)
    driver.admit(1, random.integers(0, 97, 5), logprobs=2)
    step({0: 4, 1: 5})
    step({1: 1, 0: 5})
    driver.admit(2, random.integers(0, 97, 3), stop_token_ids=[5])
    step({0: 1, 1: 1, 2: 2})
    step({0: 1, 1: 1, 2: 1})
    bitmask = np.full((2, 4), -1, np.int32)
    bitmask[0, 0], bitmask[1] = 0, 0
    step({0: 1, 1: 1, 2: 1}, LogitMasks(rows=np.asarray([0, 2], np.int32), bitmask=bitmask))
    driver.release(0)
    step({1: 1})
    return results


def assert_equal(result, expected):
    for name in ("step", "errors"):
        assert getattr(result, name) == getattr(expected, name)
    np.testing.assert_array_equal(result.token_ids, expected.token_ids)
    assert (result.logprobs is None) == (expected.logprobs is None)
    pairs = [(result.logprobs, expected.logprobs)] if result.logprobs is not None else []
    for mine, other in zip(result.prompt_logprobs, expected.prompt_logprobs, strict=True):
        assert (mine.handle, mine.start) == (other.handle, other.start)
        pairs.append((mine.logprobs, other.logprobs))
    for mine, other in pairs:
        for name in mine.__struct_fields__:
            np.testing.assert_array_equal(getattr(mine, name), getattr(other, name))


@pytest.fixture(scope="module")
def expected(tiny_llama, new_driver):
    """What the runner gives when it is called directly."""
    runner = tiny_llama.runner()
    runner.load()
    runner.allocate_kv(POOL)

    class Direct:
        submit = staticmethod(runner.forward)
        sample = staticmethod(lambda ticket, masks: setattr(Direct, "result", runner.sample(masks)))
        collect = staticmethod(lambda ticket: Direct.result)

    results = script(Direct, new_driver())
    runner.close()
    assert [list(result.errors) for result in results] == [[], [], [], [], [2], []]
    return results


def test_all_give_the_same_results(kind, tiny_llama, driver, expected):
    executor = make(kind, tiny_llama.runner())
    report = executor.start()
    assert report.vocab_size == 97
    assert executor.allocate_kv(POOL) == WarmUp()  # eager has nothing to tell, but it arrives
    results = script(executor, driver)
    executor.close()
    for result, other in zip(results, expected, strict=True):
        assert_equal(result, other)
    if kind == "wire":
        assert not results[0].token_ids.flags.writeable


class Recorder(Worker):
    """Notes its calls, and fails in the step that it is told to."""

    def __init__(self, fail_at=None):
        self.calls, self.threads, self.fail_at = [], set(), fail_at
        self.go = threading.Event()

    def _note(self, *call):
        self.calls.append(call)
        self.threads.add(threading.get_ident())

    def load(self):
        self._note("load")
        return WorkerReport((), 0, 0, 0, 0, 0, 0, "float32")

    def allocate_kv(self, num_blocks, num_host_blocks=0):
        self._note("allocate_kv", num_blocks, num_host_blocks)

    def forward(self, plan):
        self._note("forward", plan.step)
        if plan.step == self.fail_at:
            raise ZeroDivisionError(f"step {plan.step}")
        self.step = plan.step
        assert self.go.wait(60)

    def sample(self, masks):
        self._note("sample", self.step)
        return StepResult(step=self.step, token_ids=np.zeros((1, 1), np.int32))

    def close(self):
        self._note("close")


def empty_plan(driver):
    return driver.plan({})


def test_threaded_runs_behind_the_caller_in_order(driver):
    worker = Recorder()
    executor = make("threaded", worker)
    executor.start()
    executor.allocate_kv(7, 3)
    tickets = []
    for _ in range(2):
        tickets.append(executor.submit(empty_plan(driver)))
        executor.sample(tickets[-1], None)
    assert ("forward", 1) not in worker.calls  # the first waits, and submit returned
    worker.go.set()
    assert [executor.collect(ticket).step for ticket in tickets] == [0, 1]
    executor.close()
    executor.close()
    assert worker.calls == [
        ("load",),
        ("allocate_kv", 7, 3),
        *((call, step) for step in (0, 1) for call in ("forward", "sample")),
        ("close",),
    ]
    assert len(worker.threads) == 1
    assert threading.get_ident() not in worker.threads
    assert not any(thread.name == "octavo-worker" for thread in threading.enumerate())
    with pytest.raises(EngineDeadError, match="closed"):
        executor.submit(empty_plan(driver))


def test_threaded_raises_where_a_step_is_collected(driver):
    worker = Recorder(fail_at=1)
    worker.go.set()
    executor = make("threaded", worker)
    executor.start()
    tickets = []
    for _ in range(3):
        tickets.append(executor.submit(empty_plan(driver)))
        executor.sample(tickets[-1], None)
    assert executor.collect(tickets[0]).step == 0
    for ticket in tickets[1:]:
        with pytest.raises(ZeroDivisionError, match="step 1"):
            executor.collect(ticket)
    executor.close()
    assert ("forward", 2) not in worker.calls
    assert worker.calls[-1] == ("close",)


def test_threaded_raises_what_loading_does():
    class Broken(Recorder):
        def load(self):
            raise MemoryError("no room")

    executor = make("threaded", Broken())
    with pytest.raises(MemoryError, match="no room"):
        executor.start()
    executor.close()


def test_local_raises_at_once(driver):
    worker = Recorder(fail_at=0)
    executor = make("local", worker)
    with pytest.raises(ZeroDivisionError):
        executor.submit(empty_plan(driver))
    executor.close()
    assert worker.calls[-1] == ("close",)
