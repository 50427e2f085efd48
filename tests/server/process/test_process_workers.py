"""Several API processes on one port, with one engine."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest


@pytest.fixture(scope="module")
def pair(model_folder, tmp_path_factory, tools):
    made = tools.settings(model_folder, {"step_s": 0.02}, shutdown_timeout_s=20)
    server = tools.Server(tmp_path_factory.mktemp("pair"), made, workers=2)
    try:
        yield server.ready()
    finally:
        server.clean_up()


def owner_of(server, stream) -> int:
    """The API worker that holds a connection."""
    ours, theirs = (
        address[1] for address in (stream.socket.getsockname(), stream.socket.getpeername())
    )
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    # By both ports, and established: a connection of before that waits for its end may have one.
    (inode,) = (
        line[9]
        for line in lines
        if line[3] == "01" and (line[1][-5:], line[2][-5:]) == (f":{theirs:04X}", f":{ours:04X}")
    )
    for pid in server.api_workers:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if os.readlink(descriptor) == f"socket:[{inode}]":
                    return pid
            except OSError:
                continue
    raise AssertionError("no worker holds the connection")


def on_both(server, stream) -> dict:
    """A running stream at each worker: while one is stopped, the other one takes what comes."""
    first, second = stream(server), None
    first.until(b'"text":"a"')
    owner = owner_of(server, first)
    os.kill(owner, signal.SIGSTOP)
    try:
        second = stream(server)
        second.until(b'"text":"a"')
    finally:
        os.kill(owner, signal.SIGCONT)
    return {owner: first, owner_of(server, second): second}


def test_no_worker_has_torch_and_they_share_one_engine(pair):
    assert len(pair.api_workers) == 2
    for pid in (pair.pid, *pair.api_workers):
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    assert "torch" in Path(f"/proc/{pair.engine}/maps").read_text()


def test_many_at_once_get_their_own_answers(pair):
    def ask(count: int) -> int:
        answer = pair.post(max_tokens=count, prompt="x" * count).json()
        assert answer["usage"]["prompt_tokens"] == count
        return answer["choices"][0]["text"].count("a")

    with ThreadPoolExecutor(8) as pool:
        counts = [1 + number % 7 for number in range(32)]
        assert list(pool.map(ask, counts)) == counts


def test_a_workers_death_ends_its_requests_only(pair, stream, tools):
    running = on_both(pair, stream)
    tools.until(lambda: pair.metrics()["num_running"] == 2)
    (dead, cut), (other, kept) = running.items()
    os.kill(dead, signal.SIGKILL)
    tools.until(lambda: pair.metrics()["num_running"] == 1, 20)
    assert b"[DONE]" not in cut.rest()
    before = kept.received.count(b'"text":"a"')
    kept.until(b'"text":"a"')
    tools.until(lambda: len(set(pair.api_workers) - {dead}) == 2, 60)
    while kept.received.count(b'"text":"a"') < before + 5:
        more = kept.socket.recv(65536)
        assert more, "it goes on"
        kept.received += more
    assert other in pair.api_workers
    kept.close()
    pair.line("API process .* ended .SIGKILL.")
    tools.until(lambda: pair.metrics()["num_running"] == 0, 20)
    assert pair.post(max_tokens=2).status_code == 200


def test_a_signal_drains_all_workers(start, stream, tools):
    server = start(workers=2, shutdown_timeout_s=30)
    engine, workers = server.engine, server.api_workers
    running = stream(server, max_tokens=60)
    running.until(b'"text":"a"')
    for pid in (server.pid, engine, *workers):  # as a service manager does
        os.kill(pid, signal.SIGTERM)
    assert running.rest().count(b'"text":"a"') == 60
    assert server.ended() == 0
    server.assert_nothing_left(engine, *workers)
    assert server.lines[-1] == "stopped"
    assert not [line for line in server.lines if "Traceback" in line]


@pytest.mark.slow
def test_workers_and_engine_end_with_the_supervisor(start):
    server = start(workers=2)
    left = [server.engine, *server.api_workers]
    server.process.kill()
    server.assert_nothing_left(*left)


@pytest.mark.slow
def test_all_workers_hear_of_a_dead_engine_and_of_the_next(start, stream, tools):
    server = start(workers=2, restart_engine=True)
    running = on_both(server, stream)
    os.kill(server.engine, signal.SIGKILL)
    for each in running.values():
        assert b"killed by SIGKILL" in each.rest()
    assert server.health().status_code == 503

    def healthy() -> bool:
        return all(server.health().status_code == 200 for _ in range(6))

    tools.until(healthy, 60)
    with httpx.Client() as client:
        for _ in range(6):
            body = {"prompt": "hello", "max_tokens": 2}
            assert client.post(f"{server.url}/v1/completions", json=body).status_code == 200
    assert server.stop() == 0


@pytest.mark.slow
def test_an_engine_that_does_not_start_ends_them_all(start):
    server = start(workers=2, executor={"load_exit": True}, wait=False)
    assert server.ended() == 1
    assert any("the engine did not start" in line for line in server.lines)
    server.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_tokenizer_that_is_missing_ends_them_all(start, model_folder, tmp_path, workers):
    (tmp_path / "config.json").write_text((model_folder / "config.json").read_text())
    server = start(workers=workers, source=tmp_path, wait=False)
    assert server.ended() == 1
    assert "comes without tokenizer files" in server.lines[-1]
    server.assert_nothing_left()


@pytest.mark.slow
def test_an_unknown_plugin_is_named_with_its_line(start):
    server = start(executor={"no_such_option": 1}, wait=False)
    assert server.ended() == 1
    assert "config.yaml:" in server.lines[-1]
    assert "no_such_option" in server.lines[-1]
