"""Kill tests: every promise about the life of API and engine process, over HTTP."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

RAISE, KILL, HANG = 250, 251, 252


def test_the_api_process_has_no_torch_and_one_port(shared):
    assert shared.post(max_tokens=3).json()["choices"][0]["text"] == "aaa"
    assert "torch" not in Path(f"/proc/{shared.pid}/maps").read_text()
    assert shared.engine not in (shared.pid, os.getpid())
    inodes = {}
    for pid in (shared.pid, shared.engine):
        names = []
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                names.append(os.readlink(descriptor))
            except OSError:
                continue
        inodes[pid] = {name[8:-1] for name in names if name.startswith("socket:[")}
    listening = {
        line.split()[9]: line.split()[1]
        for table in ("tcp", "tcp6", "udp", "udp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" or table.startswith("udp")
    }
    assert not inodes[shared.engine] & set(listening)
    assert len(inodes[shared.pid] & set(listening)) == 1


def test_the_socket_folder_is_private(shared):
    (folder,) = shared.sockets.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [item.name for item in folder.iterdir()] == ["engine.sock"]


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT]
)
def test_a_signal_ends_both_processes_without_a_trace(start, number):
    server = start()
    engine = server.engine
    assert server.post(max_tokens=2).status_code == 200
    assert server.stop(number) == 0
    server.assert_nothing_left(engine)
    assert server.lines[-1] == "stopped"
    assert not [line for line in server.lines if "Traceback" in line or "rror" in line]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_while_the_engine_loads(start, number):
    server = start(executor={"load_s": 60}, wait=False)
    server.line("listening on")
    engine = server.engine
    assert server.stop(number) == 0
    server.assert_nothing_left(engine)
    assert not [line for line in server.lines if "Traceback" in line]


@pytest.mark.slow
def test_signals_to_all_processes_and_a_second_one(start, stream):
    """As a terminal or a service manager sends them; the second ends the waiting."""
    server = start(shutdown_timeout_s=60)
    engine = server.engine
    running = stream(server)
    running.until(b'"text":"a"')
    for pid in (engine, server.pid):
        os.kill(pid, signal.SIGINT)
    server.line("1 requests may finish")
    time.sleep(0.3)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    assert b'"code":"server_stopping"' in running.rest().replace(b'": "', b'":"')
    assert server.ended() == 0
    server.assert_nothing_left(engine)
    assert not [line for line in server.lines if "Traceback" in line]


def test_what_runs_may_finish_and_what_comes_is_refused(start, stream, tools):
    """One goes on until all has been seen; another finishes meanwhile."""
    server = start(shutdown_timeout_s=120)
    engine = server.engine
    long, running = stream(server), stream(server, max_tokens=100)
    for each in (long, running):
        each.until(b'"text":"a"')
    server.process.send_signal(signal.SIGTERM)
    server.line("requests may finish")
    refused = server.post(max_tokens=1)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert server.health().status_code == 503
    assert running.rest().count(b'"text":"a"') == 100
    assert b"[DONE]" in running.received
    assert server.process.poll() is None
    long.close()
    assert server.ended() == 0
    server.assert_nothing_left(engine)


@pytest.mark.slow
def test_what_takes_too_long_is_aborted_with_an_error(start, stream):
    server = start(shutdown_timeout_s=0.3)
    engine = server.engine
    running = stream(server)
    running.until(b'"text":"a"')
    server.process.send_signal(signal.SIGTERM)
    last = running.rest()
    assert b"server_stopping" in last
    assert b"[DONE]" not in last
    assert server.ended() == 0
    server.assert_nothing_left(engine)


def test_the_engine_ends_with_its_parent(start):
    server = start()
    engine = server.engine
    server.process.kill()
    server.assert_nothing_left(engine)


@pytest.mark.slow
def test_an_engine_that_holds_the_interpreter_ends_with_its_parent(start):
    """Stopped in C: no thread of Python gets to run, the kernel does it."""
    server = start(executor={"freeze_token": 249})
    engine = server.engine
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": [249]}, timeout=1)
    server.process.kill()
    before = time.monotonic()
    while Path(f"/proc/{engine}").exists() and time.monotonic() - before < 2.5:
        time.sleep(0.02)
    assert not Path(f"/proc/{engine}").exists()


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (KILL, "killed by SIGKILL"),
        pytest.param(RAISE, "RuntimeError: the prompt asked for it", marks=pytest.mark.slow),
        pytest.param(HANG, "did not answer for 1.5 s", marks=pytest.mark.slow),
    ],
)
def test_a_dead_engine(start, stream, token, reason):
    server = start(**({"engine_timeout_s": 1.5} if token == HANG else {}))
    engine = server.engine
    running = stream(server)
    running.until(b'"text":"a"')
    breaking = server.post(prompt=[token])
    assert breaking.status_code == 503
    assert reason in breaking.json()["error"]["message"]
    last = running.rest()
    assert b"engine_dead" in last
    assert reason.encode() in last
    assert b"[DONE]" not in last
    assert server.health().status_code == 503
    assert reason in server.health().json()["error"]["message"]
    assert server.post(max_tokens=1).status_code == 503
    server.assert_nothing_left(engine)
    assert server.stop() == 0


def test_a_killed_engine_is_started_again(start, stream):
    server = start(restart_engine=True)
    first = server.engine
    running = stream(server)
    running.until(b'"text":"a"')
    os.kill(first, signal.SIGKILL)
    assert b"it is started again" in running.rest()
    deadline = time.monotonic() + 60
    while server.health().status_code == 503:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    second = server.engine
    assert second != first
    assert server.post(max_tokens=2).json()["choices"][0]["text"] == "aa"
    assert len(list(server.sockets.iterdir())) == 1
    assert server.stop() == 0
    server.assert_nothing_left(first, second)


def test_an_engine_that_ends_while_it_loads(start):
    server = start(executor={"load_exit": True}, restart_engine=True, wait=False)
    assert server.ended() == 1
    assert "ended with status 3 while it started" in server.lines[-1]
    server.assert_nothing_left()


@pytest.mark.slow
def test_an_idle_server_uses_no_processor_time(shared):
    assert shared.post(max_tokens=2).status_code == 200
    ticks = os.sysconf("SC_CLK_TCK")

    def used() -> float:
        total = 0
        for pid in (shared.pid, shared.engine):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / ticks

    time.sleep(0.5)
    before = used()
    time.sleep(10)
    assert used() - before < 0.1, "one per cent of a core"


@pytest.mark.slow
def test_health_answers_while_a_long_prompt_is_tokenized(shared):
    text = "the quick brown fox jumps over it. " * 150_000  # 5.2 MB
    with ThreadPoolExecutor(1) as pool:
        # Without the limit it would be refused for its length, without being tokenized.
        long = pool.submit(shared.post, prompt=text, truncate_prompt_tokens=4, max_tokens=1)
        count = 0
        while not long.done():
            assert shared.health().status_code == 200
            count += 1
        answer = long.result()
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 4
    assert count > 3
