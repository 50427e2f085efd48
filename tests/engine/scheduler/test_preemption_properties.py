"""Every KV cache manager with every way to preempt, on pools so small that preempting is the rule.

A worker that reads its tokens back through the block tables runs every plan, host copies included,
one step or up to two steps after it was made.
"""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from octavo.core.contracts.preemption_policy import PreemptionAction, PreemptionPolicy
from octavo.testing.fake_engine import (
    Collector,
    assert_clean,
    expected,
    make_fake_engine,
    request,
)

MANAGERS = ["paged", "radix", "none"]
PREEMPTION = ["recompute", "swap", "cost_model"]


class Mixed(PreemptionPolicy):
    """Swaps two victims of three."""

    swaps = True

    def __init__(self):
        self.count = 0

    def decide(self, victim):
        self.count += 1
        return PreemptionAction.SWAP if self.count % 3 else PreemptionAction.RECOMPUTE


class Machine(RuleBasedStateMachine):
    """Requests come, are forked and aborted at any moment; at the end every sequence that was not
    aborted has exactly the tokens of an undisturbed run, and nothing is left behind."""

    manager = preemption = ""

    @initialize(
        sizes=st.tuples(
            st.sampled_from([9, 12, 20]),
            st.sampled_from([0, 2, 6, 40]),
            st.sampled_from([0, 0, 1, 8]),
        ),
        in_flight=st.integers(1, 3),
        budget=st.sampled_from([6, 16, 64]),
        eviction=st.sampled_from(["lru", "lfu", "prefix_aware"]),
        prefix_caching=st.booleans(),
    )
    def start(self, sizes, in_flight, budget, eviction, prefix_caching):
        num_blocks, swap, cache = sizes
        self.most = (num_blocks - 1) * 4
        self.engine = make_fake_engine(
            manager=self.manager,
            preemption=Mixed() if self.preemption == "mixed" else self.preemption,
            eviction=eviction,
            num_blocks=num_blocks,
            num_swap_blocks=swap,
            num_host_cache_blocks=cache if self.manager == "paged" else 0,
            prefix_caching=prefix_caching,
            in_flight=in_flight,
            budget=budget,
            max_num_seqs=5,
        )
        self.collector = Collector(self.engine)
        self.handles = itertools.count(1)
        self.requests = {}
        self.aborted = set()

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=30),
        max_tokens=st.integers(1, 30),
        n=st.sampled_from([1, 1, 1, 2, 4]),
    )
    def add(self, prompt, max_tokens, n):
        parent = None
        for index in range(n):
            req = request(
                next(self.handles), prompt[: self.most - 1], max_tokens, parent=parent, index=index
            )
            parent = parent or req.handle
            self.engine.add(req)
            self.requests[req.handle] = req

    @precondition(lambda self: self.requests)
    @rule(count=st.integers(1, 12))
    def steps(self, count):
        for _ in range(count):
            self.collector.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        handle = data.draw(st.sampled_from(sorted(self.requests)))
        self.engine.abort([handle])
        self.aborted.add(handle)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.collector.run()
        for handle, req in self.requests.items():
            wanted = expected(req, min(96, self.most))
            got = self.collector.tokens.get(handle, [])
            if self.collector.reasons[handle] == "abort":
                assert handle in self.aborted
                assert got == wanted[: len(got)]
            else:
                assert got == wanted
        assert_clean(self.engine)
        stats = self.engine.scheduler.stats()
        assert stats.num_swap_ins <= stats.num_swap_outs <= stats.num_preemptions
        worker = self.engine.executor.worker
        if not self.aborted and self.manager != "paged":
            assert bool(worker.num_copies[1]) == bool(stats.num_swap_outs)


@pytest.mark.parametrize("preemption", [*PREEMPTION, "mixed"])
@pytest.mark.parametrize("manager", MANAGERS)
def test_combination(manager, preemption):
    case = type("Case", (Machine,), {"manager": manager, "preemption": preemption}).TestCase
    case.settings = settings(
        max_examples=15, stateful_step_count=20, deadline=None, phases=[Phase.generate]
    )
    case("runTest").runTest()


def six(engine):
    reqs = [request(h, [h, 1, 2], 30, ignore_eos=True) for h in range(1, 7)]
    for req in reqs:
        engine.add(req)
    collector = Collector(engine).run()
    assert collector.tokens == {r.handle: expected(r, 60) for r in reqs}
    assert_clean(engine)
    return engine.scheduler.stats()


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_swapped_sequences_are_not_computed_again(manager, in_flight):
    engine = make_fake_engine(
        manager=manager,
        preemption="swap",
        num_blocks=16,
        num_swap_blocks=60,
        max_num_seqs=6,
        in_flight=in_flight,
    )
    stats = six(engine)
    assert stats.num_swap_outs == stats.num_preemptions == stats.num_swap_ins > 5
    # Three prompt tokens and 29 of the 30 that were generated, once each.
    computed = sum(tokens for _, tokens in engine.executor.worker.steps)
    surplus = 0 if in_flight == 1 else 6 * (in_flight - 1)
    assert 6 * 32 <= computed <= 6 * 32 + surplus


def test_recompute_computes_again():
    engine = make_fake_engine(num_blocks=16, max_num_seqs=6, prefix_caching=False)
    stats = six(engine)
    assert stats.num_swap_outs == 0
    assert stats.num_preemptions > 5
    assert sum(tokens for _, tokens in engine.executor.worker.steps) > 6 * 32


@pytest.mark.parametrize("swap", [0, 1, 3])
def test_a_full_host_pool_falls_back_to_recompute(swap):
    engine = make_fake_engine(
        preemption="swap", num_blocks=16, num_swap_blocks=swap, max_num_seqs=6
    )
    stats = six(engine)
    assert stats.num_preemptions > stats.num_swap_outs
    if not swap:
        assert stats.num_swap_outs == 0
