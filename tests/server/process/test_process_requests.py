"""Requests of clients that go away, and of too many of them, over HTTP."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

SOON = 20.0
"""Seconds; what the tests leave would run for a minute if nobody ended it."""


def idle(tools, server, seconds: float = SOON) -> None:
    """Wait, for less than what was left would take, until the engine runs nothing and all its
    blocks are free again."""

    def free() -> bool:
        state = server.metrics()
        left = state["num_running"] + state["num_waiting"]
        blocks = state["num_free_blocks"] + state["num_evictable_blocks"]
        return not left and blocks == state["num_blocks"]

    tools.until(free, seconds)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_while_it_decodes(shared, stream, tools, streaming, n):
    running = stream(shared, stream=streaming, n=n)
    tools.until(lambda: shared.metrics()["num_running"] == n)
    running.close()
    idle(tools, shared)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_goes_away_while_its_prompt_is_computed(shared, stream, tools, streaming):
    prompts = [letter * 4000 for letter in "abcdefghijklmnop"]  # together, 20 seconds
    running = stream(shared, prompt=prompts, max_tokens=1, stream=streaming, n=2)
    tools.until(lambda: shared.metrics()["num_running"] == 1)
    running.close()
    idle(tools, shared, 10.0)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_goes_away_while_it_is_queued(shared, stream, tools, streaming):
    running = [stream(shared) for _ in range(4)]
    tools.until(lambda: shared.metrics()["num_running"] == 4)
    queued = [stream(shared, stream=streaming, n=n) for n in (1, 2)]
    tools.until(lambda: shared.metrics()["num_waiting"] == 2)
    for each in queued:
        each.close()
    tools.until(lambda: shared.metrics()["num_waiting"] == 0, SOON)
    assert shared.metrics()["num_running"] == 4, "the others go on"
    for each in running:
        each.close()
    idle(tools, shared)


def test_a_client_that_goes_away_while_it_is_tokenized(shared, stream, tools):
    going = stream(shared, prompt="the quick brown fox " * 50_000)
    time.sleep(0.05)
    going.close()
    tools.until(lambda: shared.load()["server_load"] == 0)
    idle(tools, shared)


def test_a_client_that_goes_away_while_it_is_swapped_out(model_folder, tmp_path, stream, tools):
    made = tools.settings(model_folder, {"step_s": 0.03})
    made["kv_cache"]["num_blocks"] = 40
    made["preemption"] = {"policy": "swap", "swap_space": 1 << 16}
    server = tools.Server(tmp_path, made)
    try:
        server.ready()
        running = [stream(server, prompt="a" * 310, max_tokens=330)]
        tools.until(lambda: server.metrics()["num_running"] == 1)
        running.append(stream(server, prompt="b" * 310, max_tokens=330))
        tools.until(lambda: server.metrics()["num_swapped"] == 1)
        running[1].close()
        # Before the first one has ended, which takes 9 seconds.
        tools.until(lambda: server.metrics()["num_swapped"] == 0, 5.0)
        state = server.metrics()
        assert state["num_free_swap_blocks"] == state["num_swap_blocks"] > 0
        assert state["num_running"] == 1, "the other goes on"
        running[0].close()
        idle(tools, server)
    finally:
        server.clean_up()


def test_a_batch_of_prompts_whose_client_goes_away(shared, stream, tools):
    running = stream(shared, prompt=["a", "b", "c", "d", "e", "f"])
    tools.until(lambda: shared.metrics()["num_running"] == 4)
    running.close()
    idle(tools, shared)


@pytest.mark.slow
def test_overload(start, stream, tools):
    server = start(max_queued_requests=3, max_queued_tokens=60)
    running = []
    for count in range(1, 5):  # a burst counts as waiting until the engine has begun it
        running.append(stream(server))
        tools.until(lambda count=count: server.metrics()["num_running"] == count)
    waiting = [stream(server, prompt="x" * 10) for _ in range(3)]
    tools.until(lambda: server.metrics()["num_waiting"] == 3)
    refused = server.post(max_tokens=1)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "server_overloaded"
    assert "max_queued_requests" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) > 0
    assert server.health().status_code == 200
    waiting.pop().close()
    tools.until(lambda: server.metrics()["num_waiting"] == 2, SOON)
    refused = server.post(prompt="x" * 41)
    assert "max_queued_tokens" in refused.json()["error"]["message"]
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(server.post, prompt="x" * 40, max_tokens=1)
        tools.until(lambda: server.metrics()["num_waiting"] == 3)
        for each in running:
            each.close()
        assert taken.result().status_code == 200
