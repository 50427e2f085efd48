"""`/metrics` of a server of several processes: the same truth from each, also after deaths."""

from __future__ import annotations

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families


def scrape(server: Any) -> dict[str, float]:
    """Values by name and the label beside model_name and engine. A new connection each time, so
    that any API process may answer."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    found = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            rest = [v for k, v in labels.items() if k not in ("model_name", "engine")]
            if not name.endswith("_info"):
                found[" ".join([name.removeprefix("octavo:"), *rest])] = value
            else:
                found[name] = labels["num_gpu_blocks"]
    return found


def test_one_server(start, stream, tools) -> None:
    server = start(executor={"step_s": 0.01})
    usage = server.post(max_tokens=4, n=2).json()["usage"]
    text = server.post(max_tokens=30, stop="aaa").json()
    assert text["choices"][0]["finish_reason"] == "stop"
    cached = []
    for _ in range(2):  # the prefix is found to whole blocks of 16 tokens, whatever n is
        again = server.post(prompt="y" * 100, max_tokens=1, n=3).json()["usage"]
        cached.append(again["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 96]
    live = stream(server, max_tokens=1000)
    live.until(b"data:")
    tools.until(lambda: scrape(server)["num_requests_running"] == 1)
    seen = scrape(server)
    assert 0 < seen["kv_cache_usage_perc"] < 1
    assert seen["octavo:cache_config_info"] == "512"
    live.close()
    tools.until(lambda: scrape(server)["num_requests_running"] == 0)
    seen = scrape(server)
    assert seen["kv_cache_usage_perc"] == 0
    assert seen["request_success_total stop"] == 1
    assert seen["request_success_total length"] == 3
    assert seen["request_success_total abort"] == 1
    assert seen["request_decode_time_seconds_count"] == 4
    assert seen["request_queue_time_seconds_count"] == 5
    assert seen["time_to_first_token_seconds_count"] == 5
    assert seen["prompt_tokens_total"] == usage["prompt_tokens"] * 3 + 200
    assert seen["prompt_tokens_cached_total"] == 96
    least = usage["completion_tokens"] + text["usage"]["completion_tokens"]
    assert seen["generation_tokens_total"] > least
    assert seen["iteration_tokens_total_count"] > 5
    assert seen["step_phase_seconds_total schedule"] > 0


def test_every_worker_tells_all_and_deaths_lose_nothing(start, tools) -> None:
    server = start(workers=3, executor={"step_s": 0.0}, restart_engine=True)
    tools.until(lambda: server.health().status_code == 200)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.post(max_tokens=3), range(24)))
    assert Counter(answer.status_code for answer in answers) == {200: 24}
    tools.until(lambda: scrape(server)["server_load"] == 0)
    first = scrape(server)
    assert first["request_success_total length"] == 24
    assert first["generation_tokens_total"] == 72
    assert first["prompt_tokens_total"] == 24 * answers[0].json()["usage"]["prompt_tokens"]
    assert first["time_to_first_token_seconds_count"] == 24
    assert all(scrape(server) == first for _ in range(8)), "whichever process answers"
    worker = server.api_workers[0]
    os.kill(worker, signal.SIGKILL)
    tools.until(lambda: worker not in server.api_workers and len(server.api_workers) == 3)
    tools.until(lambda: scrape(server) == first)  # one that has not loaded yet knows less
    engine = server.engine
    os.kill(engine, signal.SIGKILL)
    server.line("the engine process was killed by SIGKILL")
    tools.until(lambda: server.health().status_code == 503)
    dead = scrape(server)
    counted = {name: value for name, value in first.items() if "info" not in name}
    assert {name: dead[name] for name in counted} == counted
    tools.until(lambda: server.health().status_code == 200, 60)
    statuses = []  # a worker may not know yet, and says so
    tools.until(lambda: statuses.append(server.post(max_tokens=3).status_code) or 200 in statuses)
    assert set(statuses) <= {200, 503}
    seen = scrape(server)
    assert seen["request_success_total length"] == 25
    assert seen["iteration_tokens_total_sum"] > first["iteration_tokens_total_sum"]
    assert seen["prefix_cache_queries_total"] > first["prefix_cache_queries_total"]
    pids = [server.pid, server.engine, *server.api_workers]
    assert server.stop() == 0
    server.assert_nothing_left(*pids)
