"""Greedy outputs: rounding is told from error by measured noise; conditions of `--fail-if`."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Any

import numpy as np
import pytest

from octavo.bench.compare.conditions import condition, failures
from octavo.bench.compare.outputs import compare_greedy, compare_samples
from octavo.bench.compare.rounds import turns
from octavo.bench.compare.statistics import shown_distance, two_samples_differ
from octavo.bench.compare.table import check_lines


def output(tokens: list[int], gaps: list[float], noise: float = 0.0) -> dict[str, Any]:
    """Two alternatives a position, the chosen token ahead of token + 1000 by the gap."""
    top = [
        [(t, -0.1 + noise), (t + 1000, -0.1 + noise - gap)]
        for t, gap in zip(tokens, gaps, strict=True)
    ]
    return {"tokens": tokens, "top": top}


def test_equal_outputs_are_identical() -> None:
    one = output([1, 2, 3], [1.0, 1.0, 1.0])
    found = compare_greedy([one, one], [one, one])
    assert (found["verdict"], found["num_identical"], found["noise"]) == ("identical", 2, 0.0)


def test_a_near_tie_is_rounding_and_a_clear_preference_is_an_error() -> None:
    first = output([1, 2, 3], [1.0, 1.0, 0.0005])
    near = output([1, 2, 3], [1.0, 1.0, 1.0], noise=2e-4)
    near["tokens"][2] = 1003
    near["top"][2] = [(1003, -0.1), (3, -0.1003)]
    found = compare_greedy([first], [near])
    (prompt,) = found["prompts"]
    assert (found["verdict"], prompt["at"], prompt["verdict"]) == ("rounding", 2, "rounding")
    assert (prompt["first_token"], prompt["other_token"]) == (3, 1003)
    assert prompt["gap"] == pytest.approx(0.0008)
    assert found["noise"] == pytest.approx(2e-4)
    far = {**near, "top": [*near["top"][:2], [(1003, -0.1), (3, -1.4)]]}
    found = compare_greedy([first], [far])
    assert found["verdict"] == "error"
    assert found["prompts"][0]["other_margin"] == pytest.approx(1.3)
    # The coarser the dtype, the larger are differences that rounding makes.
    mild = {**near, "top": [*near["top"][:2], [(1003, -0.1), (3, -0.3)]]}
    assert compare_greedy([first], [mild], "float32")["verdict"] == "error"
    assert compare_greedy([first], [mild], "bfloat16")["verdict"] == "rounding"


def test_sides_that_compute_different_things_are_not_excused_by_their_noise() -> None:
    first = output([1, 2, 3], [1.0, 1.0, 0.2])
    other = output([1, 2, 1003], [1.0, 1.0, 1.0], noise=0.9)
    other["top"][2] = [(1003, -0.1), (3, -0.4)]
    assert compare_greedy([first], [other])["verdict"] == "error"


def test_what_cannot_be_compared_is_unknown() -> None:
    ids, texts = output([1, 2], [1.0, 1.0]), {"tokens": ["a", "b"], "top": []}
    assert compare_greedy([ids], [texts])["verdict"] == "unknown"
    bare = {"tokens": [1, 5], "top": []}
    assert compare_greedy([ids], [bare])["prompts"][0]["verdict"] == "unknown"
    short = output([1], [1.0])
    assert compare_greedy([ids], [short])["prompts"][0]["why"].startswith("one output ends")


def test_sampled_outputs() -> None:
    one, other = {"5": 70, "6": 58}, {"5": 64, "6": 64}
    assert compare_samples([one], [other])["verdict"] == "same"
    found = compare_samples([one], [{"5": 10, "7": 118}])
    assert (found["verdict"], found["draws"]) == ("different", 128)
    assert found["distance"] > 0.4


def test_samples_that_are_too_small_say_so() -> None:
    """Four draws that have nothing in common could be chance."""
    few = compare_samples([{"5": 4}, {"5": 4}], [{"6": 4}, {"7": 4}])
    assert (few["verdict"], few["shown_distance"], few["p"]) == ("too few", None, 1.0)
    result = {"sides": [{"name": "a"}, {"name": "b"}]}
    lines = check_lines(result | {"checks": [{"side": 1, "greedy": None, "sampled": few}]})
    assert "4 draws a prompt" in lines[0]
    assert lines[0].endswith("too few draws to show any difference (--check-samples)")
    enough = compare_samples([{"5": 70, "6": 58}], [{"5": 64, "6": 64}])
    lines = check_lines(result | {"checks": [{"side": 1, "greedy": None, "sampled": enough}]})
    assert lines[0].endswith(
        f"no difference; one of {enough['shown_distance']:.2f} or more would have been shown"
    )
    assert compare_samples([{"5": 60}], [{"6": 60}])["verdict"] == "different"


@pytest.mark.parametrize(("draws", "kinds", "prompts"), [(40, 2, 2), (128, 2, 1), (64, 6, 2)])
def test_the_distance_that_is_shown(draws: int, kinds: int, prompts: int) -> None:
    """Two distributions that far apart are told apart about four times of five, ones much nearer
    are mostly not."""
    random = np.random.RandomState(3)
    shares = np.full(kinds, 1 / kinds)

    def draw(distance: float) -> Any:
        shift = np.where(np.arange(kinds) % 2, 1, -1) * 2 * distance / kinds
        return [random.multinomial(draws, shares + shift / 2) for _ in range(prompts)]

    def found(distance: float) -> list[bool]:
        pairs = [(np.array(draw(distance)), np.array(draw(-distance))) for _ in range(60)]
        return [two_samples_differ(a, b, draws=300) < 0.01 for a, b in pairs]

    shown = shown_distance(np.array(draw(0)), np.array(draw(0)))
    assert shown is not None
    assert 0.6 < np.mean(found(shown)) < 0.97
    assert np.mean(found(shown / 3)) < 0.3


def test_sides_take_turns() -> None:
    assert list(turns(2, 3)) == [(0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (2, 1)]
    assert list(turns(3, 2)) == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0)]


def test_conditions() -> None:
    row = {"side": 1, "metric": "ttft_p99", "estimate": 1.2, "low": 1.01, "high": 1.4}
    greedy = {"prompts": [{"verdict": "rounding"}, {"verdict": "error"}]}
    result = {
        "sides": [{"name": "a"}, {"name": "b"}],
        "metrics": [row],
        "checks": [{"side": 1, "greedy": greedy}],
    }
    held = ("ttft_p99>1.05", "ttft_p99.low > 1", "output_errors>=1", "output_differences>1")
    for text in held:
        assert failures([condition(text)], result)[0].startswith(f"b: {text.replace(' ', '')}")
    for text in ("ttft_p99>1.3", "ttft_p99.low>1.05", "output_errors>1", "goodput<1"):
        assert failures([condition(text)], result) == []
    for text, message in (
        ("ttft_p99", "expected METRIC>NUMBER"),
        ("ttft_p99>x", "expected METRIC>NUMBER"),
        ("ttft_99>1", "did you mean 'ttft_p99'"),
    ):
        with pytest.raises(ArgumentTypeError, match=message):
            condition(text)
