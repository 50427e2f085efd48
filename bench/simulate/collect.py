"""Follows a replay and adds up what it was like. Requests are forgotten when they end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.bench.simulate.statistics import Distribution, Series, jain
from octavo.bench.simulate.traces import TraceRequest
from octavo.bench.slo import Slo
from octavo.core.messages import EngineOutputs, Finish
from octavo.engine.scheduler.scheduler import Scheduler

NOBODY = "(none)"


@dataclass
class UserTotals:
    """Sums over one user's served requests; seconds from arrival to the end."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: float = 0.0
    worst_ttft: float = 0.0
    seconds: float = 0.0


class Live:
    """Columns over the handles between the oldest live one and the newest. Handles ascend."""

    COLUMNS = {
        "arrival": np.float64,
        "first": np.float64,
        "last": np.float64,
        "tokens": np.int64,
        "prompt": np.int64,
        "wanted": np.int64,
        "user": np.int64,
    }

    def __init__(self, capacity: int = 1024) -> None:
        self.base = 0
        self.count = 0
        self.arrival = self.first = self.last = np.empty(0)
        self.tokens = self.prompt = self.wanted = self.user = np.empty(0, np.int64)
        self._resize(0, capacity)

    def _resize(self, skip: int, capacity: int) -> None:
        """Drop the first `skip` rows, and make room for `capacity`."""
        for name, dtype in self.COLUMNS.items():
            old = getattr(self, name)[skip:]
            fill = np.nan if dtype is np.float64 else 0
            column = np.full(capacity, fill, dtype)
            column[: len(old)] = old[:capacity]
            setattr(self, name, column)
        self.base += skip

    def open(self, handle: int) -> int:
        """A row for a new handle."""
        row = handle - self.base
        if row >= len(self.arrival):
            alive = np.flatnonzero(~np.isnan(self.arrival))
            skip = int(alive[0]) if len(alive) else len(self.arrival)
            needed = 2 * (row - skip + 1)
            self._resize(skip, max(needed, len(self.arrival) if skip else 0, 1024))
            row = handle - self.base
        self.count += 1
        return row

    def close(self, row: int) -> None:
        self.arrival[row] = self.first[row] = self.last[row] = np.nan
        self.tokens[row] = 0
        self.count -= 1


class Collector:
    """Told of everything that happens to the requests of one replay."""

    SERIES = ("kv_usage", "running", "waiting", "prefill_tokens_per_s", "decode_tokens_per_s")

    def __init__(self, slo: Slo, scheduler: Scheduler) -> None:
        self.slo, self._scheduler = slo, scheduler
        self.num_refused: dict[str, int] = {}
        self.num_served = self.num_truncated = self.num_failed = self.num_good = 0
        self.prompt_tokens = self.output_tokens = 0
        self.admitted_prompt_tokens = self.cached_tokens = 0
        self.computed_tokens = 0
        self.num_preempted_requests = 0
        self.peak_kv_usage = self.kv_seconds = 0.0
        self.peak_waiting = self.peak_running = 0
        self.ttft, self.itl = Distribution(), Distribution()
        self.tpot, self.e2e = Distribution(), Distribution()
        self.series = Series(self.SERIES)
        self.users: dict[str, UserTotals] = {}
        self.end = 0.0
        self._user_names: list[str] = []
        self._user_numbers: dict[str, int] = {}
        self._live = Live()

    def refused(self, request: TraceRequest, reason: str) -> None:
        """The engine, or the front end before it, did not take the request."""
        self.num_refused[reason] = self.num_refused.get(reason, 0) + 1

    def submitted(self, handle: int, request: TraceRequest, arrival: float) -> None:
        live = self._live
        row = live.open(handle)
        live.arrival[row] = arrival
        live.prompt[row] = request.num_prompt
        live.wanted[row] = request.num_output
        name = NOBODY if request.user is None else request.user
        number = self._user_numbers.get(name)
        if number is None:
            number = self._user_numbers[name] = len(self._user_names)
            self._user_names.append(name)
            self.users[name] = UserTotals()
        live.user[row] = number

    def step(
        self, outputs: EngineOutputs, now: float, seconds: float, prefill: int, decodes: int
    ) -> None:
        """A step of `seconds` ended at `now`, having computed so many tokens of either kind."""
        live = self._live
        rows = outputs.handles - live.base
        gaps = now - live.last[rows]
        fresh = np.isnan(gaps)
        if fresh.any():
            first = rows[fresh]
            live.first[first] = now
            self.ttft.add(now - live.arrival[first])
            gaps = gaps[~fresh]
        self.itl.add(gaps)
        live.last[rows] = now
        live.tokens[rows] += 1
        self.computed_tokens += prefill + decodes
        self.end = now
        for handle, cached in outputs.cached.items():
            self.cached_tokens += cached
            self.admitted_prompt_tokens += int(live.prompt[handle - live.base])
        for finish in outputs.finished:
            self._finished(finish, now)
        self._state(now, seconds, prefill, decodes)

    def _state(self, now: float, seconds: float, prefill: int, decodes: int) -> None:
        usage = self._scheduler.kv.stats().usage
        running, waiting = self._scheduler.num_running, self._scheduler.num_waiting
        self.peak_kv_usage = max(self.peak_kv_usage, usage)
        self.kv_seconds += usage * seconds
        self.peak_running = max(self.peak_running, running)
        self.peak_waiting = max(self.peak_waiting, waiting)
        if seconds > 0:
            rates = prefill / seconds, decodes / seconds
            state = (usage, running, waiting, *rates)
            self.series.add(now, seconds, state)

    def _finished(self, finish: Finish, now: float) -> None:
        live = self._live
        row = finish.handle - live.base
        tokens, prompt = int(live.tokens[row]), int(live.prompt[row])
        arrival, first = float(live.arrival[row]), float(live.first[row])
        user = self.users[self._user_names[live.user[row]]]
        wanted = int(live.wanted[row])
        live.close(row)
        if finish.reason == "error" or not tokens:
            self.num_failed += 1
            return
        self.num_served += 1
        self.num_truncated += tokens < wanted
        self.num_preempted_requests += finish.num_preemptions > 0
        self.prompt_tokens += prompt
        self.output_tokens += tokens
        ttft, e2e = first - arrival, now - arrival
        tpot = (now - first) / (tokens - 1) if tokens > 1 else 0.0
        if tokens > 1:
            self.tpot.add(np.array([tpot]))
        self.e2e.add(np.array([e2e]))
        self.num_good += self.slo.met(ttft, tpot, e2e)
        user.requests += 1
        user.prompt_tokens += prompt
        user.output_tokens += tokens
        user.ttft += ttft
        user.worst_ttft = max(user.worst_ttft, ttft)
        user.seconds += e2e

    @property
    def num_live(self) -> int:
        return self._live.count

    @property
    def prefix_hit_rate(self) -> float:
        """Prompt tokens found in the cache when a request was first admitted, as a fraction."""
        total = self.admitted_prompt_tokens
        return self.cached_tokens / total if total else 0.0

    def fairness(self) -> dict[str, Any]:
        """Jain's index of the users' speeds (output tokens per second between arrival and end of
        their requests), and each user's figures, those with most tokens first."""
        served = {name: user for name, user in self.users.items() if user.requests}
        speeds = [user.output_tokens / max(user.seconds, 1e-12) for user in served.values()]
        waits = [user.ttft / user.requests for user in served.values()]
        order = sorted(served, key=lambda n: -(served[n].prompt_tokens + served[n].output_tokens))
        return {
            "num_users": len(served),
            "jain_speed": jain(np.asarray(speeds)),
            "jain_ttft": jain(np.asarray(waits)),
            "users": {name: _user(served[name]) for name in order[:50]},
        }


def _user(user: UserTotals) -> dict[str, float]:
    return {
        "requests": user.requests,
        "prompt_tokens": user.prompt_tokens,
        "output_tokens": user.output_tokens,
        "mean_ttft_s": user.ttft / user.requests,
        "max_ttft_s": user.worst_ttft,
        "output_tokens_per_s": user.output_tokens / max(user.seconds, 1e-12),
    }
