"""Scheduler policies: who goes first, who gives way, and what is promised under all of them."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from octavo.core.contracts.scheduler_policy import (
    SchedulerPolicyContext,
    WaitingRequest,
)
from octavo.core.errors import ConfigError
from octavo.plugins.scheduler_policies.deadline import DeadlineOptions, DeadlinePolicy
from octavo.plugins.scheduler_policies.fair import FairOptions, FairPolicy
from octavo.plugins.scheduler_policies.priority import PriorityOptions, PriorityPolicy
from octavo.plugins.scheduler_policies.queue import WaitingQueue
from octavo.plugins.scheduler_policies.sjf import SjfOptions, SjfPolicy
from octavo.plugins.scheduler_policies.step_time import StepTimeModel
from octavo.testing.fake_engine import (
    Collector,
    assert_clean,
    expected,
    make_fake_engine,
    request,
)

CONTEXT = SchedulerPolicyContext(8, 64, lambda: 0.0)
POLICIES = [
    "fcfs",
    "priority",
    "sjf",
    {"name": "fair", "weights": {"a": 3}},
    {"name": "deadline", "classes": {0: {"ttft_s": 5, "itl_s": 2}}},
    ["priority", "fair"],
    ["fair", "sjf"],
    ["priority", "fair", "sjf"],
]


def name_of(policy):
    if isinstance(policy, list):
        return "+".join(policy)
    return policy["name"] if isinstance(policy, dict) else policy


every_policy = pytest.mark.parametrize("policy", POLICIES, ids=name_of)


def drain(policy):
    out = []
    while policy.peek() is not None:
        out.append(policy.pop().handle)
    return out


def test_queue_removes_lazily_and_stays_small():
    queue = WaitingQueue()
    requests = [WaitingRequest(h, 0.0, 1) for h in range(1000)]
    for req in requests:
        queue.add(float(req.handle % 7), req)
    for req in requests[:990]:
        assert queue.remove(req.handle) is req
    assert queue.remove(5) is None
    assert len(queue) == 10
    assert len(queue._heap) < 100
    queue.add(-1.0, requests[5])  # back again: its dead entry does not count
    assert queue.pop() is requests[5]
    assert [queue.pop().handle for _ in range(10)] == sorted(
        range(990, 1000), key=lambda h: (h % 7, h)
    )
    assert queue.peek() is None


def test_priority_orders_by_class_and_ages():
    policy = PriorityPolicy(PriorityOptions(ageing_s=10), CONTEXT)
    policy.add(WaitingRequest(1, 0.0, 5, priority=1))
    policy.add(WaitingRequest(2, 5.0, 5, priority=0))  # not ten seconds later: goes first
    policy.add(WaitingRequest(3, 11.0, 5, priority=0))  # too late
    policy.add(WaitingRequest(4, 0.0, 5, priority=-2))
    assert drain(policy) == [4, 2, 1, 3]


def test_sjf_prefers_short_prompts_and_ages():
    policy = SjfPolicy(SjfOptions(tokens_per_s=10), CONTEXT)
    policy.add(WaitingRequest(1, 0.0, 100))
    policy.add(WaitingRequest(2, 5.0, 10))
    policy.add(WaitingRequest(3, 9.5, 10))
    assert drain(policy) == [2, 1, 3]


def test_sjf_does_not_count_what_is_cached_or_on_the_host():
    policy = SjfPolicy(SjfOptions(tokens_per_s=0.01), CONTEXT)
    policy.add(WaitingRequest(1, 0.0, 100, num_computed=95))
    policy.add(WaitingRequest(2, 0.0, 100, num_cached=98))
    policy.add(WaitingRequest(3, 0.0, 4))
    policy.add(WaitingRequest(4, 0.0, 100, num_computed=40, num_cached=99))
    assert drain(policy) == [4, 2, 3, 1]
    engine = make_fake_engine(policy={"name": "sjf", "tokens_per_s": 0.01}, max_num_seqs=1)
    collector = Collector(engine)
    engine.add(request(1, [5] * 40, 2))
    collector.run()
    for handle, prompt in ((2, [6] * 10), (3, [7] * 20), (4, [5] * 40 + [8])):
        engine.add(request(handle, prompt, 2))
    collector.run()
    assert list(collector.reasons) == [1, 4, 2, 3]


def running(engine):
    slots = engine.scheduler.slots
    return {h for h in slots.handle.tolist() if h >= 0}


def test_priority_takes_a_seat_from_the_lowest_class():
    engine = make_fake_engine(policy={"name": "priority", "ageing_s": 1e6}, max_num_seqs=2)
    collector = Collector(engine)
    reqs = [
        request(1, [1] * 5, 20, priority=1, ignore_eos=True),
        request(2, [2] * 5, 20, priority=7, ignore_eos=True),
        request(3, [3] * 5, 20, priority=0, ignore_eos=True),
        request(4, [4] * 5, 20, priority=7, ignore_eos=True),
    ]
    for req in reqs[:2]:
        engine.add(req)
    collector.step()
    for req in reqs[2:]:
        engine.add(req)
    collector.step()
    assert running(engine) == {1, 3}
    collector.run()
    assert collector.tokens == {r.handle: expected(r) for r in reqs}
    assert list(collector.reasons)[-2:] == [2, 4]
    assert engine.scheduler.num_preemptions == 1
    assert_clean(engine)


def test_priority_takes_blocks_and_can_be_told_not_to():
    for preempt in (True, False):
        engine = make_fake_engine(
            policy={"name": "priority", "ageing_s": 1e6, "preempt": preempt},
            num_blocks=13,
            prefix_caching=False,
        )
        collector = Collector(engine)
        low = request(1, list(range(28)), 12, priority=3, ignore_eos=True)
        high = request(2, list(range(30, 60)), 8, priority=0, ignore_eos=True)
        engine.add(low)
        collector.step()
        engine.add(high)
        collector.run()
        assert collector.tokens == {1: expected(low, 48), 2: expected(high, 48)}
        assert list(collector.reasons) == ([2, 1] if preempt else [1, 2])
        assert engine.scheduler.num_preemptions == (1 if preempt else 0)
        assert_clean(engine)


@pytest.mark.parametrize("policy", ["priority", ["priority", "fair"]], ids=name_of)
def test_a_stream_of_better_requests_does_not_starve_a_class(policy):
    if isinstance(policy, str):
        policy = {"name": policy, "ageing_s": 300}
    else:
        policy = [{"name": "priority", "ageing_s": 300}, "fair"]
    engine = make_fake_engine(policy=policy, max_num_seqs=1)
    collector = Collector(engine)
    engine.add(request(1, [1] * 5, 6, priority=1, ignore_eos=True))
    handles = itertools.count(2)
    for _ in range(400):
        if len(engine.scheduler.policy) < 3:
            engine.add(request(next(handles), [2] * 5, 3, priority=0, ignore_eos=True))
        collector.step()
        if 1 in collector.reasons:
            break
    assert collector.reasons[1] == "length"
    assert len(collector.reasons) > 20, "the better class went first for a while"


def served(engine, names, steps):
    """Tokens by user: prompt tokens of everyone admitted and output tokens."""
    collector = Collector(engine)
    for _ in range(steps):
        collector.step()
    count = Counter()
    for handle, tokens in collector.tokens.items():
        user, prompt = names[handle]
        count[user] += len(tokens) + prompt
    return count


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("weights", [{"gold": 3, "free": 1}, {"gold": 1, "free": 1}])
def test_fair_shares_tokens_by_weight(weights, nested):
    fair = {"name": "fair", "weights": weights}
    engine = make_fake_engine(
        policy=["priority", fair] if nested else fair,
        max_num_seqs=4,
        budget=64,
        prefix_caching=False,
    )
    random = np.random.default_rng(0)
    names = {}
    for handle in range(1, 1201):  # free sends longer requests, and all of them first
        user = "free" if handle <= 600 else "gold"
        length, most = (30, 20) if user == "free" else (8, 12)
        prompt = random.integers(10, 90, int(random.integers(2, length))).tolist()
        names[handle] = (user, len(prompt))
        engine.add(request(handle, prompt, int(random.integers(1, most)), user=user))
    count = served(engine, names, 700)
    left = Counter(r.user for r in engine.scheduler.policy.waiting())
    assert min(left["gold"], left["free"]) > 50, "both must be backlogged to the end"
    share = count["gold"] / (count["gold"] + count["free"])
    wanted = weights["gold"] / sum(weights.values())
    assert abs(share - wanted) <= 0.05 * wanted


def test_fair_gives_no_credit_for_absence():
    policy = FairPolicy(FairOptions(prompt_cost=1), CONTEXT)
    for handle in range(20):
        policy.add(WaitingRequest(handle, float(handle), 100, user="busy"))
    for _ in range(10):
        policy.pop()
    for handle in range(20, 30):
        policy.add(WaitingRequest(handle, 50.0, 100, user="late"))
    users = [policy.pop().user for _ in range(10)]
    assert Counter(users) == {"busy": 5, "late": 5}


def test_fair_forgets_idle_users_but_not_what_they_owe():
    policy = FairPolicy(FairOptions(), CONTEXT)
    policy.add(WaitingRequest(0, 0.0, 10**6, user="owes"))
    policy.add(WaitingRequest(1, 0.0, 5, user="pays"))
    assert [policy.pop().user, policy.pop().user] == ["owes", "pays"]
    for handle in range(2, 20000):
        policy.add(WaitingRequest(handle, 1.0, 5, user=f"once {handle}"))
        assert policy.pop().handle == handle
    assert len(policy._numbers) <= 4096
    assert len(policy._counters) <= 4096
    policy.add(WaitingRequest(20001, 3.0, 5, user="pays"))
    policy.add(WaitingRequest(20000, 2.0, 5, user="owes"))
    assert [policy.pop().user, policy.pop().user] == ["pays", "owes"]


def test_user_numbers_do_not_grow_with_all_users_ever_seen(monkeypatch):
    monkeypatch.setattr("octavo.engine.scheduler.state._IDLE_USERS", 16)
    engine = make_fake_engine(policy="fair", max_num_seqs=4)
    table = engine.scheduler.slots
    engine.add(request(1, [1, 2], 90, user="stays", ignore_eos=True))
    engine.step()
    number = int(table.user[0])
    for handle in range(2, 200):
        engine.add(request(handle, [3], 1, user=f"once {handle}"))
        engine.step()
        if handle % 40 == 0:
            engine.abort([1])
            engine.step()
            engine.add(request(1, [1, 2], 90, user="stays", ignore_eos=True))
            engine.step()
        slot = engine.scheduler.sequences[1].slot
        assert table.user_names[table.user[slot]] == "stays"
    assert len(table.user_names) == len(table.users) < 30
    assert number


def test_fair_charges_a_preempted_request_once():
    policy = FairPolicy(FairOptions(), CONTEXT)
    policy.add(WaitingRequest(1, 0.0, 100, user="a"))
    policy.add(WaitingRequest(2, 0.0, 10, user="b"))
    assert policy.pop().handle == 1
    policy.add(WaitingRequest(1, 0.0, 120, user="a", num_preemptions=1))
    assert policy.pop().handle == 2
    assert policy.pop().handle == 1
    assert policy._counters[:2].tolist() == [100, 10]


@pytest.mark.parametrize("weight", [0, -1, float("nan")])
def test_fair_refuses_weights_that_mean_nothing(weight):
    with pytest.raises(ValueError, match="greater than 0"):
        FairOptions(weights={"a": weight})


def test_deadline_orders_by_class_targets():
    options = DeadlineOptions(classes={0: {"ttft_s": 1}, 5: {"ttft_s": 100}})
    policy = DeadlinePolicy(options, CONTEXT)
    policy.add(WaitingRequest(1, 0.0, 5, priority=5))
    policy.add(WaitingRequest(2, 50.0, 5, priority=0))
    policy.add(WaitingRequest(3, 99.5, 5, priority=0))
    assert drain(policy) == [2, 1, 3]


def test_step_cost_is_learned_from_what_steps_took():
    cost = StepTimeModel()
    assert cost.prefill_tokens(1.0) is None
    for _ in range(50):
        cost.add(0.010, 0)
        cost.add(0.010 + 100 * 0.001, 100)
    assert cost.prefill_tokens(0.060) == pytest.approx(50, abs=1)
    assert cost.prefill_tokens(0.005) == 0


def timed_engine(policy, step_seconds, **options):
    """An engine whose clock advances by `step_seconds(decodes, prefill tokens)` a step."""
    now = [0.0]
    engine = make_fake_engine(policy=policy, clock=lambda: now[0], **options)
    original = engine.executor.submit

    def submit(plan):
        prefill = int(plan.counts[plan.num_decodes :].sum())
        now[0] += step_seconds(plan.num_decodes, prefill)
        return original(plan)

    engine.executor.submit = submit
    return engine, now


def test_deadline_cuts_chunks_so_that_decodes_keep_their_target():
    def seconds(decodes, prefill):
        return 0.010 + 0.001 * prefill

    gaps = {}
    for itl in (0.040, 10.0):
        policy = {"name": "deadline", "default": {"ttft_s": 1, "itl_s": itl}, "min_chunk": 1}
        engine, now = timed_engine(
            policy, seconds, budget=80, max_num_seqs=4, max_model_len=200, num_blocks=900
        )
        collector = Collector(engine)
        engine.add(request(1, [1] * 4, 150, ignore_eos=True))
        times = []
        for step in range(140):
            if step % 10 == 5:
                engine.add(request(step + 2, [step % 90] * 90, 2, ignore_eos=True))
            before = len(collector.tokens.get(1, ()))
            collector.step()
            if len(collector.tokens.get(1, ())) > before:
                times.append(now[0])
        assert 102 in [h for h in collector.reasons if h > 1] or len(collector.reasons) > 8
        gaps[itl] = float(np.diff(times)[40:].max())
    assert gaps[10.0] > 0.080
    assert gaps[0.040] <= 0.044


def test_deadline_without_chunks_computes_whole_prompts():
    policy = {"name": "deadline", "default": {"itl_s": 0.001}, "min_chunk": 1}
    engine = make_fake_engine(policy=policy, chunked_prefill=False, budget=96)
    reqs = [request(h, [h] * 20, 6, ignore_eos=True) for h in range(1, 6)]
    for req in reqs:
        engine.add(req)
    collector = Collector(engine).run()
    assert collector.tokens == {r.handle: expected(r) for r in reqs}


def test_composition_takes_the_class_from_outside_and_the_request_from_inside():
    policy = [{"name": "priority", "ageing_s": 1e6}, {"name": "sjf", "tokens_per_s": 0.01}]
    engine = make_fake_engine(policy=policy, max_num_seqs=1)
    reqs = [
        request(1, [1] * 30, 2, priority=1),
        request(2, [2] * 3, 2, priority=1),
        request(3, [3] * 40, 2, priority=0),
        request(4, [4] * 4, 2, priority=0),
    ]
    for req in reqs:
        engine.add(req)
    collector = Collector(engine).run()
    assert list(collector.reasons) == [4, 3, 2, 1]
    assert_clean(engine)


def test_composition_needs_classes_outside():
    with pytest.raises(ConfigError, match=r"scheduler.policy: 'fcfs' orders single requests"):
        make_fake_engine(policy=["fcfs", "priority"])


def test_composition_forgets_idle_classes():
    policy = make_fake_engine(policy=["fair", "fcfs"]).scheduler.policy
    for handle in range(2000):
        policy.add(WaitingRequest(handle, float(handle), 5, user=f"user {handle}"))
        if handle % 8 == 7:
            assert len(drain(policy)) == 8
    assert len(policy._inner) <= 512


@every_policy
def test_a_decode_waits_at_most_one_chunk(policy):
    """With a steady stream of long prompts every step that runs gives each decode its token, and
    computes at most max_num_batched_tokens."""
    engine = make_fake_engine(policy=policy, budget=16, max_num_seqs=6, num_blocks=400)
    collector = Collector(engine)
    first = request(1, [1] * 3, 60, ignore_eos=True, priority=0, user="a")
    engine.add(first)
    collector.step()
    for step in range(59):
        engine.add(request(step + 2, [step % 90] * 60, 20, priority=step % 3, user="b"))
        collector.step()
        assert len(collector.tokens[1]) == step + 2, "a step passed without a token"
    assert collector.reasons == {**collector.reasons, 1: "length"}
    assert max(tokens for _, tokens in engine.executor.worker.steps) <= 16


@every_policy
def test_waiting_requests_cost_a_step_nothing(policy):
    """The calls of the policy in steps that only decode do not depend on how many wait."""
    calls = {}
    for waiting in (1, 2000):
        engine = make_fake_engine(policy=policy, max_num_seqs=4, max_model_len=90, num_blocks=900)
        for handle in range(1, 5):
            engine.add(request(handle, [handle] * 3, 60, ignore_eos=True))
        for handle in range(5, 5 + waiting):
            engine.add(request(handle, [7] * 5, 5))
        collector = Collector(engine)
        for _ in range(3):
            collector.step()
        count = Counter()
        watched = engine.scheduler.policy
        for name in ("peek", "pop", "preempts", "admit_cap", "order", "cap", "victim_keys"):
            setattr(watched, name, counting(count, name, getattr(watched, name)))
        for _ in range(20):
            collector.step()
        calls[waiting] = count
    assert calls[1] == calls[2000]
    assert sum(calls[2000].values()) <= 2 * 20


def counting(count, name, call):
    def wrapped(*args):
        count[name] += 1
        return call(*args)

    return wrapped
