"""Distributions, series over time, and the index of fairness."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.bench.simulate.statistics import PERCENTILES, Distribution, Series, jain


def test_few_values_are_exact() -> None:
    values = np.random.default_rng(0).exponential(0.1, 5000)
    found = Distribution()
    for part in np.array_split(values, 70):
        found.add(part)
    assert found.mean == pytest.approx(values.mean())
    np.testing.assert_allclose(found.percentiles(PERCENTILES), np.percentile(values, PERCENTILES))
    assert found.summary()["max"] == values.max()


@pytest.mark.parametrize("scale", [1e-3, 0.03, 5000.0])
def test_many_values_are_within_half_a_percent(scale: float) -> None:
    values = np.random.default_rng(1).lognormal(0, 1.5, 60_000) * scale
    found = Distribution(exact=1000)
    for part in np.array_split(values, 300):
        found.add(part)
    assert found.count == 60_000
    assert found.mean == pytest.approx(values.mean())
    which = [1, 10, 50, 90, 99, 99.9]
    exact = np.percentile(values, which, method="inverted_cdf")
    np.testing.assert_allclose(found.percentiles(which), exact, rtol=0.0051)
    assert len(found.curve(11)) == 11
    assert found.percentiles([0])[0] == pytest.approx(values.min(), rel=0.0051)


def test_values_that_come_in_one_large_piece() -> None:
    found = Distribution(exact=100)
    found.add(np.full(20_000, 2.0))
    found.add(np.array([4.0]))
    assert found.mean == pytest.approx(40_004 / 20_001)
    assert found.count == 20_001


def test_no_values() -> None:
    assert set(Distribution().summary().values()) == {0.0}


def test_a_series_holds_means_over_time() -> None:
    series = Series(("a", "b"), capacity=8, width=1.0)
    series.add(0.5, 0.5, (1.0, 10.0))
    series.add(2.0, 1.0, (4.0, 20.0))  # from 1.0 to 2.0: nothing from 0.5 to 1.0
    series.add(4.0, 2.0, (2.0, 0.0))
    found = series.as_dict()
    assert found["time"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert found["a"] == pytest.approx([0.5, 4.0, 2.0, 2.0, 0.0])
    assert found["b"] == pytest.approx([5.0, 20.0, 0.0, 0.0, 0.0])


def test_a_series_that_grows_keeps_its_integral() -> None:
    series = Series(("a",), capacity=16, width=1.0)
    draw = np.random.default_rng(2)
    now = total = 0.0
    for _ in range(500):
        seconds, value = float(draw.exponential(3.0)), float(draw.uniform())
        now += seconds
        total += seconds * value
        series.add(now, seconds, (value,))
    found = series.as_dict()
    assert len(found["time"]) <= 16
    spans = np.diff([*found["time"], now])
    assert float(np.dot(spans, found["a"])) == pytest.approx(total)


def test_jains_index() -> None:
    assert jain(np.array([3.0, 3.0, 3.0])) == pytest.approx(1.0)
    assert jain(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert jain(np.zeros(3)) == 1.0
    assert jain(np.empty(0)) == 1.0
