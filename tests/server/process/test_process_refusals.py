"""What the engine refuses, what its pool cannot hold, and what a service manager hears."""

from __future__ import annotations

import socket

import httpx
import pytest


@pytest.fixture(scope="module")
def small(model_folder, tmp_path_factory, tools):
    """A server whose pool holds 128 tokens."""
    made = tools.settings(model_folder, {})
    made["kv_cache"]["num_blocks"] = 8
    server = tools.Server(tmp_path_factory.mktemp("small"), made)
    try:
        yield server.ready()
    finally:
        server.clean_up()


@pytest.mark.parametrize("stream", [False, True])
def test_both_numbers_and_the_code_reach_the_client(small, stream):
    server = small

    def refusal(**body):
        answer = server.post(stream=stream, **body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "prompt")
        assert error["code"] == "context_length_exceeded"
        return error["message"]

    # By the engine: scoring a prompt computes one token more than is asked for.
    message = refusal(prompt=[65] * 128, max_tokens=0, echo=True, logprobs=1)
    assert "128 tokens and needs room for one more" in message
    assert "holds 128 tokens" in message
    message = refusal(prompt=[65] * 60, max_tokens=69)  # by the server, before
    assert "together 129" in message
    assert "holds 128 tokens" in message
    exact = server.post(prompt=[65] * 60, max_tokens=68, ignore_eos=True)
    assert exact.json()["usage"]["completion_tokens"] == 68
    rest = server.post(prompt=[65] * 60, ignore_eos=True)
    assert rest.json()["usage"]["completion_tokens"] == 68
    assert rest.json()["choices"][0]["finish_reason"] == "length"
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


@pytest.mark.parametrize("workers", [1, 2])
def test_a_service_manager_hears_ready_and_stopping(start, monkeypatch, tmp_path, workers):
    path = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.settimeout(60)
        server = start(workers=workers, wait=False)
        ready = manager.recv(1000).decode()
        assert ready.startswith("READY=1\nSTATUS=serving m on http://127.0.0.1:")
        assert httpx.get(ready.rpartition(" ")[2] + "/health", timeout=60).status_code == 200
        assert server.stop() == 0
        assert manager.recv(1000) == b"STOPPING=1"
