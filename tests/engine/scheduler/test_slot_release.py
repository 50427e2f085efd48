"""However a sequence leaves its slot, the slot is freed once, and never under a step in flight."""

from __future__ import annotations

import pytest

from octavo.core.messages import StepResult
from octavo.testing.fake_engine import Collector, assert_clean, make_fake_engine, request


def watch(engine):
    """Record the steps in flight that use a slot while it is freed, and all slots freed."""
    slots, freed, in_use = engine.scheduler.slots, [], []
    free = slots.free

    def watched(slot):
        freed.append(slot)
        in_use.extend(s.step for s in engine.scheduler.in_flight if slot in s.slots.tolist())
        free(slot)

    slots.free = watched
    return freed, in_use


def finish(engine, collector):
    """All four generate to their last token."""


def abort(engine, collector):
    """One is aborted while steps are in flight, where there may be several."""
    collector.step()
    collector.step()
    assert len(engine.scheduler.in_flight) == engine.executor.max_in_flight - 1
    engine.abort([2])


def fail(engine, collector):
    """The executor returns an error for one row."""
    collect = engine.executor.collect

    def failing(ticket) -> StepResult:
        result = collect(ticket)
        if len(result.token_ids) == 4:
            engine.executor.collect = collect
            result.errors = {1: "not a number"}
        return result

    engine.executor.collect = failing


@pytest.mark.parametrize("leave", [finish, abort, fail])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("manager", ["paged", "radix", "none"])
def test_a_slot_is_freed_once_and_not_under_a_step_in_flight(leave, in_flight, manager):
    engine = make_fake_engine(manager=manager, in_flight=in_flight, max_num_seqs=4)
    freed, in_use = watch(engine)
    for handle in range(1, 5):
        engine.add(request(handle, [handle, 1, 2], 12, ignore_eos=True))
    collector = Collector(engine)
    leave(engine, collector)
    collector.run()
    assert sorted(freed) == [0, 1, 2, 3]
    assert not in_use
    reasons = {finish: "length", abort: "abort", fail: "error"}
    assert collector.reasons[2] == reasons[leave]
    assert_clean(engine)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_preemption_frees_slots_the_same_way(in_flight):
    engine = make_fake_engine(num_blocks=16, max_num_seqs=6, in_flight=in_flight)
    freed, in_use = watch(engine)
    for handle in range(1, 7):
        engine.add(request(handle, [handle, 1, 2], 30, ignore_eos=True))
    Collector(engine).run()
    assert len(freed) == 6 + engine.scheduler.num_preemptions > 6
    assert not in_use
    assert_clean(engine)


def test_refusing_a_request_leaves_slots_alone():
    engine = make_fake_engine(in_flight=2)
    freed, _ = watch(engine)
    engine.add(request(1, [1, 2], 12, ignore_eos=True))
    collector = Collector(engine)
    collector.step()
    engine.scheduler.refuse(9, "abort")
    collector.step()
    assert collector.reasons == {9: "abort"}
    assert not freed
    collector.run()
    assert freed == [0]
    assert_clean(engine)
