"""The prefix cache under a trace: hit rates that follow from the trace's ids alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.simulate.replay import Replay
from octavo.bench.simulate.setup import SimulatedEngine, simulated_engine
from octavo.bench.simulate.traces import TraceRequest, read_trace, shaped
from octavo.core.registry import Registry
from octavo.frontend.config import load_config

MakeEngine = Callable[..., SimulatedEngine]


def hits_by_ids(requests: Iterable[TraceRequest], block_size: int) -> float:
    """What a cache that forgets nothing finds when requests come one after another: the longest
    prefix that some earlier prompt has, in whole blocks, without the last token."""
    filled: dict[tuple[int, int], tuple[int, int]] = {}  # (node, id) -> (child, tokens of the id)
    hits = total = 0
    for request in requests:
        node, shared, matching = 0, 0, True
        for index, block in enumerate(request.blocks or ()):
            own = min(512, request.num_prompt - 512 * index)
            child, there = filled.get((node, block), (len(filled) + 1, 0))
            if matching:
                common = min(own, there)
                shared += common
                matching = common == 512
            filled[node, block] = (child, max(there, own))
            node = child
        hits += min(shared, request.num_prompt - 1) // block_size * block_size
        total += request.num_prompt
    return hits / total


def hit_rate(engine: SimulatedEngine, requests: Iterable[TraceRequest], **options: Any) -> float:
    replay = Replay(engine, **options)
    found = replay.run(requests)
    assert found.num_refused == {}
    return found.prefix_hit_rate


@pytest.fixture(scope="module")
def beginning(mooncake: Path) -> list[TraceRequest]:
    """400 requests from both ends of the trace. Their outputs are cut: nobody finds them."""
    requests = list(shaped(read_trace(mooncake, "mooncake"), max_output=3))
    return requests[:300] + requests[-100:]


def ample(make_engine: MakeEngine, **settings: Any) -> SimulatedEngine:
    return make_engine(
        **{
            "kv_cache__num_blocks": 600_000,
            "kv_cache__block_size": 64,
            "scheduler__max_num_batched_tokens": 65536,
            **settings,
        }
    )


@pytest.mark.parametrize("block_size", [16, 64, 512])
def test_serially_the_hit_rate_is_what_the_ids_say(
    make_engine: MakeEngine, beginning: list[TraceRequest], block_size: int
) -> None:
    part = beginning[:150] if block_size == 16 else beginning
    engine = ample(make_engine, kv_cache__block_size=block_size)
    expected = hits_by_ids(part, block_size)
    assert expected > 0.01
    assert hit_rate(engine, part, concurrency=1) == pytest.approx(expected, abs=1e-12)


def test_equal_prompts_and_partial_blocks(make_engine: MakeEngine) -> None:
    """The corners: a prompt again, a shorter one, one that goes on, and one in whole blocks."""
    shapes = [(600, (1, 2)), (600, (1, 2)), (590, (1, 2)), (1100, (1, 3, 4)), (1024, (1, 3))]
    shapes += [(1024, (1, 3)), (1500, (1, 3, 4)), (40, (9,)), (40, (9,)), (16, (9,)), (17, (9,))]
    requests = [TraceRequest(0.0, length, 30, blocks) for length, blocks in shapes]
    for block_size in (1, 16, 64):
        engine = ample(make_engine, kv_cache__block_size=block_size)
        expected = hits_by_ids(requests, block_size)
        assert hit_rate(engine, requests, concurrency=1) == pytest.approx(expected, abs=1e-12)


def test_a_smaller_pool_finds_less(make_engine: MakeEngine, beginning: list[TraceRequest]) -> None:
    rates = [
        hit_rate(ample(make_engine, kv_cache__num_blocks=blocks), beginning, concurrency=1)
        for blocks in (200_000, 30_000, 8_000, 3_000)
    ]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(hits_by_ids(beginning, 64), abs=1e-12)
    assert rates[-1] < rates[0] * 0.9


def test_without_caching_nothing_is_found(
    make_engine: MakeEngine, beginning: list[TraceRequest]
) -> None:
    engine = ample(make_engine, kv_cache__prefix_caching=False)
    assert hit_rate(engine, beginning[:50], concurrency=1) == 0


def test_timed_replay_of_a_part_is_close_to_the_ids(
    make_engine: MakeEngine, beginning: list[TraceRequest]
) -> None:
    part = beginning[:300]
    found = hit_rate(ample(make_engine), part)
    assert found == pytest.approx(hits_by_ids(part, 64), abs=0.005)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_trace_serially(make_engine: MakeEngine, mooncake: Path) -> None:
    """Exactly what the ids say, and less with a pool that does not hold everything."""
    requests = list(read_trace(mooncake, "mooncake"))
    short = [replace(request, num_output=min(request.num_output, 2)) for request in requests]
    rates = [
        hit_rate(
            ample(make_engine, kv_cache__num_blocks=blocks, kv_cache__block_size=512),
            short,
            concurrency=1,
        )
        for blocks in (250_000, 5_000)
    ]
    assert rates[0] == pytest.approx(hits_by_ids(requests, 512), abs=1e-12)
    assert rates[0] > 0.37
    assert rates[1] < rates[0] - 0.05


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_trace_at_its_own_times(
    repository: Path, registry: Registry, mooncake: Path
) -> None:
    """The example's 8B model, with a pool that holds everything."""
    config = load_config(
        repository / "docs" / "examples" / "simulate.yaml",
        overrides=["kv_cache.num_blocks=250000", "kv_cache.block_size=512"],
    )
    requests = list(read_trace(mooncake, "mooncake"))
    found = hit_rate(simulated_engine(config, registry), requests)
    assert found == pytest.approx(hits_by_ids(requests, 512), abs=0.005)
