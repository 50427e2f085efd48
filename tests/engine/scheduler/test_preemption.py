"""What becomes of victims: the cost model, what is told of it, and what others got wrong."""

from __future__ import annotations

import pytest

from octavo.core.contracts.observer import Observer
from octavo.core.contracts.preemption_policy import (
    PreemptionAction,
    PreemptionPolicyContext,
    StepCost,
    Victim,
)
from octavo.core.contracts.provider import NoOptions
from octavo.plugins.preemption.cost_model import CostModelPolicy
from octavo.testing.fake_engine import (
    Collector,
    assert_clean,
    expected,
    make_fake_engine,
    request,
)


def victim(num_computed, num_blocks, free=100):
    return Victim(0, 1, num_computed, num_blocks, free)


def test_the_cost_model_compares_measured_times():
    policy = CostModelPolicy(NoOptions(), PreemptionPolicyContext(1))
    policy.observe(StepCost(4, 0, 0, compute_s=0.010, copy_s=0.0))
    policy.observe(StepCost(4, 50, 0, compute_s=0.060, copy_s=0.0))  # 1 ms a prompt token
    assert policy.decide(victim(100, 7)) is PreemptionAction.SWAP
    assert policy.reason() == "to measure a copy"
    policy.observe(StepCost(4, 0, 7, compute_s=0.010, copy_s=0.014))  # 2 ms a block
    assert policy.costs(victim(100, 7)) == (pytest.approx(0.028), pytest.approx(0.100))
    assert policy.decide(victim(100, 7)) is PreemptionAction.SWAP
    assert policy.reason() == "swap 28 ms < recompute 100 ms"
    assert policy.decide(victim(3, 1)) is PreemptionAction.RECOMPUTE
    assert policy.reason() == "swap 4 ms >= recompute 3 ms"
    assert policy.decide(victim(100, 7, free=6)) is PreemptionAction.RECOMPUTE
    assert policy.reason() == "the host pool has 6 free blocks, 7 are needed"


class Recorder(Observer):
    def __init__(self):
        self.steps = []

    def on_step(self, record):
        self.steps.append(record)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_the_step_log_tells_of_every_victim(in_flight):
    recorder = Recorder()
    engine = make_fake_engine(
        preemption="swap",
        num_blocks=16,
        num_swap_blocks=6,
        max_num_seqs=6,
        in_flight=in_flight,
        observers=[("recorder", recorder)],
    )
    for handle in range(1, 7):
        engine.add(request(handle, [handle, 1, 2], 30, ignore_eos=True))
    Collector(engine).run()
    stats = engine.scheduler.stats()
    told = [record for step in recorder.steps for record in step.preemptions]
    assert len(told) == stats.num_preemptions
    assert sum(record.action == "swap" for record in told) == stats.num_swap_outs > 0
    full = [record for record in told if record.action == "recompute"]
    assert full
    assert {record.reason for record in full} == {"the host pool is full"}
    assert all(record.lost_to[1] == "blocks" for record in told)
    back = [handle for step in recorder.steps for handle in step.swapped_in]
    assert len(back) == stats.num_swap_ins
    assert sum(s.num_copies for s in recorder.steps) == sum(engine.executor.worker.num_copies)


def test_a_swapped_sequence_comes_back_before_what_arrived_later():
    engine = make_fake_engine(preemption="swap", num_blocks=12, num_swap_blocks=40, max_num_seqs=3)
    reqs = [request(h, [h] * 9, 12, ignore_eos=True) for h in range(1, 8)]
    for req in reqs:
        engine.add(req)
    first = {}
    submit = engine.executor.submit

    def watched(plan):
        waits = {h for h, s in engine.scheduler.sequences.items() if s.swapped is not None}
        for row in plan.admitted:
            if row.handle not in first:
                first[row.handle] = waits
        return submit(plan)

    engine.executor.submit = watched
    collector = Collector(engine).run()
    assert engine.scheduler.stats().num_swap_outs > 0
    assert not any(first.values()), "something began while a swapped sequence waited"
    assert collector.tokens == {r.handle: expected(r, 44) for r in reqs}


@pytest.mark.parametrize("manager", ["paged", "radix", "none"])
@pytest.mark.parametrize("swap", [0, 3, 40])
def test_four_choices_on_a_tiny_pool_make_progress(manager, swap):
    engine = make_fake_engine(
        manager=manager, preemption="swap", num_blocks=14, num_swap_blocks=swap, in_flight=2
    )
    reqs = []
    for index in range(4):
        reqs.append(
            request(
                index + 1,
                [5] * 11,
                20,
                parent=1 if index else None,
                index=index,
                ignore_eos=True,
            )
        )
        engine.add(reqs[-1])
    collector = Collector(engine).run()
    assert collector.tokens == {r.handle: expected(r, 52) for r in reqs}
    assert engine.scheduler.num_preemptions > 0
    assert_clean(engine)


@pytest.mark.parametrize("manager", ["paged", "radix"])
def test_prefix_hits_after_a_preemption_resume_correctly(manager):
    engine = make_fake_engine(manager=manager, num_blocks=20, max_num_seqs=6)
    reqs = [request(h, [7, 7, 7, 7, 8, 8, 8, 8, h], 24, ignore_eos=True) for h in range(10, 22)]
    for req in reqs:
        engine.add(req)
    collector = Collector(engine).run()
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.kv.stats().prefix_hits > 0
    assert collector.tokens == {r.handle: expected(r, 76) for r in reqs}


def test_aborting_a_swapped_sequence_frees_its_host_blocks():
    engine = make_fake_engine(preemption="swap", num_blocks=16, num_swap_blocks=60, max_num_seqs=6)
    for handle in range(1, 7):
        engine.add(request(handle, [handle, 1, 2], 30, ignore_eos=True))
    collector = Collector(engine)
    while not engine.scheduler.preemption.num_swapped:
        collector.step()
    gone = [h for h, s in engine.scheduler.sequences.items() if s.swapped is not None]
    engine.abort(gone)
    assert engine.scheduler.kv.stats().num_free_swap_blocks == 60
    collector.run()
    assert {h for h, reason in collector.reasons.items() if reason == "abort"} == set(gone)
    assert_clean(engine)
