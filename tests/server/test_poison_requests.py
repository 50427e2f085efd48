"""One real server gets bad requests, and after each of them the greedy answer of a control request
must be what it was at the start. Every bad value is in test_poison_values.py."""

from __future__ import annotations

import json
import socket
import threading

import httpx
import pytest

from octavo.server.openai.protocol.chat import ChatRequest
from octavo.server.openai.protocol.completions import CompletionRequest

from .poison import BASE, BODIES, CHAT, GRAMMARS, LIMITS, TEXT, cases, check, filled, samples


@pytest.mark.parametrize(("path", "name", "value"), list(samples()))
def test_values(real_server, path, name, value):
    body = BASE[path] | {name: filled(value, real_server.vocab)}
    param = None if name in LIMITS else name
    check(real_server.client.post(path, json=body), param=param)
    real_server.check_control()


@pytest.mark.parametrize("name", ["deep", "deep and open", "surrogate", "not UTF-8"])
def test_bodies_that_are_no_json_object(real_server, name):
    headers = {"content-type": "application/json"}
    check(real_server.client.post(TEXT, content=BODIES[name], headers=headers))
    real_server.check_control()


@pytest.mark.parametrize("name", ["deep regex", "schema nested 300 deep"])
def test_bad_grammars(real_server, name):
    check(real_server.client.post(CHAT, json=BASE[CHAT] | GRAMMARS[name]))
    real_server.check_control()


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_0_is_the_same_400_each_time(real_server, stream):
    for path in (TEXT, CHAT):
        body = BASE[path] | {"max_tokens": 0, "stream": stream}
        answers = [real_server.client.post(path, json=body) for _ in range(3)]
        errors = [check(answer, param="max_tokens") for answer in answers]
        assert errors[0] == errors[1] == errors[2]
        real_server.check_control()
    echoed = BASE[TEXT] | {"max_tokens": 0, "echo": True}
    answer = real_server.client.post(TEXT, json=echoed).json()
    assert answer["choices"][0]["text"] == "hi"
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_too_long_and_the_exact_fit(real_server, stream):
    base = {"stream": stream, "ignore_eos": True, "temperature": 0}
    for length, limit, status in (
        (100, 28, 200),
        (100, 29, 400),
        (127, None, 200),
        (128, None, 400),
        (1000, 1, 400),
        (128, 1, 400),
    ):
        body = base | {"prompt": [65] * length, "max_tokens": limit}
        answer = real_server.client.post(TEXT, json=body)
        if status == 200:
            assert answer.status_code == 200, answer.text
            continue
        error = check(answer, param="prompt")
        assert error["code"] == "context_length_exceeded"
        assert str(length) in error["message"]
        assert "128" in error["message"]
        real_server.check_control()
    exact = real_server.client.post(
        TEXT, json={**base, "stream": False, "prompt": [65] * 100, "max_tokens": 28}
    ).json()
    assert exact["usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 28,
        "total_tokens": 128,
        "prompt_tokens_details": exact["usage"]["prompt_tokens_details"],
    }
    long_chat = BASE[CHAT] | {"messages": [{"role": "user", "content": "word " * 400}]}
    assert "128" in check(real_server.client.post(CHAT, json=long_chat))["message"]


@pytest.mark.parametrize(("path", "cls"), [(TEXT, CompletionRequest), (CHAT, ChatRequest)])
def test_an_explicit_null_is_the_default(real_server, path, cls):
    base = BASE[path] | {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    expected = real_server.client.post(path, json=base).json()["choices"]
    for name in cls.model_fields:
        if name not in base:
            answer = real_server.client.post(path, json=base | {name: None})
            assert answer.json().get("choices") == expected, (name, answer.text)


# ---- HTTP itself --------------------------------------------------------------------------------


def test_bodies_over_the_limit(real_server):
    def pieces(count):
        yield from (b"x" * 65536 for _ in range(count))

    headers = {"content-type": "application/json"}
    for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
        for content in (b"x" * (40 << 20), pieces(17), pieces(640)):
            answer = real_server.client.post(path, content=content, headers=headers)
            assert check(answer, 413)["code"] == "request_too_large"
        real_server.check_control()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
    ],
)
def test_types_of_bodies(real_server, headers, status):
    for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
        check(real_server.client.post(path, content=b"{}", headers=headers), status)
    real_server.check_control()


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
def test_methods(real_server, method):
    answer = real_server.client.request(method, TEXT)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    real_server.check_control()


POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
RAW = {
    "no HTTP": b"hello\r\n\r\n",
    "binary": bytes(range(256)) * 4,
    "a version of its own": b"GET /health HTTP/9.9\r\nhost: x\r\n\r\n",
    "a negative length": POST + b"content-length: -1\r\n\r\n",
    "two lengths": (POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n"),
    "a bad chunk": (POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n"),
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "a header without an end": b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 200_000,
    "many headers": (
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x: " + b"y" * 100 + b"\r\n" * 2000 + b"\r\n"
    ),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,
}


def exchange(connection: socket.socket, data: bytes) -> str:
    """What the server answers; "" where it hung up before it had read all of it.

    Every call may find the connection gone then (reset, a broken pipe, not connected any more); a
    server that just keeps silent is a failure.
    """
    try:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(65536).decode("latin-1")
    except TimeoutError:
        raise
    except OSError:
        return ""


@pytest.mark.parametrize("name", RAW)
def test_what_is_no_http(real_server, name):
    host, port = real_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        first = exchange(connection, RAW[name])
    assert not first or int(first.split()[1]) < 500
    real_server.check_control()


def test_a_body_that_never_ends_holds_nobody_up(real_server):
    host, port = real_server.url.removeprefix("http://").split(":")
    head = POST + b"content-length: 100\r\n\r\n{"
    held = [socket.create_connection((host, int(port)), timeout=60) for _ in range(20)]
    try:
        for connection in held:
            connection.sendall(head)
        real_server.check_control()
    finally:
        for connection in held:
            connection.close()
    real_server.check_control()


# ---- others while it happens --------------------------------------------------------------------


def test_a_stream_beside_all_this_is_what_it_is_alone(real_server):
    body = {"prompt": [66, 67], "temperature": 0, "max_tokens": 100, "ignore_eos": True}
    alone = real_server.client.post(TEXT, json=body | {"return_token_ids": True}).json()
    expected = alone["choices"][0]["token_ids"]
    got: list[list[int]] = []

    def listen():
        streamed = {**body, "stream": True, "return_token_ids": True}
        with httpx.stream("POST", real_server.url + TEXT, json=streamed, timeout=60) as answer:
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
        events = [json.loads(line) for line in lines]
        got.append([t for event in events for c in event["choices"] for t in c["token_ids"]])

    listeners = [threading.Thread(target=listen) for _ in range(3)]
    for listener in listeners:
        listener.start()
    for path, name, value in (item.values for item in cases()):
        body = BASE[path] | {name: filled(value, real_server.vocab)}
        assert real_server.client.post(path, json=body).status_code == 400
        if not any(listener.is_alive() for listener in listeners):
            break
    for listener in listeners:
        listener.join(60)
    assert got == [expected] * 3


def test_nothing_is_left_of_it(real_server):
    real_server.idle()
    assert not [line for line in real_server.lines if "Traceback" in line]
