"""When requests arrive."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def arrivals(
    count: int,
    rate: float,
    draw: np.random.RandomState,
    *,
    burstiness: float = 1.0,
    ramp_to: float | None = None,
    exponential: bool = False,
) -> NDArray[np.float64]:
    """Seconds at which `count` requests arrive, the first at 0, ascending.

    Gaps follow a gamma distribution with shape `burstiness` and mean 1 / rate: 1 is a Poisson
    process, less is burstier, more is steadier, inf is a metronome. ramp_to: the rate grows (or
    falls) from `rate` to this, linearly in the number of the request, or exponentially. An infinite
    rate without a ramp sends all at once.
    """
    if math.isinf(rate):
        return np.zeros(count)
    share = np.arange(count) / max(1, count - 1)
    if ramp_to is None:
        rates = np.full(count, rate)
    elif exponential:
        rates = rate * (ramp_to / rate) ** share
    else:
        rates = rate + (ramp_to - rate) * share
    if math.isinf(burstiness):
        gaps = np.ones(count)
    else:
        gaps = draw.gamma(burstiness, 1 / burstiness, count)
    gaps = gaps / rates
    gaps[:1] = 0
    times: NDArray[np.float64] = np.cumsum(gaps)
    return times
