"""The poison sweep: one real server gets every bad request, and after each of them the greedy
answer of a control request must be what it was at the start."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import httpx
import pytest

from octavo.server.openai.protocol.chat import ChatRequest
from octavo.server.openai.protocol.completions import CompletionRequest
from octavo.server.operations.routes import OPERATIONS

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
BASE: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "hi", "max_tokens": 2},
    CHAT: {"messages": HI, "max_tokens": 2},
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
}
HUGE = 2**70
TOKEN_IDS = [-1, "VOCAB", 2**31, HUGE, 1.5, "a", None, True]
"""No token ids; `VOCAB` stands for the first id past the vocabulary."""

NUMBERS: dict[str, list[Any]] = {
    "temperature": [-0.1, 100.5, 999999, "hot", True, [1]],
    "top_p": [0, -1, 1.0001, "x"],
    "top_k": [-2, 1.5, 2**40, HUGE, "x"],
    "min_p": [-0.1, 1.1],
    "n": [0, -1, 9, 1000000, HUGE, 1.0, "2", True],
    "seed": [HUGE, -HUGE, 1.5, "x"],
    "max_tokens": [-1, 1.5, 10**9, HUGE, "5", True],
    "min_tokens": [-1, 3, HUGE, 1.5],
    "presence_penalty": [2.1, -2.1, 1e30],
    "frequency_penalty": [2.1, -2.1, 1e30],
    "repetition_penalty": [0, -1, 1e30],
    "truncate_prompt_tokens": [0, -2, 129, HUGE],
    "priority": [HUGE, -HUGE, 1.5, "high"],
    "prompt_logprobs": [-1, 6, 1000000, HUGE],
}
OTHERS: dict[str, list[Any]] = {
    "stop": [5, "", [""], [1], [None], [["a"]], {}],
    "stop_token_ids": [5, *([item] for item in TOKEN_IDS)],
    "allowed_token_ids": [[], 5, *([item] for item in TOKEN_IDS)],
    "bad_words": ["x", [""], [5], [None]],
    "logit_bias": [
        [1],
        {"99999999": 5},
        {"-1": 1},
        {"x": 1},
        {"": 1},
        {"1.0": 1},
        {"9" * 400: 1},
        {"VOCAB": 1},
        {"1": 100.1},
        {"1": -101},
        {"1": "x"},
        {"1": None},
    ],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}, [], "x"],
    "user": [5, ["a"]],
    "cache_salt": ["", 5],
    "request_id": ["", "a b", "a\nb", "ü", "x" * 257],
    "ignore_eos": ["no", 0],
    "skip_special_tokens": ["no"],
    "return_token_ids": [1],
    "add_special_tokens": ["x"],
    "model": [5],
}
ONLY: dict[str, dict[str, list[Any]]] = {
    TEXT: {
        "logprobs": [-1, 6, 1000000, HUGE, 1.5, True, "x"],
        "echo": ["x", 1],
        "prompt": [
            "",
            [],
            [[]],
            [""],
            ["a", ""],
            ["a", [1]],
            [[1], "a"],
            {},
            5,
            None,
            *([item] for item in TOKEN_IDS if item not in ("a", None)),
            *([1, item] for item in TOKEN_IDS),
            *([[1], [item]] for item in TOKEN_IDS),
            ["a"] * 5000,
        ],
    },
    CHAT: {
        "top_logprobs": [5],
        "logprobs": [5, "x"],
        "max_completion_tokens": [-1, 0, 1.5, HUGE],
        "messages": [
            [],
            None,
            "hi",
            {},
            [5],
            [{}],
            [{"content": "hi"}],
            [{"role": 5, "content": "hi"}],
            [{"role": "", "content": "hi"}],
            [{"role": "user", "content": 5}],
            [{"role": "user", "content": [5]}],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "user", "content": [{"type": "text", "text": 5}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            [{"role": "assistant", "tool_calls": 5}],
            [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}],
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}],
                }
            ],
        ],
        "chat_template": ["{{ 1 }}", "{% for x in range(10**9) %}{% endfor %}"],
        "chat_template_kwargs": [[], "x"],
        "tools": [{}, ["x"], [{"type": "function"}]],
    },
    RESPONSES: {
        "max_output_tokens": [-1, 0, 1.5, HUGE],
        "input": ["", [], None, 5, {}, [5], [{}], [{"role": "user", "content": 5}]],
        "instructions": [5, ["x"]],
        "metadata": [5, {"a": 1}, {"a": "x" * 600}],
        "include": ["x", ["file_search_call.results"]],
        "text": [5, {"format": {"type": "yaml"}}, {"format": {"type": "json_schema"}}],
        "top_logprobs": [-1, 6, 1000000],
        "tools": [{}, ["x"], [{"type": "web_search"}]],
        "tool_choice": ["x", {"type": "function", "name": "f"}],
        "previous_response_id": ["resp_1"],
    },
}
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
SERVED = {operation.path for operation in OPERATIONS}
PATHS = [path for path in BASE if path in SERVED]


def cases():
    """(path, parameter, value) of every bad value."""
    for path in PATHS:
        for table in (NUMBERS, OTHERS, ONLY[path]):
            for name, values in table.items():
                for value in values:
                    yield pytest.param(path, name, value, id=f"{path[4:8]}-{name}-{value!r:.30}")


def filled(value: Any, vocab: int) -> Any:
    """With the first id past the vocabulary where `VOCAB` is."""
    if isinstance(value, list):
        return [filled(item, vocab) for item in value]
    if isinstance(value, dict):
        return {key.replace("VOCAB", str(vocab)): item for key, item in value.items()}
    return vocab if value == "VOCAB" else value


def check(answer: httpx.Response, status: int = 400, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object, with this status and, if given, this param."""
    assert answer.status_code == status, answer.text[:500]
    error = answer.json()["error"]
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert len(error["message"]) < 2000
    assert error["type"] == "invalid_request_error"
    assert error["code"]
    if param is not None:
        assert error["param"] is not None, error
        assert error["param"].partition(".")[0].partition("[")[0] == param, error
    return error


@pytest.mark.parametrize(("path", "name", "value"), list(cases()))
def test_values(real_server, path, name, value):
    body = BASE[path] | {name: filled(value, real_server.vocab)}
    # What is too much together with the prompt is told of either.
    param = None if name in LIMITS else name
    check(real_server.client.post(path, json=body), param=param)
    real_server.check_control()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", [*NUMBERS, "logit_bias"])
@pytest.mark.parametrize("written", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_none(real_server, path, name, written):
    value = f'{{"1": {written}}}' if name == "logit_bias" else written
    text = json.dumps(BASE[path] | {name: "HERE"}).replace('"HERE"', value)
    headers = {"content-type": "application/json"}
    check(real_server.client.post(path, content=text, headers=headers))
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


SURROGATE = "\\ud800"
BODIES = {
    "empty": b"",
    "blank": b"  \n",
    "cut off": b'{"prompt": "x"',
    "no object": b'["prompt"]',
    "text": b'"prompt"',
    "null": b"null",
    "two": b'{"prompt": "x"}{"prompt": "y"}',
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "control character": b'{"prompt": "a\x01b"}',
    "comment": b'{"prompt": "x" /* why */}',
    "single quotes": b"{'prompt': 'x'}",
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep and open": b"[" * 500_000,
    "surrogate": f'{{"prompt": "{SURROGATE}"}}'.encode(),
    "surrogate in a stop": f'{{"prompt": "x", "stop": "{SURROGATE}"}}'.encode(),
    "surrogate in a name": f'{{"prompt": "x", "{SURROGATE}": 1}}'.encode(),
    "surrogate in a message": (
        f'{{"messages": [{{"role": "user", "content": "a{SURROGATE}b"}}]}}'.encode()
    ),
    "surrogate in a user": f'{{"prompt": "x", "user": "{SURROGATE}"}}'.encode(),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_json_object(real_server, path, name):
    headers = {"content-type": "application/json"}
    check(real_server.client.post(path, content=BODIES[name], headers=headers))
    real_server.check_control()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"messages": []}, 400),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, 400),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [HUGE]}, 400),
        ("/detokenize", {"tokens": ["a"]}, 400),
        ("/detokenize", {"tokens": 5}, 400),
        (TEXT, {"prompt": "x", "model": "other"}, 404),
        (CHAT, {"messages": HI, "model": "other"}, 404),
        (
            CHAT,
            {"messages": HI, "add_generation_prompt": True, "continue_final_message": True},
            400,
        ),
        (CHAT, {"messages": HI, "top_logprobs": 2}, 400),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 6}, 400),
        (TEXT, {"prompt": ["x"] * 1000, "n": 8}, 400),
        (TEXT, {"prompt": "x", "stream": True, "prompt_logprobs": 1}, 400),
        ("/v1/nothing", {}, 404),
    ],
)
def test_other_mistakes(real_server, path, body, status):
    check(real_server.client.post(path, json=body), status)
    real_server.check_control()


NESTED: Any = {"type": "object"}
for _ in range(300):
    NESTED = {"type": "object", "properties": {"a": NESTED}, "required": ["a"]}
GRAMMARS: dict[str, dict[str, Any]] = {
    "regex that is none": {"structured_outputs": {"regex": "(["}},
    "deep regex": {"structured_outputs": {"regex": "(" * 5000}},
    "regex that is no text": {"structured_outputs": {"regex": 5}},
    "empty choice": {"structured_outputs": {"choice": []}},
    "grammar that is none": {"structured_outputs": {"grammar": "root := ((("}},
    "two at once": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    "schema that is none": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "nothing"}},
        }
    },
    "schema nested 300 deep": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NESTED}}
    },
    "response_format of no kind": {"response_format": {"type": "yaml"}},
    "response_format that is no object": {"response_format": "json"},
}


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_bad_grammars(real_server, path, name):
    check(real_server.client.post(path, json=BASE[path] | GRAMMARS[name]))
    real_server.check_control()


UNSUPPORTED = [
    (path, name)
    for path, cls in ((TEXT, CompletionRequest), (CHAT, ChatRequest))
    for name in cls.unsupported
]


@pytest.mark.parametrize(("path", "name"), UNSUPPORTED)
def test_known_and_unsupported_parameters_are_refused_by_name(real_server, path, name):
    answer = real_server.client.post(path, json=BASE[path] | {name: {"something": "else"}})
    error = check(answer, param=name)
    assert name in error["message"]
    assert error["code"] == "unsupported_parameter"
    assert real_server.client.post(path, json=BASE[path] | {name: None}).status_code == 200
    real_server.check_control()


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
