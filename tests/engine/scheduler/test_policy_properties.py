"""Every policy on tiny pools, and an independent scheduler that agrees with `fcfs` step by step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from octavo.testing.fake_engine import (
    Collector,
    assert_clean,
    expected,
    make_fake_engine,
    request,
)

POLICIES = {
    "fcfs": "fcfs",
    "priority": {"name": "priority", "ageing_s": 20},
    "sjf": {"name": "sjf", "tokens_per_s": 0.5},
    "fair": {"name": "fair", "weights": {"u1": 3}},
    "deadline": {
        "name": "deadline",
        "classes": {0: {"ttft_s": 5, "itl_s": 3}, 1: {"ttft_s": 90}},
        "min_chunk": 1,
    },
    "priority+fair": [{"name": "priority", "ageing_s": 20}, "fair"],
    "fair+sjf": ["fair", "sjf"],
}
COMBINATIONS = list(
    itertools.product(POLICIES, ["paged", "radix", "none"], ["recompute", "swap", "cost_model"])
)
pools = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([11, 14, 20, 300]),
        "max_num_seqs": st.integers(1, 5),
        "budget": st.sampled_from([6, 9, 16, 64]),
        "prefix_caching": st.booleans(),
        "in_flight": st.integers(1, 3),
        "max_chunk": st.sampled_from([None, 5]),
        "num_swap_blocks": st.sampled_from([1, 4, 40]),
        "num_host_cache_blocks": st.sampled_from([0, 0, 2, 8]),
        "eviction": st.sampled_from(["lru", "lfu", "prefix_aware"]),
    }
)
arrivals = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=36),  # prompt
        st.integers(1, 25),  # max_tokens
        st.integers(0, 2),  # priority
        st.sampled_from([None, "u1", "u2"]),
        st.integers(0, 20),  # step of arrival
    ),
    max_size=8,
)


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
@settings(max_examples=8, deadline=None, phases=[Phase.generate])
@given(
    options=pools,
    work=arrivals,
    aborts=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)), max_size=3),
)
def test_every_combination_keeps_the_rules(combination, options, work, aborts):
    """All end (nothing starves), with the tokens of an ample pool; no step passes a budget; aborts
    at any moment leave nothing behind."""
    policy, manager, preemption = combination
    if manager != "paged":
        options["num_host_cache_blocks"] = 0
    if preemption == "recompute":
        options["num_swap_blocks"] = 0
    parts = {"policy": POLICIES[policy], "manager": manager, "preemption": preemption}
    engine = make_fake_engine(**parts, **options)
    most = min(96, (options["num_blocks"] - 1) * 4)
    todo = {
        h: (at, request(h, prompt, count, priority=priority, user=user))
        for h, (prompt, count, priority, user, at) in enumerate(work, 1)
    }
    wanted = {h: expected(req, most) for h, (_, req) in todo.items()}
    collector, step = Collector(engine), 0
    waiting, due = dict(todo), sorted(aborts)
    while waiting or due or engine.has_work():
        for handle in [h for h, (at, _) in waiting.items() if at <= step]:
            engine.add(waiting.pop(handle)[1])
        while due and due[0][0] <= step:
            engine.abort([due.pop(0)[1]])
        collector.step()
        step += 1
        assert step < 4000, "something starves"
    for handle in todo:
        got = collector.tokens.get(handle, [])
        if collector.reasons[handle] == "abort":
            assert got == wanted[handle][: len(got)]
        else:
            assert got == wanted[handle]
    for rows, tokens in engine.executor.worker.steps:
        assert rows <= options["max_num_seqs"]
        assert tokens <= options["budget"]
    assert_clean(engine)


class NaiveScheduler:
    """First come, first served over plain lists: an order of handles, and counts.

    Blocks are only counted (no prefix cache). Written from the rules alone: decodes first, the
    latest arrival gives way when one lacks a block, then chunks of the prompts that were begun, by
    admission, then new ones while slots, tokens and blocks last; a prompt gets all its blocks at
    once; one that was preempted comes back only when every running one could take a block more.
    """

    def __init__(self, blocks, block_size, num_slots, budget, max_len):
        self.free, self.size, self.num_slots = blocks, block_size, num_slots
        self.budget, self.max_len, self.pool = budget, max_len, blocks
        self.waiting, self.decoding, self.prefilling = [], [], []
        self.state = {}

    def add(self, handle, length, most):
        end = min(length + most, self.max_len, self.pool * self.size)
        self.state[handle] = {"known": length, "done": 0, "end": end, "held": 0, "lost": 0}
        self.waiting.append(handle)
        self.waiting.sort()

    def need(self, tokens):
        return -(-tokens // self.size)

    def step(self):
        """(batch as (handle, tokens), preempted handles)."""
        preempted = self.make_room()
        batch = [(handle, 1) for handle in self.decoding]
        left = self.budget - len(batch)
        for handle in list(self.prefilling):
            item = self.state[handle]
            count = min(left, item["known"] - item["done"])
            left -= count
            if count:
                batch.append((handle, count))
        while self.waiting and left > 0 and self.running() < self.num_slots:
            handle = self.waiting[0]
            item = self.state[handle]
            blocks = self.need(item["known"])
            if (
                item["lost"]
                and self.running()
                and ((self.free - self.running()) * self.size < item["known"])
            ):
                break
            if blocks > self.free:
                break
            self.waiting.pop(0)
            self.free -= blocks
            item["held"] = blocks
            self.prefilling.append(handle)
            count = min(left, item["known"])
            left -= count
            batch.append((handle, count))
        for handle, count in batch:
            self.advance(handle, count)
        return batch, preempted

    def running(self):
        return len(self.decoding) + len(self.prefilling)

    def make_room(self):
        preempted = []
        while True:
            for handle in self.decoding:
                item = self.state[handle]
                if self.need(item["known"]) > item["held"]:
                    if not self.free:
                        break
                    self.free -= 1
                    item["held"] += 1
            else:
                return preempted
            victim = max([*self.decoding, *self.prefilling])
            self.leave(victim)
            item = self.state[victim]
            item["done"], item["lost"] = 0, item["lost"] + 1
            self.waiting = sorted([*self.waiting, victim])
            preempted.append(victim)

    def leave(self, handle):
        for rows in (self.decoding, self.prefilling):
            if handle in rows:
                rows.remove(handle)
        self.free += self.state[handle]["held"]
        self.state[handle]["held"] = 0

    def advance(self, handle, count):
        item = self.state[handle]
        item["done"] += count
        if item["done"] < item["known"]:
            return
        item["known"] += 1
        if handle in self.prefilling:
            self.prefilling.remove(handle)
            self.decoding.append(handle)
        if item["known"] == item["end"]:
            self.leave(handle)


@settings(max_examples=120, deadline=None)
@given(
    blocks=st.sampled_from([8, 11, 15, 60]),
    num_slots=st.integers(1, 6),
    budget=st.sampled_from([7, 12, 40]),
    work=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 15)), max_size=9
    ),
)
def test_fcfs_agrees_with_a_naive_scheduler(blocks, num_slots, budget, work):
    """Handles in order, token counts, and who is preempted, in every step."""
    engine = make_fake_engine(
        num_blocks=blocks + 1, max_num_seqs=num_slots, budget=budget, prefix_caching=False
    )
    naive = NaiveScheduler(blocks, 4, num_slots, budget, 96)
    seen = []
    original, slots = engine.executor.submit, engine.scheduler.slots

    def submit(plan):
        for row in plan.admitted:
            handle_of[row.slot] = row.handle
        batch = [handle_of[slot] for slot in plan.slots.tolist()]
        seen.append(list(zip(batch, plan.counts.tolist(), strict=True)))
        return original(plan)

    handle_of = {}
    engine.executor.submit = submit
    lost = []
    preempt = engine.scheduler.preemption.preempt

    def watched(slot, by, why):
        lost.append(int(slots.handle[slot]))
        return preempt(slot, by, why)

    engine.scheduler.preemption.preempt = watched
    work.sort(key=lambda item: item[2])  # handles in order of arrival
    todo = [(at, h, length, most) for h, (length, most, at) in enumerate(work, 1)]
    step = 0
    while todo or engine.has_work():
        for item in [item for item in todo if item[0] <= step]:
            todo.remove(item)
            _, handle, length, most = item
            if length + 1 > blocks * 4:
                continue
            engine.add(request(handle, [handle] * length, most, ignore_eos=True))
            naive.add(handle, length, most)
        step += 1
        lost.clear()
        before = len(seen)
        engine.step()
        batch, preempted = naive.step()
        assert lost == preempted
        assert (seen[before] if len(seen) > before else []) == batch
        assert step < 3000
    assert not naive.waiting
    assert naive.running() == 0
    assert_clean(engine)
