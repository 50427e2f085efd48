"""`SamplingParams` refuses what it cannot use, by name, and takes NumPy's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo import SamplingParams
from octavo.core.errors import RequestError


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 10**9}, r"n must be an integer in \[1, 16384\], got 1000000000"),
        ({"n": "2"}, "n must be an integer"),
        ({"stop": 5}, "stop must be a list of strings, got int"),
        ({"stop": [5]}, "stop must be non-empty strings, got 5"),
        ({"stop": {"a": 1}}, "stop must be a list of strings, got dict"),
        ({"bad_words": "Paris"}, "bad_words must be a list of strings, got str"),
        ({"bad_words": 5}, "bad_words must be a list of strings, got int"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, got int"),
        ({"allowed_token_ids": "7"}, "allowed_token_ids must be a list of token ids, got str"),
        ({"allowed_token_ids": [None]}, "allowed_token_ids must be an integer of at least 0"),
        ({"logit_bias": [1]}, "logit_bias must be a mapping of token ids to numbers, got list"),
        ({"logit_bias": {5: "a"}}, "logit_bias must be a number"),
        ({"top_k": -2}, r"top_k must be an integer of at least -1 \(0 and -1 mean off\), got -2"),
        ({"temperature": np.float32("nan")}, "temperature must be a number"),
        ({"seed": True}, "seed must be an integer, got True"),
        ({"ignore_eos": "no"}, "ignore_eos must be true or false, got 'no'"),
        ({"extra_args": [1]}, "extra_args must be a mapping, got list"),
        ({"bad_words_token_ids": [["a"]]}, "bad_words_token_ids must be an integer"),
    ],
)
def test_what_cannot_be_used_is_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**params)
    assert caught.value.param == next(iter(params))


def test_numpy_numbers_become_plain_ones() -> None:
    given = SamplingParams(
        n=np.int32(2),
        temperature=np.float32(0.5),
        max_tokens=np.int64(3),
        seed=np.uint64(2**64 - 1),
        top_k=np.int8(-1),
        stop_token_ids=np.array([4, 5]),
        logit_bias={np.int64(7): np.float64(1.5)},
    )
    plain = SamplingParams(
        n=2,
        temperature=0.5,
        max_tokens=3,
        seed=2**64 - 1,
        stop_token_ids=[4, 5],
        logit_bias={7: 1.5},
    )
    assert given == plain
    for name in ("n", "temperature", "max_tokens", "seed", "top_k"):
        assert type(getattr(given, name)) is type(getattr(plain, name)), name
    assert [type(token) for token in given.stop_token_ids or ()] == [int, int]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "x"),
        ("temperature", float("nan")),
        ("seed", "x"),
        ("n", 0),
        ("top_k", -7),
        ("top_p", 7),
        ("max_tokens", -3),
        ("min_tokens", 99),
        ("detokenize", "x"),
        ("structured_outputs", 5),
    ],
)
def test_what_was_assigned_is_checked_with_the_rest(name: str, value: Any) -> None:
    params = SamplingParams(max_tokens=3)
    setattr(params, name, value)
    with pytest.raises(RequestError, match=name) as caught:
        params.checked()
    assert caught.value.param == name


def test_a_checked_copy_is_as_if_new() -> None:
    params = SamplingParams(stop_token_ids=[1])
    params.stop, params.top_k, params.seed = "end", -1, -1
    copied = params.checked()
    params.stop_token_ids.append(2)  # type: ignore[union-attr]
    assert copied == SamplingParams(stop="end", top_k=-1, seed=-1, stop_token_ids=[1])
