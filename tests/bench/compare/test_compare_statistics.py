"""The statistics of comparisons on synthetic data: false alarms, power, coverage."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.bench.compare.analysis import analyze, explain
from octavo.bench.compare.statistics import (
    adjusted_p_values,
    detectable,
    interval,
    rounds_needed,
    two_samples_differ,
)

LATENCIES = ("ttft_mean", "ttft_p50", "ttft_p95", "ttft_p99", "itl_mean", "itl_p50", "itl_p99")


def rounds(draw: np.random.RandomState, count: int, factor: float = 1.0) -> list[dict[str, float]]:
    """Metrics of one run of a side: noisy, skewed, dependent on each other."""
    found = []
    for _ in range(count):
        speed = np.exp(0.05 * draw.standard_t(4))
        values = {"output_tokens_per_s": 100 / speed / factor, "peak_memory": 1e9}
        values |= {n: 0.1 * factor * speed * np.exp(0.03 * draw.gamma(2)) for n in LATENCIES}
        found.append(values)
    return found


@pytest.mark.parametrize("count", [6, 8, 12])
def test_twenty_a_a_runs_raise_at_most_one_alarm(count: int) -> None:
    alarms = 0
    for seed in range(20):
        draw = np.random.RandomState(seed)
        rows = analyze([rounds(draw, count), rounds(draw, count)], min_effect=0.0)
        alarms += any(row["verdict"] in ("better", "worse") for row in rows)
    assert alarms <= 1


def test_the_rate_of_false_alarms_is_bounded_over_many_runs() -> None:
    alarms = 0
    for seed in range(400):
        draw = np.random.RandomState(1000 + seed)
        shared = draw.standard_t(3, (1, 8))
        p = adjusted_p_values(shared + 0.5 * draw.standard_t(3, (12, 8)))
        alarms += bool((p <= 0.05).any())
    assert alarms <= 400 * 0.05 + 2.5 * np.sqrt(400 * 0.05 * 0.95)


def test_one_metric_that_differs_is_found_among_many() -> None:
    found = false = 0
    for seed in range(40):
        draw = np.random.RandomState(seed)
        differences = draw.normal(0, 0.02, (15, 8))
        differences[4] += 0.08
        p = adjusted_p_values(differences)
        found += p[4] <= 0.05
        false += bool((np.delete(p, 4) <= 0.05).any())
    assert found >= 36
    assert false <= 5


def test_a_slower_side_has_the_right_sign_and_interval() -> None:
    draw = np.random.RandomState(5)
    rows = {r["metric"]: r for r in analyze([rounds(draw, 8), rounds(draw, 8, 1.5)])}
    slow = rows["ttft_mean"]
    assert slow["verdict"] == "worse"
    assert slow["low"] < 1.5 < slow["high"]
    assert slow["low"] > 1.2
    speed = rows["output_tokens_per_s"]
    assert speed["verdict"] == "worse"
    assert speed["low"] < 1 / 1.5 < speed["high"] < 1
    assert rows["peak_memory"]["verdict"] == "same"


def test_intervals_cover_what_they_should() -> None:
    """Nominally 95%; skewed values of few rounds reach less (the decision's page has a table)."""
    for count, least, kind in ((6, 0.93, "normal"), (8, 0.93, "normal"), (8, 0.89, "skewed")):
        draw = np.random.RandomState(count)
        covered = 0
        for _ in range(300):
            if kind == "normal":
                values = draw.normal(size=count)
            else:
                values = draw.lognormal(0, 0.7, count) - np.exp(0.245)
            low, high = interval(values)
            covered += low <= 0 <= high
        assert covered / 300 >= least
    assert interval(np.array([2.0])) == (-np.inf, np.inf)
    assert interval(np.array([0.3, 0.3, 0.3])) == (0.3, 0.3)


def test_rounds_needed_agree_with_what_is_detectable() -> None:
    for metrics in (1, 20):
        count = rounds_needed(0.03, 0.05, metrics)
        assert count is not None
        assert detectable(0.05, count, metrics) <= 0.03 < detectable(0.05, count - 1, metrics)
    assert rounds_needed(0.0, 0.1, 5) is None
    assert rounds_needed(1e-6, 0.1, 5) is None
    assert rounds_needed(0.5, 0.0, 5) == 6


def test_values_that_agree_exactly_are_sure_from_six_rounds_on() -> None:
    assert adjusted_p_values(np.full((1, 6), 0.1))[0] == pytest.approx(2 / 64)
    assert adjusted_p_values(np.full((1, 5), 0.1))[0] == pytest.approx(2 / 32)
    assert adjusted_p_values(np.zeros((3, 8))).tolist() == [1, 1, 1]
    assert adjusted_p_values(np.ones((1, 1)))[0] == 1
    many = adjusted_p_values(np.full((2, 20), 0.1))
    assert (many < 0.01).all()


def test_verdicts_in_words() -> None:
    draw = np.random.RandomState(1)
    same = analyze([rounds(draw, 8), rounds(draw, 8)])
    texts = {row["metric"]: explain(row) for row in same}
    assert texts["ttft_p99"].startswith("no difference shown; ")
    assert texts["peak_memory"] == "the same in every round"
    few = analyze([rounds(draw, 4), rounds(draw, 4, 3.0)])
    assert {explain(r) for r in few if r["metric"] == "ttft_mean"} == {
        "no verdict from under 6 rounds"
    }
    tiny = [{"ttft_mean": 1.0 + 1e-4 * (i % 2)} for i in range(8)]
    rows = analyze([tiny, [{"ttft_mean": v["ttft_mean"] * 1.001} for v in tiny]])
    assert explain(rows[0]) == "a difference too small to matter"


def test_counts_are_compared_as_differences() -> None:
    a = [{"preemptions": 0.0}] * 6
    b = [{"preemptions": 4.0 + i % 2} for i in range(6)]
    (row,) = analyze([a, b])
    assert (row["kind"], row["estimate"], row["verdict"]) == ("difference", 4.5, "worse")
    assert analyze([a, a]) == []


def test_samples_of_one_distribution_are_told_from_others() -> None:
    p_same, found = [], 0
    for seed in range(30):
        draw = np.random.RandomState(seed)
        shares = draw.dirichlet(np.ones(40) * 0.3, 2)
        one, two = (np.stack([draw.multinomial(128, s) for s in shares]) for _ in range(2))
        p_same.append(two_samples_differ(one, two, seed, draws=200))
        hotter = shares**0.5 / (shares**0.5).sum(axis=1, keepdims=True)
        three = np.stack([draw.multinomial(128, s) for s in hotter])
        found += two_samples_differ(one, three, seed, draws=200) < 0.05
    assert sum(p < 0.05 for p in p_same) <= 4
    assert found >= 26
