"""What every executor promises."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from octavo.core.contracts.executor import (
    Executor,
    ExecutorContext,
    WarmUp,
    Worker,
    WorkerReport,
)
from octavo.core.contracts.kv_cache_manager import KVCacheManagerContext
from octavo.core.contracts.preemption_policy import PreemptionPolicyContext
from octavo.core.contracts.scheduler_policy import SchedulerPolicyContext
from octavo.core.messages import LogitMasks, StepPlan, StepResult
from octavo.testing.conformance import engine_run
from octavo.testing.conformance.base import ConformanceSuite, NotApplicable, create, registry
from octavo.testing.fake_engine import Collector, assert_clean, expected, request
from octavo.testing.fake_worker import FakeWorker


class Broken(FakeWorker):
    """A worker that fails in its fourth step."""

    def forward(self, plan: StepPlan) -> None:
        if len(self.steps) == 3:
            raise ZeroDivisionError("planted")
        super().forward(plan)


class ExecutorSuite(ConformanceSuite):
    """Subclass it with `provider`, or override `make` (an `Executor` for the context).

    One that builds its workers in other processes, and so cannot take the suite's own worker, sets
    `own_process`; then only whole engines are compared.
    """

    kind = "executor"
    own_process: ClassVar[bool] = False

    def executor(self, worker: Worker) -> Executor:
        """The executor under test, around a worker of the suite."""
        if self.own_process:
            raise NotApplicable("its workers live in processes of their own")
        if self.entry is not None or self.provider is not None:
            factory = registry().factory(self.selection())
            if not getattr(factory, "computes", True):
                raise NotApplicable("it computes nothing: its tokens are made up")
        made = self.make(ExecutorContext(lambda rank, world: worker, {}))
        assert isinstance(made, Executor), f"make returned {type(made).__name__}"
        return made

    def test_it_says_how_many_steps_may_run(self) -> None:
        """max_in_flight is a whole number, at least 1."""
        executor = self.executor(FakeWorker())
        count = executor.max_in_flight
        assert isinstance(count, int), f"max_in_flight is {count!r}"
        assert count >= 1, f"max_in_flight is {count}"
        executor.close()

    def test_start_reports_what_the_worker_reports(self) -> None:
        """start loads the worker and hands on its report."""
        executor = self.executor(FakeWorker())
        try:
            report = executor.start()
            assert isinstance(report, WorkerReport), f"start returned {type(report).__name__}"
            assert report.vocab_size == FakeWorker.vocab_size, "the report is not the worker's"
        finally:
            executor.close()

    def test_requests_get_their_own_tokens(self) -> None:
        """Through the executor every request gets the tokens it would have alone, with as many
        steps in flight as it allows, chunked and preempted."""
        for num_blocks in (60, 12):
            engine, worker = self._engine(FakeWorker(block_size=4), num_blocks)
            requests = [
                request(handle, [20 + handle * i % 50 for i in range(3 + handle * 4)], 9)
                for handle in range(1, 8)
            ]
            collector = Collector(engine)
            for item in requests:
                engine.add(item)
            collector.run()
            for item in requests:
                got = collector.tokens[item.handle]
                wanted = expected(item, min(96, (num_blocks - 1) * 4))
                assert got == wanted, f"request {item.handle} got {got}, alone it gets {wanted}"
            assert worker.steps, "the worker was never called"
            assert_clean(engine)
            engine.close()

    def test_a_warm_up_is_passed_on(self) -> None:
        """allocate_kv returns what the worker's did, or None where there is nothing to tell."""

        class Warm(FakeWorker):
            def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> WarmUp:
                super().allocate_kv(num_blocks, num_host_blocks)
                return WarmUp({"capture": 1.5}, 2, 300, ("a note",))

        executor = self.executor(Warm(block_size=4))
        executor.start()
        try:
            told = executor.allocate_kv(20)
        finally:
            executor.close()
        assert told in (None, WarmUp({"capture": 1.5}, 2, 300, ("a note",))), f"it told {told!r}"

    def test_masks_reach_the_step_they_are_for(self) -> None:
        """Masks given to `sample` decide the tokens of that step and no other."""
        worker = FakeWorker(block_size=4)
        executor = self.executor(worker)
        executor.start()
        executor.allocate_kv(20)
        tokens = []
        for step, allowed in enumerate((None, 13, None, 14)):
            plan = self._plan(step)
            masks = None
            if allowed is not None:
                bits = np.zeros((1, -(-worker.vocab_size // 32)), np.int32)
                bits[0, allowed // 32] = 1 << allowed % 32
                masks = LogitMasks(rows=np.zeros(1, np.int32), bitmask=bits)
            ticket = executor.submit(plan)
            executor.sample(ticket, masks)
            result = executor.collect(ticket)
            assert isinstance(result, StepResult), f"collect returned {type(result).__name__}"
            assert result.step == step, f"the result of step {result.step} came for step {step}"
            tokens.append(int(result.token_ids[0, 0]))
        executor.close()
        assert (tokens[1], tokens[3]) == (13, 14), f"with masks for 13 and 14 it gave {tokens}"
        assert tokens[0] not in (13, 14) or tokens[2] not in (13, 14), "masks stay for other steps"

    def test_results_may_be_kept(self) -> None:
        """The result of a step does not change when later steps run."""
        executor = self.executor(FakeWorker(block_size=4))
        executor.start()
        executor.allocate_kv(20)
        kept, copies = [], []
        for step in range(5):
            ticket = executor.submit(self._plan(step))
            executor.sample(ticket, None)
            kept.append(executor.collect(ticket))
            copies.append(kept[-1].token_ids.copy())
        executor.close()
        for result, copy in zip(kept, copies, strict=True):
            assert np.array_equal(result.token_ids, copy), f"step {result.step} was overwritten"

    def test_an_error_of_the_worker_reaches_the_engine(self) -> None:
        """An exception in the worker is raised by `submit`, `sample` or `collect`, with its text,
        and the executor can still be closed."""
        executor = self.executor(Broken(block_size=4))
        executor.start()
        executor.allocate_kv(20)
        try:
            for step in range(6):
                ticket = executor.submit(self._plan(step))
                executor.sample(ticket, None)
                executor.collect(ticket)
        except Exception as error:
            chain = f"{error} {error.__cause__!r} {error.__context__!r}"
            if "planted" not in chain:
                raise AssertionError(f"the worker's own message is lost: {error!r}") from error
        else:
            raise AssertionError("the worker failed and nobody said so")
        finally:
            executor.close()

    def test_close_after_nothing(self) -> None:
        """An executor that was never started can be closed, and leaves no thread."""
        import threading

        before = threading.active_count()
        executor = self.executor(FakeWorker())
        executor.close()
        second = self.executor(FakeWorker())
        second.start()
        second.close()
        assert threading.active_count() == before, "a thread is left"

    def test_engine_gives_the_tokens_of_local(self) -> None:
        """A real engine gives the tokens that it gives with the executor `local`."""
        if not self.own_process:
            self.executor(FakeWorker()).close()
        engine_run.compare_engines(self, {}, {"executor": {"kind": "local"}})

    # ---- helpers ----------------------------------------------------------------------------

    def _engine(self, worker: FakeWorker, num_blocks: int) -> tuple[Any, FakeWorker]:
        from octavo.engine.core import EngineCore
        from octavo.engine.scheduler.scheduler import Scheduler
        from octavo.engine.scheduler.step import SchedulerLimits

        executor = self.executor(worker)
        executor.start()
        executor.allocate_kv(num_blocks)
        ticks = iter(range(10**9))

        def clock() -> float:
            return float(next(ticks))

        limits = SchedulerLimits(
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=96,
            vocab_size=worker.vocab_size,
            block_size=4,
        )
        manager = create("kv_cache_manager", "paged", KVCacheManagerContext(num_blocks, 4, 4, 96))
        policy = create("scheduler_policy", "fcfs", SchedulerPolicyContext(4, 16, clock))
        preemption = create("preemption_policy", "recompute", PreemptionPolicyContext(1))
        scheduler = Scheduler(limits, manager, policy, preemption, clock)
        return EngineCore(scheduler, executor), worker

    @staticmethod
    def _plan(step: int) -> StepPlan:
        """One request with a prompt of three tokens, in its `step`-th step."""
        from octavo.core.messages import AdmittedRow
        from octavo.core.sampling_params import SamplingParams

        new = AdmittedRow(
            slot=0,
            handle=1,
            token_ids=np.asarray([11, 12, 17], np.int32),
            num_prompt=3,
            num_computed=0,
            blocks=np.asarray([[1, 2, 3]], np.int32),
            sampling=SamplingParams(),
            seed=0,
        )
        return StepPlan(
            step=step,
            slots=np.zeros(1, np.int32),
            counts=np.asarray([1 if step else 3], np.int32),
            num_decodes=int(step > 0),
            sample_rows=np.zeros(1, np.int32),
            layout=1,
            released=np.zeros(0, np.int32),
            appended=np.zeros((4, 0), np.int32),
            copies=np.zeros((5, 0), np.int32),
            admitted=[] if step else [new],
        )
