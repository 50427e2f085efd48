"""Greedy outputs: rounding is told from error by measured noise; conditions of `--fail-if`."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Any

import numpy as np
import pytest

from octavo.bench.compare.conditions import condition, failures
from octavo.bench.compare.outputs import compare_greedy, compare_samples, unexplained
from octavo.bench.compare.rounds import turns
from octavo.bench.compare.statistics import shown_distance, two_samples_differ
from octavo.bench.compare.table import check_lines, prompt_text


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


def masked(top: list[tuple[int, float]], chosen: int) -> dict[str, Any]:
    return {"tokens": [1, chosen], "top": [[(1, -0.1), (9, -3.0)], top]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mask_is_no_rounding(dtype: str) -> None:
    """Equal log probabilities, and one side takes what they hold for less probable: nothing that
    rounds did that, however small the margin."""
    top = [(253, -1.0), (41322, -1.036), (5, -1.4)]
    (prompt,) = compare_greedy([masked(top, 253)], [masked(top, 41322)], dtype)["prompts"]
    assert (prompt["verdict"], prompt["first_margin"]) == ("error", pytest.approx(0.036))
    assert "margins 0.036 and -0.036: MORE THAN ROUNDING (a side chose" in prompt_text(prompt)
    found = compare_greedy([masked(top, 253)], [masked(top, 770)], dtype)
    assert "not among its own most probable" in prompt_text(found["prompts"][0])
    assert found["verdict"] == "error"
    tie = [(253, -1.0), (41322, -1.0), (5, -1.4)]
    assert compare_greedy([masked(tie, 253)], [masked(tie, 41322)])["verdict"] == "rounding"


def test_sides_that_agree_exactly_do_not_round() -> None:
    """A bias for one token, smaller than what rounding might do, where all others are equal."""
    one = [(253, -1.0), (41322, -1.0005), (5, -1.4)]
    two = [(41322, -0.9995), (253, -1.0), (5, -1.4)]
    found = compare_greedy([masked(one, 253)], [masked(two, 41322)])
    assert (found["noise"], found["prompts"][0]["verdict"]) == (0, "error")
    moved = [(name, value + 1e-4) for name, value in two]
    assert compare_greedy([masked(one, 253)], [masked(moved, 41322)])["verdict"] == "rounding"


def test_a_token_that_the_other_side_does_not_rank_is_not_explained() -> None:
    one = [(253, -1.0), (5, -1.0001)]
    two = [(41322, -1.0), (5, -1.0002)]
    found = compare_greedy([masked(one, 253)], [masked(two, 41322)])
    assert found["verdict"] == "unknown"
    assert unexplained(found) == 1
    assert "NOT EXPLAINED (a side's token is not among" in prompt_text(found["prompts"][0])
    far = [(41322, -1.0), (5, -1.9)]
    assert compare_greedy([masked(one, 253)], [masked(far, 41322)])["verdict"] == "error"


def test_what_cannot_be_compared_is_unknown() -> None:
    ids, texts = output([1, 2], [1.0, 1.0]), {"tokens": ["a", "b"], "top": []}
    found = compare_greedy([ids], [texts])
    assert (found["verdict"], unexplained(found)) == ("unknown", 1)
    assert prompt_text(found["prompts"][0]).startswith("NOT EXPLAINED")
    bare = {"tokens": [1, 5], "top": []}
    found = compare_greedy([ids], [bare])
    assert (found["prompts"][0]["verdict"], unexplained(found)) == ("unknown", 1)
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
    assert lines[0].endswith("so few draws need not show any difference (--check-samples)")
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


def test_power_is_not_claimed_where_nearly_every_draw_is_another_token() -> None:
    """Half of a flat vocabulary forbidden is a distance of 0.5 that so few draws cannot show; nor
    can they show one within a flat half of a distribution."""
    random = np.random.RandomState(1)

    def flat(step: int, share: float = 1.0) -> dict[str, int]:
        spread = random.binomial(128, share)
        names = [*(random.randint(0, 49152 // step, spread) * step), *([7] * (128 - spread))]
        return {str(name): names.count(name) for name in names}

    found = compare_samples([flat(1), flat(1)], [flat(2), flat(2)])
    assert (found["verdict"], found["shown_distance"]) == ("too few", None)
    found = compare_samples([flat(1, 0.5)] * 2, [flat(2, 0.5)] * 2)
    assert found["verdict"] in ("same", "too few")
    assert found["shown_distance"] is None or found["shown_distance"] > 0.5


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
    for text in ("ttft_p99>1.3", "ttft_p99.low>1.05", "output_errors>1"):
        assert failures([condition(text)], result) == []
    # A gate that nobody could look at is not open.
    unchecked = result | {"checks": []}
    for text, given in (("goodput<1", result), ("output_errors>0", unchecked)):
        assert "cannot be told" in failures([condition(text)], given)[0]
    for text, message in (
        ("ttft_p99", "expected METRIC>NUMBER"),
        ("ttft_p99>x", "expected METRIC>NUMBER"),
        ("ttft_99>1", "did you mean 'ttft_p99'"),
    ):
        with pytest.raises(ArgumentTypeError, match=message):
            condition(text)
