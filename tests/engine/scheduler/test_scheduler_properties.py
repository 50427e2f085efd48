"""The whole step loop on a fake worker that reads its tokens back through the block tables."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import RequestTooLong
from octavo.testing.fake_engine import Collector, assert_clean, expected, request
from octavo.testing.fake_engine import make_fake_engine as make_engine

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=40)
engines = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([14, 20, 40, 300]),
        "block_size": st.sampled_from([4, 8]),
        "max_num_seqs": st.integers(1, 6),
        "budget": st.sampled_from([6, 9, 16, 64]),
        "prefix_caching": st.booleans(),
        "in_flight": st.integers(1, 3),
        "max_chunk": st.sampled_from([None, 1, 5]),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    options=engines,
    work=st.lists(st.tuples(prompts, st.integers(1, 30), st.integers(1, 3)), max_size=8),
    pauses=st.lists(st.integers(0, 6), min_size=8, max_size=8),
)
def test_outputs_do_not_depend_on_the_pool(options, work, pauses):
    engine = make_engine(**options)
    most = (options["num_blocks"] - 1) * options["block_size"]
    collector = Collector(engine)
    handles = itertools.count(1)
    wanted = {}
    for (prompt, max_tokens, n), pause in zip(work, pauses, strict=False):
        parent = None
        for index in range(n):
            req = request(next(handles), prompt, max_tokens, parent=parent, index=index)
            parent = parent or req.handle
            engine.add(req)
            wanted[req.handle] = expected(req, min(96, most))
        for _ in range(pause):
            collector.step()
    collector.run()
    assert collector.tokens == wanted
    assert all(reason in ("stop", "length") for reason in collector.reasons.values())
    assert_clean(engine)


@settings(max_examples=150, deadline=None)
@given(
    options=engines,
    work=st.lists(st.tuples(prompts, st.integers(1, 30), st.integers(0, 12)), max_size=8),
    aborts=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)), max_size=6),
)
def test_aborts_leave_nothing_behind(options, work, aborts):
    engine = make_engine(**options)
    most = (options["num_blocks"] - 1) * options["block_size"]
    collector = Collector(engine)
    due = sorted(aborts)
    step = 0
    todo = [
        (at, request(h, prompt, max_tokens)) for h, (prompt, max_tokens, at) in enumerate(work, 1)
    ]
    aborted = set()
    while todo or due or engine.has_work():
        for at, req in [item for item in todo if item[0] <= step]:
            engine.add(req)
            todo.remove((at, req))
        while due and due[0][0] <= step:
            handle = due.pop(0)[1]
            engine.abort([handle])
            aborted.add(handle)
        collector.step()
        step += 1
        assert step < 5000
    for handle, (prompt, max_tokens, _) in enumerate(work, 1):
        wanted = expected(request(handle, prompt, max_tokens), min(96, most))
        got = collector.tokens.get(handle, [])
        if collector.reasons[handle] == "abort":
            assert handle in aborted
            assert got == wanted[: len(got)]
        else:
            assert got == wanted
    assert_clean(engine)


def test_small_pool_preempts_and_still_answers():
    engine = make_engine(num_blocks=16, max_num_seqs=6)
    reqs = [request(h, [h, 1, 2], 30, ignore_eos=True) for h in range(1, 7)]
    for req in reqs:
        engine.add(req)
    collector = Collector(engine).run()
    assert engine.scheduler.num_preemptions > 5
    assert collector.tokens == {r.handle: expected(r, 60) for r in reqs}


def test_prompt_at_block_borders_and_second_time_cached():
    for length in (3, 4, 5, 7, 8, 9):
        engine = make_engine()
        prompt = list(range(10, 10 + length))
        collector = Collector(engine)
        engine.add(request(1, prompt))
        collector.run()
        engine.add(request(2, prompt))
        collector.run()
        assert collector.tokens[1] == collector.tokens[2] == expected(request(1, prompt))
        assert engine.scheduler.kv.stats().prefix_hits == (length - 1) // 4 * 4


def test_shared_prefix_submitted_together():
    engine = make_engine(budget=16)
    reqs = [request(h, [5] * 20 + [h], 6, ignore_eos=True) for h in range(1, 9)]
    for req in reqs:
        engine.add(req)
    collector = Collector(engine).run()
    assert collector.tokens == {r.handle: expected(r) for r in reqs}
    assert engine.scheduler.kv.stats().prefix_hits > 0


def test_forks_share_the_prompt():
    engine = make_engine(prefix_caching=False, budget=64)
    prompt = list(range(30))
    parent = None
    for index in range(4):
        req = request(index + 1, prompt, 5, parent=parent, index=index, ignore_eos=True)
        parent = parent or req.handle
        engine.add(req)
    collector = Collector(engine)
    collector.step()
    collector.step()
    # 30 tokens are 8 blocks; each child shares 7 and owns one.
    stats = engine.scheduler.kv.stats()
    assert stats.num_blocks - stats.num_free <= 8 + 3 + 1
    collector.run()
    assert sum(tokens for _, tokens in engine.executor.worker.steps) == 30 + 4 + 3 + 3 * 4
    assert_clean(engine)


def test_what_can_never_fit_is_refused_with_both_numbers():
    engine = make_engine(num_blocks=9, block_size=4, max_model_len=96)
    with pytest.raises(RequestTooLong, match=r"40 tokens.*KV cache holds 32"):
        engine.add(request(1, [1] * 40))
    engine = make_engine(max_model_len=20)
    with pytest.raises(RequestTooLong, match=r"20 tokens.*max_model_len is 20"):
        engine.add(request(1, [1] * 20))
    engine.add(request(2, [1] * 19))
    collector = Collector(engine).run()
    assert len(collector.tokens[2]) == 1
    assert collector.reasons == {2: "length"}


def test_min_tokens_and_stop_token_ids():
    engine = make_engine()
    prompt = [1, 2, 3]
    free = expected(request(1, prompt, 20, ignore_eos=True))
    req = request(1, prompt, 20, ignore_eos=True, stop_token_ids=[free[4]])
    engine.add(req)
    collector = Collector(engine).run()
    first = free.index(free[4])
    assert collector.tokens[1] == free[: first + 1]
    assert collector.reasons == {1: "stop"}
    engine = make_engine()
    engine.add(
        request(2, prompt, 20, ignore_eos=True, stop_token_ids=[free[4]], min_tokens=first + 1)
    )
    collector = Collector(engine).run()
    assert len(collector.tokens[2]) > first + 1


def test_decode_steps_make_no_per_request_calls():
    engine = make_engine(max_num_seqs=64, num_blocks=2000, budget=512)
    for handle in range(1, 65):
        engine.add(request(handle, [handle % 50] * 5, 60, ignore_eos=True))
    collector = Collector(engine)
    for _ in range(4):
        collector.step()
    layouts = set()
    original = engine.executor.submit

    def submit(plan):
        layouts.add((plan.layout, id(plan.slots)))
        return original(plan)

    engine.executor.submit = submit
    for _ in range(20):
        collector.step()
    assert len(layouts) == 1
