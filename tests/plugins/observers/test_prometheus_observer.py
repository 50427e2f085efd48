"""The observer `prometheus` on a fake engine: its numbers against what really happened."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from octavo.core.contracts.observer import ObserverContext
from octavo.core.errors import ConfigError
from octavo.plugins.observers.prometheus.board import Board
from octavo.plugins.observers.prometheus.engine import PrometheusObserver, PrometheusOptions
from octavo.testing.fake_engine import EOS, Collector, make_fake_engine, request


def observed(board: Board, **engine):
    options = PrometheusOptions(memory=board.fd)
    observer = PrometheusObserver(options, ObserverContext(report={}))
    return make_fake_engine(observers=[("prometheus", observer)], **engine)


@pytest.fixture
def board():
    with Board.create(1) as made:
        yield made


def value(board: Board, name: str, label: str = "") -> float:
    (number,) = board.totals()[name, label]
    return number


def count(board: Board, name: str) -> float:
    return sum(board.totals()[name, ""][:-1])


def test_steps_and_requests(board):
    engine = observed(board, max_num_seqs=2)
    tokens = list(range(10, 30))
    for handle in range(4):
        engine.add(request(handle, tokens, 6, ignore_eos=True))
    collector = Collector(engine)
    collector.step()
    assert value(board, "num_requests_running") == 2
    assert value(board, "num_requests_waiting") == 2
    assert 0 < value(board, "kv_cache_usage_perc") < 1
    collector.run()
    stats = engine.scheduler.kv.stats()
    assert value(board, "num_requests_running") == value(board, "num_requests_waiting") == 0
    assert value(board, "kv_cache_usage_perc") == 0
    assert stats.num_evictable > 0, "cached blocks count as free"
    assert value(board, "prefix_cache_queries") == stats.prefix_queries
    assert value(board, "prefix_cache_hits") == stats.prefix_hits > 0
    computed = 4 * 20 - stats.prefix_hits + 4 * 5
    assert board.totals()["iteration_tokens_total", ""][-1] == computed
    assert count(board, "iteration_tokens_total") == engine.timing.num_steps
    phases = engine.timing.summary()["phases"]
    for phase, summary in phases.items():
        spent = summary["mean_ms"] * engine.timing.num_steps / 1e3
        assert value(board, "step_phase_seconds", phase) == pytest.approx(spent)
    for name in ("queue", "prefill", "decode", "inference"):
        assert count(board, f"request_{name}_time_seconds") == 4
    assert engine.metrics()["observer_failures"] == {}


def test_choices_are_one_request(board):
    engine = observed(board)
    engine.add(request(1, [10, 11, 12], 4))
    engine.add(request(2, [10, 11, 12], 4, parent=1, index=1))
    Collector(engine).run()
    assert count(board, "request_prefill_time_seconds") == 1


def test_aborts_between_steps_are_seen(board):
    engine = observed(board, max_num_seqs=1)
    for handle in (1, 2):
        engine.add(request(handle, [10, 11, 12], 50, ignore_eos=True))
    collector = Collector(engine)
    collector.step()
    assert value(board, "num_requests_waiting") == 1
    engine.abort([1, 2])
    collector.run()
    assert value(board, "num_requests_running") == value(board, "num_requests_waiting") == 0
    assert value(board, "kv_cache_usage_perc") == 0
    assert count(board, "request_queue_time_seconds") == 1
    assert count(board, "request_decode_time_seconds") == 0


def test_a_stop_string_is_no_abort(board):
    engine = observed(board)
    engine.add(request(1, [10, 11, 12], 50, ignore_eos=True))
    collector = Collector(engine)
    for _ in range(3):
        collector.step()
    engine.abort([1], "stop")
    collector.run()
    assert collector.reasons == {1: "stop"}
    assert count(board, "request_decode_time_seconds") == 1


def test_preemption_swaps_and_the_host_cache(board):
    engine = observed(
        board, num_blocks=14, preemption="swap", num_swap_blocks=40, num_host_cache_blocks=20
    )
    for handle in range(5):
        engine.add(request(handle, [EOS + 1 + handle] * 9, 20, ignore_eos=True))
    seen = 0.0
    collector = Collector(engine)
    while engine.has_work():
        collector.step()
        seen = max(seen, value(board, "num_requests_swapped"))
    stats = engine.scheduler.stats()
    assert value(board, "num_preemptions") == stats.num_preemptions > 0
    assert value(board, "num_swap_outs") == stats.num_swap_outs > 0
    assert value(board, "num_swap_ins") == stats.num_swap_ins > 0
    assert seen > 0
    assert value(board, "num_requests_swapped") == 0
    assert value(board, "kv_cache_swap_usage_perc") == 0
    assert value(board, "external_prefix_cache_queries") == stats.host_cache_queries
    assert value(board, "external_prefix_cache_hits") == stats.host_cache_hits


@pytest.mark.parametrize("manager", ["paged", "radix"])
def test_who_comes_back_after_a_preemption_counts_no_more(board, manager):
    """Sequences that find their own prefix again would make any traffic look like one that hits."""
    ends = []
    observer = PrometheusObserver(PrometheusOptions(memory=board.fd), ObserverContext(report={}))
    observer.on_request = ends.append
    engine = make_fake_engine(
        observers=[("prometheus", observer)],
        manager=manager,
        num_blocks=20,
        max_num_seqs=6,
        num_host_cache_blocks=20 if manager == "paged" else 0,
    )
    reqs = [request(h, [7] * 8 + [h], 24, ignore_eos=True) for h in range(10, 20)]
    reqs += [request(h, [7] * 8 + [10], 24, ignore_eos=True, parent=10) for h in (20, 21)]
    for req in reqs:
        engine.add(req)
    Collector(engine).run()
    assert sum(end.num_preemptions for end in ends) > 0
    stats, counted = engine.scheduler.stats(), engine.scheduler.kv.stats()
    assert stats.prefix_queries == value(board, "prefix_cache_queries") == 9 * len(reqs)
    assert counted.prefix_queries > stats.prefix_queries
    assert stats.prefix_hits == value(board, "prefix_cache_hits")
    assert stats.prefix_hits == sum(end.num_cached for end in ends) > 0
    assert counted.prefix_hits > stats.prefix_hits
    assert value(board, "external_prefix_cache_queries") == stats.host_cache_queries
    assert stats.host_cache_queries <= stats.prefix_queries
    assert (stats.host_cache_queries < counted.host_cache_queries) == (manager == "paged")


def test_counters_go_on_in_the_next_engine(board):
    for _ in range(2):
        engine = observed(board)
        engine.add(request(1, list(range(10, 20)), 3, ignore_eos=True))
        Collector(engine).run()
    assert value(board, "prefix_cache_queries") == 2 * engine.scheduler.kv.stats().prefix_queries
    assert count(board, "iteration_tokens_total") == 2 * engine.timing.num_steps


def test_an_engine_without_a_server_can_serve_its_metrics():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        options = PrometheusOptions(port=port)
        context = ObserverContext(report={"source": "m", "block_size": 4, "max_model_len": 96})
        with pytest.raises(ConfigError, match=r"cannot listen .*in use"):
            PrometheusObserver(options, context)
    observer = PrometheusObserver(options, context)
    engine = make_fake_engine(observers=[("prometheus", observer)])
    engine.add(request(1, [10, 11, 12], 4, ignore_eos=True))
    Collector(engine).run()
    # As Prometheus asks before version 3.
    headers = {"accept": "application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.2"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    with urllib.request.urlopen(asked) as answer:
        text = answer.read().decode()
    engine.close()
    assert 'octavo:iteration_tokens_total_count{engine="0",model_name="m"} 4.0' in text
    assert 'block_size="4"' in text
    assert "octavo:generation_tokens" not in text, "what nobody counts is not shown"
