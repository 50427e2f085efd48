"""Workloads are seeded and have the shapes that they are asked for; the dispatcher keeps order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo.bench.workloads.arrivals import arrivals
from octavo.bench.workloads.calls import Call, Dispatcher
from octavo.bench.workloads.prompts import read_prompts
from octavo.bench.workloads.spec import WorkloadSpec
from octavo.core.errors import ConfigError

BASE = WorkloadSpec(num_requests=12, input_len=20, output_len=5)


@pytest.mark.parametrize("kind", ["synthetic", "shared-prefix", "multi-turn"])
def test_the_same_seed_gives_the_same_requests(kind: str) -> None:
    spec = replace(BASE, kind=kind, rate=4.0, range_ratio=0.5)
    assert spec.calls(100, 3) == spec.calls(100, 3)
    assert spec.calls(100, 3) != spec.calls(100, 4)
    assert spec.calls(100, 3) != replace(spec, seed=1).calls(100, 3)
    again = spec.calls(100, 3, repeat=1)
    for one, other in zip(spec.calls(100, 3), again, strict=True):
        assert (one.arrival, one.max_tokens, one.after) == (
            other.arrival,
            other.max_tokens,
            other.after,
        )
        assert len(one.token_ids or ()) == len(other.token_ids or ())
        assert one.token_ids != other.token_ids
        assert all(0 <= t < 100 for t in one.token_ids or ())


def test_lengths_vary_by_the_ratio() -> None:
    calls = replace(BASE, num_requests=400, range_ratio=0.5).calls(100)
    lengths = [len(c.token_ids or ()) for c in calls]
    assert (min(lengths), max(lengths)) == (10, 30)
    assert {len(c.token_ids or ()) for c in BASE.calls(100)} == {20}


def test_shared_prefixes_are_shared() -> None:
    calls = replace(BASE, kind="shared-prefix", prefix_len=30, num_prefixes=2).calls(100)
    assert len({(c.token_ids or ())[:30] for c in calls}) == 2
    assert {len(c.token_ids or ()) for c in calls} == {50}
    assert len({c.token_ids for c in calls}) == 12


def test_a_turn_holds_the_turns_before_it() -> None:
    calls = replace(BASE, kind="multi-turn", turns=3).calls(100)
    assert len(calls) == 12
    for index, call in enumerate(calls[4:], start=4):
        assert call.after == index - 4
        before = calls[index - 4].token_ids or ()
        assert (call.token_ids or ())[: len(before)] == before
        assert len(call.token_ids or ()) == len(before) + 5 + 20


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    draw = np.random.RandomState(0)
    gaps = {}
    for burstiness in (0.25, 1.0, 4.0):
        times = arrivals(20_000, 5.0, draw, burstiness=burstiness)
        found = np.diff(times)
        assert found.mean() == pytest.approx(0.2, rel=0.05)
        gaps[burstiness] = found.std() / found.mean()
    # The coefficient of variation of a gamma distribution is shape ** -0.5.
    assert gaps == pytest.approx({0.25: 2.0, 1.0: 1.0, 4.0: 0.5}, rel=0.06)
    assert np.diff(arrivals(5, 2.0, draw, burstiness=np.inf)) == pytest.approx([0.5] * 4)
    assert arrivals(3, np.inf, draw).tolist() == [0, 0, 0]


def test_a_ramp_ends_at_its_rate() -> None:
    draw = np.random.RandomState(1)
    for exponential in (False, True):
        times = arrivals(20_001, 1.0, draw, burstiness=np.inf, ramp_to=9.0, exponential=exponential)
        gaps = np.diff(times)
        assert (gaps[0], gaps[-1]) == pytest.approx((1.0, 1 / 9), rel=1e-3)
        assert gaps[10_000] == pytest.approx(1 / 3 if exponential else 1 / 5, rel=1e-2)


def test_the_dispatcher_waits_for_time_turn_and_room() -> None:
    calls = [
        Call(1, (1,)),
        Call(1, (1,), arrival=1.0),
        Call(1, (1,), after=0, delay=0.5),
        Call(1, (1,), after=0, arrival=9.0),
    ]
    free = Dispatcher(calls)
    assert (free.due(0.0), free.next_time()) == ([0], 1.0)
    free.ended(0, 2.0)
    assert free.due(2.2) == [1]
    assert free.next_time() == 2.5
    assert free.due(3.0) == [2]
    assert free.due_at[2] == 2.5
    for index in (1, 2):
        free.ended(index, 3.0)
    assert (free.due(9.0), free.done) == ([3], False)
    free.ended(3, 9.5)
    assert free.done
    narrow = Dispatcher(calls, max_concurrency=1)
    assert narrow.due(5.0) == [0]
    assert (narrow.due(5.0), narrow.next_time()) == ([], None)
    narrow.ended(0, 6.0)
    assert narrow.due(6.0) == [1]
    assert narrow.due_at[1] == 6.0


def test_prompt_files(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    rows = [
        {"prompt": "hello", "output_tokens": 3},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [{"from": "human", "value": "no answer"}]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = read_prompts(file, 7)
    assert [(r.text, r.output_len) for r in found] == [("hello", 3), (None, 7), ("q", 7)]
    array = tmp_path / "p.json"
    array.write_text(json.dumps(rows))
    assert read_prompts(array, 7) == found
    calls = WorkloadSpec(kind="prompts", file=str(file), num_requests=5).calls(100, 1)
    assert [c.text for c in calls] == ["q", "hello", None, "q", "hello"]
    for bad, message in (
        ("{", "not valid JSON"),
        ('{"x": 1}', "expected prompt"),
        ("3", "an object"),
    ):
        file.write_text(bad)
        with pytest.raises(ConfigError, match=message):
            read_prompts(file, 7)


def test_a_trace_is_cut_into_rounds(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 1000 * i, "input_length": 600, "output_length": 9, "hash_ids": [1, i]}
        for i in range(5)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    spec = WorkloadSpec(kind="trace", file=str(file), num_requests=2, speedup=2.0, max_output=4)
    first, second = spec.calls(100), spec.calls(100, 1)
    assert [c.arrival for c in first] == [c.arrival for c in second] == [0.0, 0.5]
    assert {c.max_tokens for c in first} == {4}
    assert len({(c.token_ids or ())[:512] for c in first + second}) == 1
    assert len({c.token_ids for c in first + second}) == 4
    assert len(spec.calls(100, 2)) == 1
    with pytest.raises(ConfigError, match="ends before round 4"):
        spec.calls(100, 3)


def test_token_ids_as_text_keep_shared_prefixes() -> None:
    one, two = Call(1, (5, 6, 7, 8)), Call(1, (5, 6, 9, 10))
    assert one.as_text.split()[:2] == two.as_text.split()[:2]
    assert one.as_text != two.as_text
