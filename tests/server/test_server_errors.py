"""A user's mistake is always a 4xx with an error object, and never touches another request."""

from __future__ import annotations

import asyncio
import json

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def run(coroutine):
    return asyncio.run(coroutine)


def check_error(response, status, param=None, code=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(error["message"]) < 400
    if param:
        assert error["param"] == param
    if code:
        assert error["code"] == code
    return error


async def control(client):
    """A request whose answer must not change whatever came before."""
    response = await client.post(COMPLETIONS, json={"prompt": "say:fine", "temperature": 0})
    assert response.json()["choices"][0]["text"] == "fine"


BAD_VALUES = [
    ("temperature", 999999),
    ("temperature", -1),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", -1),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 10**30),
    ("min_p", 2),
    ("n", 0),
    ("n", -1),
    ("n", 1000000),
    ("n", 1.0),
    ("seed", 2**70),
    ("seed", "x"),
    ("stop", 5),
    ("stop", [1]),
    ("stop", ""),
    ("stop", [""]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [259]),
    ("stop_token_ids", ["a"]),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", "5"),
    ("min_tokens", -1),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("logit_bias", {"99999999": 5}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"a": 5}),
    ("logit_bias", {"1": 500}),
    ("logit_bias", {"1": "x"}),
    ("logit_bias", [1]),
    ("allowed_token_ids", [259]),
    ("allowed_token_ids", []),
    ("bad_words", [""]),
    ("bad_words", "x"),
    ("priority", 2**40),
    ("user", 5),
    ("cache_salt", ""),
    ("request_id", "a b"),
    ("request_id", "x" * 500),
    ("stream", "yes"),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("truncate_prompt_tokens", 257),
    ("ignore_eos", "no"),
]


def test_values_out_of_range(connect, fake):
    async def sweep():
        async with connect(fake) as client:
            for path, base in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HI})):
                for name, value in BAD_VALUES:
                    response = await client.post(path, json={**base, name: value})
                    error = check_error(response, 400)
                    assert (error["param"] or "").startswith(name), (name, value, error)
                    assert error["type"] == "invalid_request_error"
                    await control(client)

    run(sweep())
    assert all(call.prompt["prompt"] == "say:fine" for call in fake.calls), "none got in"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[1], [2.5]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [259]}, "prompt"),
        ({"prompt": [[1], [10**30]]}, "prompt"),
        ({"prompt": ["x"] * 3000}, "prompt"),
        ({"prompt": ["x"] * 2000, "n": 100}, "n"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "logprobs": -1}, "logprobs"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x", "stream": True, "stream_options": 1}, "stream_options"),
        (
            {"prompt": "x", "stream": True, "stream_options": {"include_usage": 3}},
            "stream_options.include_usage",
        ),
        ({"prompt": "x", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "min_tokens": 10, "max_tokens": 5}, "min_tokens"),
        ({"prompt": "x", "min_tokens": 300}, "min_tokens"),
    ],
)
def test_completions(connect, fake, body, param):
    async def go():
        async with connect(fake) as client:
            check_error(await client.post(COMPLETIONS, json=body), 400, param)
            check_error(await client.post(COMPLETIONS, json=body), 400, param)
            await control(client)

    run(go())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["bare"]}]}, "messages[0].content"),
        ({"messages": HI, "best_of": 2}, "best_of"),
        ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 1000000}, "top_logprobs"),
        ({"messages": HI, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"messages": HI, "logprobs": 3}, "logprobs"),
        ({"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
        (
            {"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"messages": HI, "chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_chat(connect, fake, body, param):
    async def go():
        async with connect(fake) as client:
            check_error(await client.post(CHAT, json=body), 400, param)
            await control(client)

    run(go())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"{", "line 1 column"),
        (b'{"prompt": "x",\n "n" 1}', "line 2 column"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": Infinity}', "Infinity"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"temperature": 1e999}', "out of range"),
        (b'{"n": ' + b"9" * 5000 + b"}", "JSON: a number of 5000 digits is out of range"),
        (b'\xef\xbb\xbf{"n": 1}', "Unexpected UTF-8 BOM at line 1"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b"[" * 100000, "nested"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested"),
        (b"[1]", "object"),
        (b"null", "object"),
        (b'"x"', "object"),
    ],
)
def test_bad_json(connect, fake, path, content, words):
    async def go():
        async with connect(fake) as client:
            headers = {"content-type": "application/json"}
            response = await client.post(path, content=content, headers=headers)
            assert words in check_error(response, 400, code="invalid_json")["message"]
            await control(client)

    run(go())


def test_body_limit(connect, fake):
    async def chunks():
        for _ in range(3):
            yield b" " * 400

    async def go():
        async with connect(fake, max_body_bytes=1000) as client:
            headers = {"content-type": "application/json"}
            for content in (b" " * 1001, chunks()):
                response = await client.post(COMPLETIONS, content=content, headers=headers)
                check_error(response, 413, code="request_too_large")
            exact = json.dumps({"prompt": "say:fine"}).encode().ljust(1000)
            response = await client.post(COMPLETIONS, content=exact, headers=headers)
            assert response.status_code == 200

    run(go())


def test_content_type(connect, fake):
    async def go():
        async with connect(fake) as client:
            for headers in (
                {"content-type": "text/plain"},
                {"content-type": "application/json", "content-encoding": "gzip"},
            ):
                response = await client.post(COMPLETIONS, content=b"{}", headers=headers)
                check_error(response, 415)
            body = b'{"prompt": "x"}'
            assert (await client.post(COMPLETIONS, content=body)).status_code == 200
            headers = {"content-type": "application/json; charset=utf-8"}
            response = await client.post(COMPLETIONS, content=body, headers=headers)
            assert response.status_code == 200

    run(go())


def test_unknown_model(connect, fake):
    async def go():
        async with connect(fake) as client:
            for path, base in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HI})):
                response = await client.post(path, json={**base, "model": "gpt-9"})
                error = check_error(response, 404, "model", "model_not_found")
                assert "gpt-9" in error["message"]
                check_error(await client.post(path, json={**base, "model": 5}), 400, "model")

    run(go())


def test_context_length(connect, fake):
    async def go():
        async with connect(fake) as client:
            for ids, limit, status in (
                ([1] * 200, 56, 200),
                ([1] * 200, 57, 400),
                ([1] * 255, None, 200),
                ([1] * 256, None, 400),
                ([1] * 300, None, 400),
                ([1] * 300, 1, 400),
            ):
                body = {"prompt": ids, "max_tokens": limit}
                response = await client.post(COMPLETIONS, json=body)
                assert response.status_code == status, (len(ids), limit)
                if status == 400:
                    error = check_error(response, 400, "prompt", "context_length_exceeded")
                    assert str(len(ids)) in error["message"]
                    assert "256" in error["message"]
            await control(client)

    run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_far_too_long_is_not_tokenized(connect, fake, stream):
    text = "x" * 3000

    async def go():
        async with connect(fake) as client:

            async def refused(path, limit, param, **body):
                body |= {"stream": stream, limit: 9}
                error = check_error(await client.post(path, json=body), 400, param)
                assert error["code"] == "context_length_exceeded"
                return error["message"]

            message = await refused(COMPLETIONS, "max_tokens", "prompt", prompt=["a", text])
            assert message.startswith(
                "the prompt has at least 3000 tokens and max_tokens asks for 9, together at least "
                "3009, but max_model_len is 256"
            )
            chat = [{"role": "user", "content": text}]
            message = await refused(CHAT, "max_completion_tokens", "messages", messages=chat)
            assert "at least" in message
            assert "max_completion_tokens" in message
            await refused("/v1/responses", "max_output_tokens", "input", input=text)
            assert fake.inputs.characters == 0
            # What keeps the last tokens needs them all.
            kept = {"prompt": text + "end", "max_tokens": 2, "truncate_prompt_tokens": 5}
            assert (await client.post(COMPLETIONS, json=kept)).status_code == 200
            assert fake.calls[-1].prompt["prompt_token_ids"] == list(b"xxend")
            counted = (await client.post("/tokenize", json={"prompt": text})).json()
            assert counted["count"] == 3001
            await control(client)

    run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_pool_cannot_hold(connect, fakes, stream):
    async def go():
        fake = fakes.FakeAsyncLLM(pool=100)
        async with connect(fake) as client:
            for ids, limit, words in (
                ([1] * 60, 40, None),
                ([1] * 60, 41, ("60", "41", "together 101", "holds 100 tokens")),
                ([1] * 60, 300, ("60", "300", "together 360", "max_model_len is 256")),
                ([1] * 99, None, None),
                ([1] * 100, None, ("100 tokens", "one more", "holds 100 tokens")),
                ([1] * 120, 1, ("120", "together 121", "holds 100 tokens")),
            ):
                body = {"prompt": ids, "max_tokens": limit, "stream": stream}
                response = await client.post(COMPLETIONS, json=body)
                if words is None:
                    assert response.status_code == 200
                    assert fake.calls[-1].params.max_tokens == 100 - len(ids)
                else:
                    error = check_error(response, 400, "prompt", "context_length_exceeded")
                    assert all(word in error["message"] for word in words), error
            kept = {"prompt": [1] * 120, "max_tokens": 30, "truncate_prompt_tokens": -1}
            assert (await client.post(COMPLETIONS, json=kept)).status_code == 200
            assert len(fake.calls[-1].prompt["prompt_token_ids"]) == 70
            await control(client)

    run(go())


def test_engine_refusal_before_the_stream_has_a_status(connect, fake):
    async def go():
        async with connect(fake) as client:
            for streaming in (False, True):
                body = {"prompt": "refuse", "stream": streaming}
                error = check_error(await client.post(COMPLETIONS, json=body), 400, "prompt")
                assert error["message"] == "the pool is too small"
                assert error["code"] == "capacity"

    run(go())


def test_row_error(connect, fake):
    async def go():
        async with connect(fake) as client:
            response = await client.post(COMPLETIONS, json={"prompt": "row-error"})
            error = check_error(response, 400, code="invalid_value")
            assert error["message"] == "no token can be sampled"
            await control(client)

    run(go())


def test_a_request_that_a_plugin_failed_is_the_servers_fault(connect, fake):
    async def go():
        async with connect(fake) as client:
            response = await client.post(COMPLETIONS, json={"prompt": "row-fault"})
            error = check_error(response, 500, code="internal_error")
            assert error["type"] == "server_error"
            assert error["message"] == "logits processor 'bad' failed: ValueError: boom"
            await control(client)

    run(go())


@pytest.mark.parametrize("command", ["fail:3", "row-error", "row-fault"])
def test_error_in_mid_stream_is_the_last_event(connect, fake, command):
    async def go():
        async with connect(fake) as client:
            body = {"prompt": command, "stream": True, "n": 2}
            response = await client.post(COMPLETIONS, json=body)
            assert response.status_code == 200
            pieces = response.text.split("\n\n")
            assert "error" in json.loads(pieces[-2].removeprefix("data: "))
            assert "[DONE]" not in response.text
            assert "own trouble" not in response.text, "internals stay here"
            await control(client)

    run(go())


def test_unexpected_error_is_a_500_and_logged(connect, fake, caplog):
    async def go():
        async with connect(fake) as client:
            response = await client.post(COMPLETIONS, json={"prompt": "fail:0"})
            error = check_error(response, 500, code="internal_error")
            assert "own trouble" not in error["message"]
            assert "own trouble" in caplog.text
            response = await client.post(COMPLETIONS, json={"prompt": ["say:x", "fail:1"]})
            check_error(response, 500)
            assert len(fake.aborted) >= 1, "the other prompt is not left running"
            await control(client)

    run(go())


def test_routes(connect, fake):
    async def go():
        async with connect(fake) as client:
            check_error(await client.get("/v1/nope"), 404, code="not_found")
            response = await client.get(COMPLETIONS)
            check_error(response, 405, code="method_not_allowed")
            assert response.headers["allow"] == "POST"

    run(go())


@pytest.mark.parametrize("count", [100, 399, 400, 401, 3000])
def test_names_of_many_unknown_parameters_fit_into_a_header(count):
    from octavo.server.app.endpoint import names_header

    text = names_header([f"k{i}" for i in range(count)])
    assert len(text) <= 1010
    assert text == text.strip()
    assert text.endswith(f"k{count - 1}") or text.endswith(", ...")
    assert names_header(["x" * 5000, "ok"]) == "ok"
    assert names_header(["größe", "a b"]) == "?"
