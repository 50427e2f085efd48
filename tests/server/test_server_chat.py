from __future__ import annotations

import asyncio
import json

import pytest

ANSWER = "Grüße 😀, ok."
PATH = "/v1/chat/completions"


def run(coroutine):
    return asyncio.run(coroutine)


async def post(connect, llm, body, path=PATH, **server):
    async with connect(llm, **server) as client:
        return await client.post(path, json=body)


def user(text):
    return {"messages": [{"role": "user", "content": text}]}


def chat(connect, llm, body, **server):
    response = run(post(connect, llm, body, **server))
    assert response.status_code == 200, response.text
    return response.json()


def stream(connect, llm, body):
    response = run(post(connect, llm, {**body, "stream": True}))
    assert response.status_code == 200, response.text
    pieces = response.text.split("\n\n")
    assert pieces[-2:] == ["data: [DONE]", ""]
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces[:-2]]


def test_answer(connect, fake):
    answer = chat(connect, fake, {"model": "alias", **user("hi")})
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "alias"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt = "user\nhi\nassistant\n"
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == len(ANSWER.encode()) + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert fake.calls[0].prompt["prompt"] == prompt


@pytest.mark.parametrize("n", [1, 2])
def test_stream_has_role_once_deltas_and_one_finish_reason(connect, fake, n):
    chunks = stream(connect, fake, {**user("hi"), "n": n})
    for index in range(n):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert "".join(choice["delta"].get("content", "") for choice in choices) == ANSWER
        finishes = [choice["finish_reason"] for choice in choices]
        assert finishes == [None] * (len(choices) - 1) + ["stop"]
        assert choices[-1]["delta"] == {}
    assert all("usage" not in chunk for chunk in chunks)


def test_stream_usage_equals_the_answers(connect, fake):
    whole = chat(connect, type(fake)(), {**user("hi"), "n": 2})
    options = {"stream_options": {"include_usage": True}, "n": 2}
    chunks = stream(connect, fake, {**user("hi"), **options})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_empty_stream_options_send_no_usage(connect, fake):
    chunks = stream(connect, fake, {**user("hi"), "stream_options": {}})
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("streaming", [False, True])
def test_joined_bytes_are_the_contents_bytes(connect, fake, streaming):
    body = {**user("hi"), "logprobs": True, "top_logprobs": 2}
    if streaming:
        parts = [c["choices"][0]["logprobs"] for c in stream(connect, fake, body)]
        content = [item for part in parts if part for item in part["content"]]
    else:
        content = chat(connect, fake, body)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(item["bytes"]) for item in content) == ANSWER.encode()
    assert len(content) == len(ANSWER.encode()) + 1, "the end token is counted and has no bytes"
    piece = content[ANSWER.encode().index(b"\x9f")]
    assert piece["token"] == "bytes:\\x9f"
    for item in content:
        assert len(item["top_logprobs"]) == 2
        assert all(other["token"] and other["bytes"] for other in item["top_logprobs"])
        values = [other["logprob"] for other in item["top_logprobs"]]
        assert values == sorted(values, reverse=True)


def test_logprobs_without_alternatives(connect, fake):
    body = {**user("hi"), "logprobs": True, "max_tokens": 1}
    (item,) = chat(connect, fake, body)["choices"][0]["logprobs"]["content"]
    assert item == {
        "token": "G",
        "logprob": pytest.approx(-1.3863, abs=1e-4),
        "bytes": [71],
        "top_logprobs": [],
    }
    assert fake.calls[0].params.logprobs == 0


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_limit_under_either_name(connect, fake, name):
    answer = chat(connect, fake, {**user("hi"), name: 3})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


def test_newer_name_wins(connect, fake):
    body = {**user("hi"), "max_tokens": 9, "max_completion_tokens": 2}
    assert chat(connect, fake, body)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([], ""),
        (None, ""),
    ],
)
def test_content_forms(connect, fake, content, text):
    messages = [
        {"role": "user", "content": content},
        {"role": "user", "content": "say:x"},
    ]
    chat(connect, fake, {"messages": messages})
    assert fake.calls[0].prompt["prompt"].startswith(f"user\n{text}\nuser")


def test_history_with_tool_calls(connect, fake):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "result"},
    ]
    chat(connect, fake, {"messages": messages})
    (seen,) = fake.conversations
    assert seen[1]["content"] == ""
    assert seen[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert seen[2] == {"role": "tool", "content": "result", "tool_call_id": "1"}


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "{" * 5000, "nul"])
def test_malformed_arguments_in_history_are_refused(connect, fake, arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    response = run(post(connect, fake, body))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages[0].tool_calls[0].function.arguments"
    assert len(error["message"]) < 300


def test_tools_with_choice_none_are_shown_to_the_template(connect, fake):
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat(connect, fake, {**user("hi"), "tools": tools, "tool_choice": "none"})
    assert fake.calls[0].prompt["prompt"].startswith("tools: 1\n")


def test_template_arguments(connect, fake):
    chat(connect, fake, {**user("hi"), "chat_template_kwargs": {"think": False}})
    assert fake.calls[0].prompt["prompt"].startswith("kwargs: [('think', False)]\n")


def test_continue_final_message_alone_is_enough(connect, fake):
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "Sure, "},
    ]
    chat(connect, fake, {"messages": messages, "continue_final_message": True})
    assert fake.calls[0].prompt["prompt"] == "user\nq\nassistant\nSure, "


def test_template_refuses_a_role(connect, fake):
    response = run(post(connect, fake, {"messages": [{"role": "wizard", "content": "x"}]}))
    assert response.status_code == 400
    assert "no wizards" in response.json()["error"]["message"]


def test_token_ids_and_prompt_logprobs(connect, fake):
    body = {**user("hi"), "return_token_ids": True, "max_tokens": 2}
    answer = chat(connect, fake, {**body, "prompt_logprobs": 0})
    assert answer["choices"][0]["token_ids"] == [71, 114]
    assert bytes(answer["prompt_token_ids"]) == b"user\nhi\nassistant\n"
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    chunks = stream(connect, type(fake)(), body)
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    ids = [token for c in chunks for token in c["choices"][0].get("token_ids", [])]
    assert ids == [71, 114]


def test_request_id_header(connect, fake):
    async def go():
        async with connect(fake) as client:
            for given, header, expected in (
                ("abc", {}, "chatcmpl-abc"),
                (None, {"x-request-id": "def"}, "chatcmpl-def"),
                ("abc", {"x-request-id": "def"}, "chatcmpl-abc"),
            ):
                body = {**user("hi"), "request_id": given}
                response = await client.post(PATH, json=body, headers=header)
                assert response.headers["x-request-id"] == expected == response.json()["id"]
            response = await client.post(PATH, json=user("hi"), headers={"x-request-id": "a b"})
            assert "a b" not in response.headers["x-request-id"]

    run(go())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
def test_hints_for_a_providers_records_have_no_effect(connect, fake, path, body):
    """Clients of OpenAI send them along; so they are not even told to be ignored."""
    hints = {
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "explicit"},
        "safety_identifier": "k",
        "metadata": {"a": "b"},
        "model": "",
    }

    async def go():
        async with connect(fake, unknown_parameters="refuse") as client:
            response = await client.post(path, json=body | hints)
        assert response.status_code == 200, response.text
        assert "x-octavo-ignored-parameters" not in response.headers

    run(go())


def test_accepted_values_are_named_as_json_has_them(connect, fake):
    response = run(post(connect, fake, {**user("hi"), "store": True}))
    assert response.json()["error"]["message"].endswith("(accepted: false)")


def test_open_choices_accept_what_asks_for_nothing(connect, fake):
    inert = {
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "audio": None,
        "functions": [],
    }
    chat(connect, fake, {**user("hi"), **inert})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("guided_json", {}),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": ""}),
        ("web_search_options", {}),
        ("verbosity", "low"),
        ("store", True),
        ("service_tier", "flex"),
        ("chat_template", "{{ x }}"),
        ("use_beam_search", True),
        ("echo", True),
    ],
)
def test_known_and_unsupported_is_refused_by_name(connect, fake, name, value):
    response = run(post(connect, fake, {**user("hi"), name: value}))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == name
    assert error["code"] == "unsupported_parameter"
    assert name in error["message"]
    assert fake.calls == []
