"""Trace formats, their mistakes, and the prompts that are made from block ids."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from octavo.bench.simulate.traces import (
    Prompts,
    TraceError,
    TraceRequest,
    guess_format,
    read_trace,
    shaped,
    synthetic,
)


def test_mooncake_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows = [
        {"timestamp": 500, "input_length": 600, "output_length": 3, "hash_ids": [0, 7]},
        {"timestamp": 2000, "input_length": 0, "output_length": 0, "hash_ids": []},
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert guess_format(file) == "mooncake"
    first, second = read_trace(file, "mooncake")
    assert first == TraceRequest(0.0, 600, 3, (0, 7))
    assert second == TraceRequest(1.5, 1, 1, ())


def test_azure_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,396,109\n"
    )
    assert guess_format(file) == "azure"
    assert list(read_trace(file, "azure")) == [
        TraceRequest(0.0, 374, 44),
        TraceRequest(pytest.approx(4.0), 396, 109),  # type: ignore[arg-type]
    ]


def test_own_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    row = {"arrival": 3.5, "prompt_tokens": 9, "output_tokens": 2}
    more = {"arrival": 4, "user": "ann", "priority": -1, "hash_ids": [5], "block_tokens": 16}
    file.write_text(json.dumps(row) + "\n" + json.dumps(row | more) + "\n")
    assert guess_format(file) == "jsonl"
    assert list(read_trace(file, "jsonl")) == [
        TraceRequest(0.0, 9, 2),
        TraceRequest(0.5, 9, 2, (5,), 16, "ann", -1),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"timestamp": 0}\n', "a.jsonl:1: 'input_length' is missing"),
        ("[]\n", "a.jsonl:1: expected an object"),
        ("{]\n", "a.jsonl:1: not valid JSON"),
        (
            '{"timestamp": 5, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n'
            '{"timestamp": 4, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n',
            "a.jsonl:2: arrives 0.001 s before the line above it",
        ),
        (
            '{"timestamp": "x", "input_length": 1, "output_length": 1, "hash_ids": [0]}\n',
            "a.jsonl:1: 'timestamp': expected a number of milliseconds, 0 or more, got 'x'",
        ),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [0.5]}\n',
            r"a.jsonl:1: 'hash_ids': expected a list of whole numbers of 64 bits, got \[0.5\]",
        ),
    ],
)
def test_mistakes_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    with pytest.raises(TraceError, match=message):
        list(read_trace(file, "mooncake"))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("arrival", "NaN", "a number of seconds, 0 or more, got nan"),
        ("arrival", "1e999", "a number of seconds, 0 or more, got inf"),
        ("arrival", "-5", "a number of seconds, 0 or more, got -5"),
        ("arrival", "true", "a number of seconds, 0 or more, got True"),
        ("prompt_tokens", "0", "a whole number from 1 to 2147483647, got 0"),
        ("prompt_tokens", '"many"', "a whole number from 1 to 2147483647, got 'many'"),
        ("output_tokens", "2.5", "a whole number from 1 to 2147483647, got 2.5"),
        ("output_tokens", "1e40", "a whole number from 1 to 2147483647, got 1e\\+40"),
        ("block_tokens", "0", "a whole number from 1 to 2147483647, got 0"),
        ("priority", "null", "a whole number from -2147483647 to 2147483647, got None"),
        ("hash_ids", "7", "a list of whole numbers of 64 bits, got 7"),
        ("user", "{}", "a text or a whole number, got {}"),
    ],
)
def test_mistakes_name_the_field(tmp_path: Path, name: str, value: str, expected: str) -> None:
    fields = {"arrival": "0", "prompt_tokens": "9", "output_tokens": "2"} | {name: value}
    good = '{"arrival": 0, "prompt_tokens": 9, "output_tokens": 2.0}'
    file = tmp_path / "a.jsonl"
    row = ", ".join(f'"{key}": {text}' for key, text in fields.items())
    file.write_text(f"{good}\n{{{row}}}\n")
    with pytest.raises(TraceError, match=f"a.jsonl:2: '{name}': expected {expected}"):
        list(read_trace(file, "jsonl"))


def test_mistakes_of_a_table_name_the_field(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    for row, message in (
        ("yesterday,3,4", "'TIMESTAMP': expected a date and time .* got 'yesterday'"),
        ("2023-11-16 18:15:46,-3,4", "'ContextTokens': expected a whole number .* got '-3'"),
        ("2023-11-16 18:15:46,3", "'GeneratedTokens': expected a whole number .* got None"),
    ):
        file.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{row}\n")
        with pytest.raises(TraceError, match=f"a.csv:2: {message}"):
            list(read_trace(file, "azure"))


def test_an_absent_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read the trace .*nowhere"):
        list(read_trace(tmp_path / "nowhere", "azure"))


def test_the_traces_here_are_read(mooncake: Path, azure: Path) -> None:
    requests = list(read_trace(mooncake, guess_format(mooncake)))
    assert len(requests) == 12031
    assert sum(r.num_prompt for r in requests) == 144_793_823
    others = list(read_trace(azure, guess_format(azure)))
    assert len(others) == 19366
    assert others[0].num_prompt == 374


def test_speed_limit_users_and_output() -> None:
    given = [
        TraceRequest(float(i), 10, 10 * (i + 1), user="x" if i == 1 else None) for i in range(9)
    ]
    found = list(shaped(given, speedup=2.0, limit=4, users=3, max_output=25))
    assert [r.arrival for r in found] == [0.0, 0.5, 1.0, 1.5]
    assert [r.user for r in found] == ["user-0", "x", "user-2", "user-0"]
    assert [r.num_output for r in found] == [10, 20, 25, 25]


def test_synthetic_requests_are_a_poisson_stream_of_the_given_means() -> None:
    requests = list(synthetic(20_000, rate=5.0, input_len=100, output_len=20, seed=3))
    assert len(requests) == 20_000
    assert requests[-1].arrival == pytest.approx(4000, rel=0.03)
    assert np.mean([r.num_prompt for r in requests]) == pytest.approx(100, rel=0.03)
    assert np.mean([r.num_output for r in requests]) == pytest.approx(20, rel=0.03)
    assert max(r.num_prompt for r in requests) <= 800
    assert list(synthetic(700, 5.0, 100, 20, seed=3)) == requests[:700]


def test_synthetic_requests_are_made_on_the_way() -> None:
    assert len(list(islice(synthetic(10**12, 1.0, 5, 5), 3000))) == 3000


def tokens(request: TraceRequest, number: int) -> list[int]:
    return Prompts(32000).tokens(request, number).tolist()


def test_equal_ids_mean_equal_content_and_others_differ() -> None:
    one = tokens(TraceRequest(0, 1200, 1, (4, 5, 6)), 0)
    two = tokens(TraceRequest(0, 1030, 1, (4, 9, 6)), 1)
    assert len(one) == 1200
    assert len(two) == 1030
    assert one[:512] == two[:512]
    assert one[1024:1030] == two[1024:1030]
    assert np.mean(np.asarray(one[512:1024]) == np.asarray(two[512:1024])) < 0.01
    assert min(one + two) >= 16000
    assert max(one + two) < 32000


def test_what_ids_do_not_cover_is_like_nothing_else() -> None:
    request = TraceRequest(0, 1024, 1, (4,))
    one, two = tokens(request, 0), tokens(request, 1)
    assert one[:512] == two[:512]
    assert one[512:528] != two[512:528]
    assert tokens(TraceRequest(0, 64, 1), 0)[:16] != tokens(TraceRequest(0, 64, 1), 1)[:16]
    assert one == tokens(request, 0)


def test_a_hundred_thousand_ids_have_distinct_blocks() -> None:
    made = Prompts(128256).tokens(TraceRequest(0, 100_000 * 8, 1, tuple(range(100_000)), 8), 0)
    assert len({row.tobytes() for row in made.reshape(-1, 8)}) == 100_000
