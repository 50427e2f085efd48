"""Timelines of requests, and the trace of steps."""

from __future__ import annotations

import json
import time

import pytest

from octavo.core.contracts.observer import ObserverContext
from octavo.core.errors import ConfigError
from octavo.plugins.observers.step_trace import StepTrace, StepTraceOptions
from octavo.testing.fake_engine import Collector, make_fake_engine, request


def kinds(events):
    return [event["event"] for event in events]


def test_a_timeline_tells_chunks_decodes_and_the_end():
    engine = make_fake_engine(budget=8)
    engine.add(request(1, list(range(20, 40)), 5, ignore_eos=True, timeline=True))
    engine.add(request(2, [1, 2], 5))
    Collector(engine).run()
    events = engine.timeline("r1")
    assert kinds(events) == ["queued", "admitted", "chunk", "chunk", "chunk", "decode", "finished"]
    assert [(e["tokens"], e["computed"]) for e in events if e["event"] == "chunk"] == [
        (8, 8),
        (8, 16),
        (4, 20),
    ]
    assert events[0]["prompt_tokens"] == 20
    decode = events[-2]
    assert decode["steps"] == 4
    assert (events[-1]["reason"], events[-1]["output_tokens"]) == ("length", 5)
    times = [event["at"] for event in events]
    assert times == sorted(times)
    assert json.loads(json.dumps(events)) == events
    assert engine.timeline("r2") is None, "it did not ask"
    assert not engine._timelines.active


def test_a_timeline_tells_what_a_request_waited_for():
    engine = make_fake_engine(max_num_seqs=1, timelines=10)
    for handle in (1, 2, 3):
        engine.add(request(handle, [handle] * 4, 3, ignore_eos=True))
    Collector(engine).run()
    second = engine.timeline("r2")
    assert kinds(second)[:3] == ["queued", "blocked", "admitted"]
    assert second[1]["on"] == "slot"
    assert second[1]["steps"] == 3

    engine = make_fake_engine(budget=8, timelines=10)
    engine.add(request(1, list(range(30, 54)), 2, ignore_eos=True))
    engine.add(request(2, [1, 2], 2, ignore_eos=True))
    Collector(engine).run()
    assert [e["on"] for e in engine.timeline("r2") if e["event"] == "blocked"] == ["tokens"]

    engine = make_fake_engine(num_blocks=11, timelines=10, prefix_caching=False)
    engine.add(request(1, list(range(30, 60)), 3, ignore_eos=True))
    engine.add(request(2, list(range(30)), 2, ignore_eos=True))
    engine.add(request(3, [1], 2, ignore_eos=True))
    Collector(engine).run()
    assert "blocks" in [e.get("on") for e in engine.timeline("r2")]
    behind = [e for e in engine.timeline("r3") if e.get("on") == "queue"]
    assert behind
    assert behind[0]["behind"] == "r2"


def test_a_timeline_tells_who_took_the_blocks():
    engine = make_fake_engine(num_blocks=16, max_num_seqs=6, timelines=10)
    for handle in range(1, 7):
        engine.add(request(handle, [handle, 1, 2], 30, ignore_eos=True))
    Collector(engine).run()
    events = [e for h in range(1, 7) for e in engine.timeline(f"r{h}")]
    preempted = [e for e in events if e["event"] == "preempted"]
    assert len(preempted) == engine.scheduler.num_preemptions
    assert {e["why"] for e in preempted} == {"blocks"}
    assert all(e["by"].startswith("r") for e in preempted)


def test_a_timeline_tells_who_took_the_slot():
    policy = {"name": "priority", "ageing_s": 1e6}
    engine = make_fake_engine(policy=policy, max_num_seqs=1, timelines=10)
    collector = Collector(engine)
    engine.add(request(1, [1, 2], 9, priority=5, ignore_eos=True))
    collector.step()
    engine.add(request(2, [3, 4], 2, priority=0, ignore_eos=True))
    collector.run()
    (event,) = [e for e in engine.timeline("r1") if e["event"] == "preempted"]
    assert (event["why"], event["by"]) == ("slot", "r2")
    assert kinds(engine.timeline("r1")).count("admitted") == 2


def test_choices_share_a_timeline_and_old_ones_are_forgotten():
    engine = make_fake_engine(timelines=1000)
    first = request(1, list(range(20)), 3, ignore_eos=True)
    second = request(2, list(range(20)), 3, parent=1, index=1, ignore_eos=True)
    second.request_id = first.request_id
    engine.add(first)
    engine.add(second)
    Collector(engine).run()
    events = engine.timeline("r1")
    assert {e["index"] for e in events} == {0, 1}
    assert kinds(events).count("finished") == 2
    for handle in range(10, 1020):
        engine.add(request(handle, [1], 1))
        engine.step()
    assert engine.timeline("r1") is None
    assert engine.timeline("r1019") is not None


def test_a_servers_answer_is_found_by_its_id():
    engine = make_fake_engine(timelines=5)
    req = request(1, [1, 2], 2)
    req.request_id = "cmpl-7-0"
    engine.add(req)
    engine.abort([1])
    engine.step()
    assert kinds(engine.timeline("cmpl-7")) == ["queued", "finished"]
    assert engine.timeline("cmpl") is None


def test_nothing_is_recorded_unless_asked(monkeypatch):
    engine = make_fake_engine()
    monkeypatch.setattr(engine._timelines, "planned", None)
    engine.add(request(1, [1, 2], 5))
    Collector(engine).run()


def test_the_step_trace_is_a_chrome_trace(tmp_path):
    path = tmp_path / "trace.json"
    observer = StepTrace(StepTraceOptions(path=str(path)), ObserverContext({"source": "tiny"}))
    engine = make_fake_engine(observers=[("step_trace", observer)])
    before = time.perf_counter()
    for handle in range(1, 4):
        engine.add(request(handle, [handle] * 20, 6, ignore_eos=True))
    Collector(engine).run()
    spent = (time.perf_counter() - before) * 1e6
    engine.close()
    engine.close()
    events = json.loads(path.read_text())
    for event in events:
        assert event["ph"] in ("X", "C", "M")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert 0 <= event["ts"] <= spent
        if event["ph"] == "X":
            assert 0 <= event["dur"] <= spent
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    steps = [e for e in events if e["ph"] == "X" and e["name"].startswith("step ")]
    assert len(steps) == engine.metrics()["num_steps"]
    assert sum(e["args"]["tokens"] for e in steps) == 3 * 20 + 3 * 5
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names == {"steps", "schedule", "prepare", "forward", "sample", "commit"}
    for phase in ("schedule", "forward", "commit"):
        assert sum(e["name"] == phase for e in events if e["ph"] == "X") == len(steps)


def test_a_trace_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        StepTrace(StepTraceOptions(path=str(tmp_path / "no" / "x.json")), ObserverContext({}))
