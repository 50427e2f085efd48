"""Requests that must be refused, and `check` of the answer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from octavo.server.app.routes import OPERATIONS

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


def samples():
    """One value of each number, over the endpoints in turn, and of each parameter that only one
    endpoint has."""
    for index, (name, values) in enumerate(NUMBERS.items()):
        yield pytest.param(PATHS[index % len(PATHS)], name, values[0], id=name)
    for path in PATHS:
        for name, values in ONLY[path].items():
            yield pytest.param(path, name, values[0], id=f"{path[4:8]}-{name}")


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
