"""Random work for an engine around `FakeWorker`, and what must be true of every run.

The fake worker keeps token ids in its KV cache and derives each token from what it reads back, so a
lost, shared or overwritten block changes the output.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.core.messages import EngineRequest
from octavo.engine.core import EngineCore
from octavo.testing.fake_engine import (
    Collector,
    assert_clean,
    expected,
    make_fake_engine,
    request,
)
from octavo.testing.fake_worker import FakeExecutor

MAX_STEPS = 6000


@dataclass(frozen=True)
class Situation:
    """name: in messages. engine: keywords of `make_fake_engine`. aborts: how many of ten requests
    are aborted on the way. forks: whether some requests have several choices."""

    name: str
    engine: dict[str, Any] = field(default_factory=dict)
    aborts: int = 0
    forks: bool = False


SITUATIONS = (
    Situation("an ample pool"),
    Situation("a pool that is too small, recomputing", {"num_blocks": 14}),
    Situation(
        "a pool that is too small, swapping",
        {"num_blocks": 14, "preemption": "swap", "num_swap_blocks": 20},
    ),
    Situation(
        "a pool and a host pool that are too small",
        {"num_blocks": 12, "preemption": "swap", "num_swap_blocks": 4},
    ),
    Situation("small chunks", {"budget": 6, "max_chunk": 4, "num_blocks": 20}),
    Situation("no prefix caching", {"prefix_caching": False, "num_blocks": 16}),
    Situation("three steps in flight", {"in_flight": 3, "num_blocks": 16, "max_num_seqs": 4}),
    Situation("one slot", {"max_num_seqs": 1, "num_blocks": 12}),
    Situation("aborts at any moment", {"num_blocks": 14, "in_flight": 2}, aborts=4),
    Situation("several choices of one prompt", {"num_blocks": 30}, forks=True),
    Situation(
        "everything at once",
        {
            "num_blocks": 16,
            "budget": 8,
            "max_chunk": 5,
            "in_flight": 2,
            "preemption": "swap",
            "num_swap_blocks": 9,
        },
        aborts=2,
        forks=True,
    ),
)


def situation(name: str) -> Situation:
    """One of `SITUATIONS` by name."""
    return next(item for item in SITUATIONS if item.name == name)


def make_requests(random: np.random.Generator, count: int, forks: bool) -> list[EngineRequest]:
    """Requests with shared prefixes, some priorities and users."""
    base = random.integers(10, 90, 30).tolist()
    made: list[EngineRequest] = []
    while len(made) < count:
        shared, own = int(random.integers(0, 24)), int(random.integers(1, 12))
        tokens = base[:shared] + random.integers(10, 90, own).tolist()
        parent, seed = len(made) + 1, int(random.integers(1 << 16))
        priority, user = int(random.integers(0, 3)), ("a", "b", None)[int(random.integers(3))]
        for index in range(3 if forks and random.random() < 0.4 else 1):
            item = request(
                len(made) + 1,
                tokens,
                int(random.integers(1, 20)),
                parent=parent if index else None,
                index=index,
                priority=priority,
                user=user,
            )
            item.seed = seed
            made.append(item)
    return made


def run_situation(where: Situation, seed: int, **parts: Any) -> EngineCore:
    """Drive one engine through a situation and check what must be true: every request ends, with
    exactly the tokens that it would have alone; no step passes a budget; nothing is left behind.

    parts: of `make_fake_engine`, of which those under test are objects. Returns the engine.
    """
    random = np.random.default_rng(seed)
    settings = {**where.engine, **parts}
    engine = make_fake_engine(**settings)
    requests = make_requests(random, 12, where.forks)
    collector = Collector(engine)
    arrivals = sorted(int(x) for x in random.integers(0, 40, len(requests)))
    aborts = sorted(
        (int(random.integers(1, 50)), int(random.integers(1, len(requests) + 1)))
        for _ in range(where.aborts)
    )
    todo, step = list(zip(arrivals, requests, strict=True)), 0
    while todo or engine.has_work():
        while todo and todo[0][0] <= step:
            engine.add(todo.pop(0)[1])
        while aborts and aborts[0][0] <= step:
            engine.abort([aborts.pop(0)[1]])
        collector.step()
        step += 1
        assert step < MAX_STEPS, f"{where.name}: requests starve, {len(todo)} have not even arrived"
    _check(where, engine, collector, requests)
    return engine


def _check(
    where: Situation, engine: EngineCore, collector: Collector, requests: list[EngineRequest]
) -> None:
    limits = engine.scheduler.limits
    longest = min(limits.max_model_len, (engine.scheduler.kv.stats().num_blocks) * 4)
    for item in requests:
        got, reason = collector.tokens.get(item.handle, []), collector.reasons[item.handle]
        assert reason != "error", f"{where.name}: a request failed: {collector.errors[item.handle]}"
        wanted = expected(item, longest)
        if reason == "abort":
            wanted = wanted[: len(got)]
        assert got == wanted, f"{where.name}: request {item.handle} got other tokens than alone"
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    for rows, tokens in executor.worker.steps:  # type: ignore[attr-defined]
        assert rows <= limits.max_num_seqs, f"{where.name}: {rows} rows in one step"
        assert tokens <= limits.max_num_batched_tokens, f"{where.name}: {tokens} tokens in a step"
    assert_clean(engine)
