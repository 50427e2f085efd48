"""The step loop's seams: host masks, observers, errors of one row, timing."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from octavo.core.contracts.engine_extension import EngineExtension
from octavo.core.contracts.logits_processor import HostLogitsProcessor
from octavo.core.contracts.observer import Observer
from octavo.core.contracts.scheduler_policy import SchedulerPolicy
from octavo.core.errors import RequestError
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.testing.fake_engine import (
    Collector,
    assert_clean,
    expected,
    make_fake_engine,
    request,
)


class Even(HostLogitsProcessor):
    """Allows even tokens only, for requests that ask for it; keeps what it was told."""

    def __init__(self):
        self.accepted: dict[int, list[int]] = {}
        self.handle: dict[int, int] = {}

    def attach(self, req):
        if req.params.extra_args is None:
            return False
        if req.params.extra_args.get("even") == "bad":
            raise RequestError("even must be true, got 'bad'")
        self.handle[req.slot] = req.handle
        self.accepted[req.handle] = req.output.tolist()
        return True

    def accept(self, slots, token_ids):
        for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True):
            self.accepted[self.handle[slot]].append(token)

    def detach(self, slot):
        del self.handle[slot]

    def mask(self, slots, bitmask):
        assert all(slot in self.handle for slot in slots.tolist())
        bitmask &= np.int32(0x55555555)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [14, 400])
def test_host_masks_reach_their_rows_only(in_flight, num_blocks):
    even = Even()
    engine = make_fake_engine(
        host_processors=[even], in_flight=in_flight, num_blocks=num_blocks, max_num_seqs=5
    )
    plain = [request(h, [h, 2], 12, ignore_eos=True) for h in (1, 3)]
    masked = [request(h, [h, 2], 12, ignore_eos=True, extra_args={"even": True}) for h in (2, 4, 5)]
    for req in sorted(plain + masked, key=lambda r: r.handle):
        engine.add(req)
    collector = Collector(engine).run()
    for req in plain:
        assert collector.tokens[req.handle] == expected(req)
    for req in masked:
        tokens = collector.tokens[req.handle]
        assert len(tokens) == 12
        assert all(token % 2 == 0 for token in tokens)
        assert even.accepted[req.handle] == tokens
    if num_blocks == 14:
        assert engine.scheduler.num_preemptions > 0
    assert_clean(engine)


def test_without_chunked_prefill_a_preempted_sequence_may_outgrow_a_step():
    engine = make_fake_engine(chunked_prefill=False, budget=16, num_blocks=16, max_num_seqs=4)
    reqs = [request(h, [h] * 12, 30, ignore_eos=True) for h in range(1, 5)]
    for req in reqs:
        engine.add(req)
    collector = Collector(engine).run()
    assert engine.scheduler.num_preemptions > 0
    assert collector.tokens == {r.handle: expected(r, 60) for r in reqs}
    assert_clean(engine)


def test_a_processor_that_refuses_fails_one_request():
    engine = make_fake_engine(host_processors=[Even()])
    engine.add(request(1, [1, 2], extra_args={"even": "bad"}))
    engine.add(request(2, [1, 2], ignore_eos=True))
    collector = Collector(engine).run()
    assert collector.reasons == {1: "error", 2: "length"}
    assert collector.errors[1] == "even must be true, got 'bad'"
    assert collector.codes[1] is None
    assert collector.tokens == {2: expected(request(2, [1, 2], ignore_eos=True))}
    assert_clean(engine)


class Faulty(Even):
    """Fails in the named method, for slots whose prompt starts with 2."""

    def __init__(self, method):
        super().__init__()
        self.method, self.bad = method, set()

    def _maybe_fail(self, method, slots):
        if method == self.method and not self.bad.isdisjoint(slots):
            raise KeyError(method)

    def attach(self, req):
        self.bad = self.bad - {req.slot} | ({req.slot} if req.prompt[0] == 2 else set())
        self._maybe_fail("attach", [req.slot])
        return super().attach(req)

    def accept(self, slots, token_ids):
        self._maybe_fail("accept", slots.tolist())
        super().accept(slots, token_ids)

    def mask(self, slots, bitmask):
        self._maybe_fail("mask", slots.tolist())
        super().mask(slots, bitmask)

    def detach(self, slot):
        super().detach(slot)
        self._maybe_fail("detach", [slot])


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("method", ["attach", "mask", "accept", "detach"])
def test_a_processor_that_breaks_fails_its_requests_only(method, in_flight, caplog):
    faulty = Faulty(method)
    engine = make_fake_engine(host_processors=[faulty], in_flight=in_flight)
    bad = request(1, [2, 2], 6, ignore_eos=True, extra_args={"even": True})
    good = request(2, [3, 2], 6, ignore_eos=True)
    engine.add(bad)
    engine.add(good)
    with caplog.at_level(logging.ERROR):
        collector = Collector(engine).run()
        engine.add(request(3, [4, 2], 6, ignore_eos=True))
        collector.run()
    assert collector.tokens[2] == expected(good)
    assert collector.reasons[3] == "length"
    if method == "detach":
        assert collector.reasons[1] == "length"
    else:
        assert collector.reasons[1] == "error"
        assert collector.errors[1] == f"logits processor 'Faulty' failed: KeyError: '{method}'"
        assert collector.codes[1] == "internal_error"
    assert sum("Faulty" in r.getMessage() for r in caplog.records) == 1
    assert not faulty.handle
    assert_clean(engine)


@pytest.mark.parametrize("method", ["mask", "accept"])
def test_what_a_processor_returns_is_checked(method):
    wrong = type("Wrong", (Even,), {method: lambda self, slots, values: ["x"]})()
    engine = make_fake_engine(host_processors=[wrong])
    good = request(2, [3, 2], 6, ignore_eos=True)
    engine.add(request(1, [2, 2], 6, ignore_eos=True, extra_args={"even": True}))
    engine.add(good)
    collector = Collector(engine).run()
    assert collector.tokens[2] == expected(good)
    assert collector.codes[1] == "internal_error"
    message = "logits processor 'Wrong' failed: TypeError: it returned ['x'], expected Ending"
    assert collector.errors[1].startswith(message)


def test_no_mask_is_asked_for_a_sequence_that_ended():
    class Strict(Even):
        asked = 0

        def mask(self, slots, bitmask):
            super().mask(slots, bitmask)
            self.asked += len(slots)

    strict = Strict()
    engine = make_fake_engine(host_processors=[strict], in_flight=2)
    free = expected(request(1, [5, 2], 12, ignore_eos=True))
    engine.add(request(2, [5, 2], 12, ignore_eos=True))
    stop = list(range(0, 97, 2))  # the first even token ends it
    engine.add(request(1, [5, 2], 12, stop_token_ids=stop, extra_args={"even": True}))
    collector = Collector(engine).run()
    assert collector.reasons == {1: "stop", 2: "length"}
    assert collector.tokens[2] == free
    assert strict.asked == 1


def test_a_row_that_cannot_be_sampled_is_that_requests_error():
    engine = make_fake_engine()
    worker = engine.executor.worker
    original = worker.sample

    def sample(masks):
        result = original(masks)
        slots = worker._plan.slots[worker._plan.sample_rows].tolist()
        if 1 in slots and worker.rows[1].num_computed > 5:
            result.errors = {slots.index(1): "no token is allowed"}
        return result

    worker.sample = sample
    reqs = [request(h, [h, 2], ignore_eos=True) for h in (1, 2, 3)]
    for req in reqs:
        engine.add(req)
    collector = Collector(engine).run()
    assert collector.reasons == {1: "length", 2: "error", 3: "length"}
    assert collector.errors[2] == "no token is allowed"
    assert collector.tokens[2] == expected(reqs[1])[:4]
    assert collector.tokens[1] == expected(reqs[0])
    assert_clean(engine)


class Recorder(Observer):
    def __init__(self):
        self.steps, self.requests, self.closed = [], [], False

    def on_step(self, record):
        self.steps.append(record)

    def on_request(self, record):
        self.requests.append(record)

    def close(self):
        self.closed = True


class Broken(Observer):
    def on_step(self, record):
        raise ValueError("broken observer")


def test_observers_see_everything_and_cannot_stop_the_engine(caplog):
    recorder = Recorder()
    engine = make_fake_engine(observers=[("broken", Broken()), ("recorder", recorder)])
    prompt = list(range(20, 40))
    engine.add(request(1, prompt, 5, ignore_eos=True))
    with caplog.at_level(logging.ERROR):
        Collector(engine).run()
    assert [r.num_tokens for r in recorder.steps] == [20, 1, 1, 1, 1]
    assert [r.num_prefill for r in recorder.steps] == [20, 0, 0, 0, 0]
    (record,) = recorder.requests
    assert (record.num_prompt, record.num_output, record.finish_reason) == (20, 5, "length")
    assert record.arrival < record.admitted < record.first_token < record.finished
    assert sum("broken" in r.getMessage() for r in caplog.records) == 1
    assert engine.metrics()["observer_failures"] == {"broken": 5}
    engine.close()
    assert recorder.closed


def test_metrics_name_every_phase():
    engine = make_fake_engine()
    engine.add(request(1, [1, 2, 3], 5, ignore_eos=True))
    Collector(engine).run()
    metrics = engine.metrics()
    assert metrics["num_steps"] == 5
    assert list(metrics["phases"]) == ["schedule", "prepare", "forward", "sample", "commit"]
    assert sum(p["share"] for p in metrics["phases"].values()) == pytest.approx(1)


def test_abort_of_a_waiting_request_needs_no_step():
    engine = make_fake_engine(max_num_seqs=1)
    engine.add(request(1, [1], 50, ignore_eos=True))
    engine.add(request(2, [1], 50))
    collector = Collector(engine)
    collector.step()
    engine.abort([2])
    engine.abort([2, 99])
    collector.step()
    assert collector.reasons == {2: "abort"}
    engine.abort([1])
    collector.run()
    assert collector.reasons == {1: "abort", 2: "abort"}
    assert_clean(engine)


@pytest.mark.parametrize("gone", [1, 2])
def test_abort_of_a_choice_whose_prompt_is_not_computed_yet(gone):
    engine = make_fake_engine(budget=4)
    reqs = [
        request(h, list(range(10)), 3, parent=1 if h > 1 else None, index=h - 1, ignore_eos=True)
        for h in (1, 2, 3)
    ]
    for req in reqs:
        engine.add(req)
    collector = Collector(engine)
    collector.step()
    engine.abort([gone])
    collector.run()
    assert collector.reasons == {h: "abort" if h == gone else "length" for h in (1, 2, 3)}
    assert collector.tokens == {r.handle: expected(r) for r in reqs if r.handle != gone}
    assert_clean(engine)


def test_an_aborted_sequence_publishes_no_block_whose_tokens_are_not_known():
    first, second = expected(request(2, [1, 2], 2, ignore_eos=True))
    stale = second + 1
    engine = make_fake_engine(in_flight=3, max_num_seqs=1)
    # It leaves a token where the next one's second token would be kept.
    engine.add(request(1, [9, 9, 9, stale], 1))
    collector = Collector(engine).run()
    engine.add(request(2, [1, 2], 20, ignore_eos=True))
    collector.step()
    # In flight: one step that samples the second token, one that fills a block with it.
    assert [len(record.handles) for record in engine.scheduler.in_flight] == [1, 1]
    engine.abort([2])
    collector.run()
    req = request(3, [1, 2, first, stale, 5], 4, ignore_eos=True)
    engine.add(req)
    collector.run()
    assert collector.tokens[3] == expected(req)
    assert_clean(engine)


class Backwards(SchedulerPolicy):
    """Last come, first served; chunks of two tokens; sees read-only columns."""

    def __init__(self):
        self.queue, self.views = [], []

    def add(self, request):
        self.queue.append(request)

    def remove(self, handle):
        before = len(self.queue)
        self.queue = [r for r in self.queue if r.handle != handle]
        return len(self.queue) < before

    def peek(self):
        return self.queue[-1] if self.queue else None

    def pop(self):
        return self.queue.pop()

    def __len__(self):
        return len(self.queue)

    def order(self, view):
        return np.argsort(-view.handles)

    def cap(self, view, want):
        with pytest.raises(ValueError, match="read-only"):
            view.num_tokens[0] = 3
        return np.full(len(want), 2)

    def admit_cap(self, request, want):
        return min(want, 2)

    def on_step(self, view, scheduled):
        self.views.append(dict(zip(view.handles.tolist(), scheduled.tolist(), strict=True)))


def test_a_policy_orders_and_shapes_without_touching_mechanics():
    policy = Backwards()
    engine = make_fake_engine(policy=policy, budget=4)
    reqs = [request(h, [h] * 7, 3, ignore_eos=True) for h in (1, 2, 3)]
    for req in reqs:
        engine.add(req)
    collector = Collector(engine).run()
    assert collector.tokens == {r.handle: expected(r) for r in reqs}
    assert policy.views[0] == {3: 2, 2: 2}
    assert all(sum(step.values()) <= 4 for step in policy.views)
    assert all(count <= 2 for step in policy.views for count in step.values())
    assert list(collector.reasons) == [3, 2, 1]


class Stingy(Backwards):
    """Would give no token to anybody."""

    def cap(self, view, want):
        return np.zeros(len(want), np.int64)

    def admit_cap(self, request, want):
        return 0


def test_a_policy_that_gives_nothing_does_not_stop_the_engine():
    engine = make_fake_engine(policy=Stingy(), budget=8)
    reqs = [request(h, [h] * 5, 3, ignore_eos=True) for h in (1, 2)]
    for req in reqs:
        engine.add(req)
    collector = Collector(engine).run(200)
    assert collector.tokens == {r.handle: expected(r) for r in reqs}
    assert_clean(engine)


def test_structured_output_without_its_extension_is_refused():
    engine = make_fake_engine(extensions=[])
    with pytest.raises(RequestError, match="structured output is not available"):
        engine.add(request(1, [1, 2], 3, structured_outputs=StructuredOutputsParams(regex="a")))


def test_the_executor_is_closed_where_an_extension_fails(monkeypatch):
    class Broken(EngineExtension):
        def close(self):
            raise RuntimeError("of all things")

    engine, closed = make_fake_engine(extensions=[Broken()]), []
    monkeypatch.setattr(engine.executor, "close", lambda: closed.append(True))
    with pytest.raises(RuntimeError, match="of all things"):
        engine.close()
    assert closed
