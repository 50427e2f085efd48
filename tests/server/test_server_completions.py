from __future__ import annotations

import asyncio
import json

import pytest

ANSWER = "Grüße 😀, ok."
BOS = 256


def run(coroutine):
    return asyncio.run(coroutine)


async def post(connect, llm, path, body, **server):
    async with connect(llm, **server) as client:
        return await client.post(path, json=body)


def complete(connect, llm, body, **server):
    response = run(post(connect, llm, "/v1/completions", body, **server))
    assert response.status_code == 200, response.text
    return response.json()


def events(response):
    """The JSON of each event; asserts that the stream is well formed and ends with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    pieces = response.text.split("\n\n")
    assert pieces[-2:] == ["data: [DONE]", ""]
    assert all(piece.startswith("data: ") for piece in pieces[:-1])
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces[:-2]]


def stream(connect, llm, body, path="/v1/completions", **server):
    return events(run(post(connect, llm, path, {**body, "stream": True}, **server)))


def test_answer(connect, fake):
    answer = complete(connect, fake, {"model": "fake", "prompt": "x"})
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    size = len(ANSWER.encode()) + 1
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": size,
        "total_tokens": size + 2,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert fake.calls[0].params.temperature == 0.6, "the model's default"
    assert fake.calls[0].params.max_tokens == 254, "the rest of the context"
    assert fake.calls[0].prompt == {"prompt_token_ids": [BOS, ord("x")], "prompt": "x"}
    assert fake.closed


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompt_forms(connect, fake, prompt, ids):
    answer = complete(connect, fake, {"prompt": prompt, "n": 2, "max_tokens": 1})
    assert [call.prompt["prompt_token_ids"] for call in fake.calls] == ids
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(ids)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert answer["usage"]["completion_tokens"] == 2 * len(ids)


def test_prompts_keep_their_choices(connect, fake):
    prompts = ["say:one", "say:four", "say:seventeen"]
    answer = complete(connect, fake, {"prompt": prompts, "n": 2})
    assert [choice["text"] for choice in answer["choices"]] == [
        "one",
        "one",
        "four",
        "four",
        "seventeen",
        "seventeen",
    ]
    chunks = stream(connect, type(fake)(), {"prompt": prompts, "n": 2})
    texts: dict[int, str] = {}
    finishes: dict[int, list[str]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        if choice["finish_reason"]:
            finishes.setdefault(choice["index"], []).append(choice["finish_reason"])
    assert [texts[index] for index in range(6)] == [c["text"] for c in answer["choices"]]
    assert finishes == {index: ["stop"] for index in range(6)}


def test_stream_joins_to_the_answer_with_one_event_a_piece_of_text(connect, fake):
    chunks = stream(connect, fake, {"prompt": "x"})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER
    assert len(chunks) == len(ANSWER) + 1, "one a character, one for the end token"
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, None, {"include_usage": None}])
def test_no_usage_unless_asked_for(connect, fake, options):
    chunks = stream(connect, fake, {"prompt": "x", "stream_options": options})
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_usage_is_one_last_chunk_without_choices(connect, fake):
    body = {"prompt": ["x", "say:yes"], "n": 2}
    whole = complete(connect, type(fake)(), body)
    chunks = stream(connect, fake, {**body, "stream_options": {"include_usage": True}})
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]


def test_continuous_usage_grows_to_the_final_one(connect, fake):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(connect, fake, {"prompt": "say:yes", "stream_options": options})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {8}


def test_logprobs_zero_has_the_chosen_token(connect, fake):
    answer = complete(connect, fake, {"prompt": "x", "logprobs": 0, "max_tokens": 3})
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["G", "r", "bytes:\\xc3"]
    assert logprobs["token_logprobs"] == pytest.approx([-1.3863] * 3, abs=1e-4)
    assert [list(top) for top in logprobs["top_logprobs"]] == [["G"], ["r"], ["bytes:\\xc3"]]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert fake.calls[0].params.logprobs == 0


def test_logprobs_keep_byte_pieces_apart_and_offsets_count_characters(connect, fake):
    answer = complete(connect, fake, {"prompt": "say:ü😀.", "logprobs": 2})
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"][2:6] == [f"bytes:\\x{b:02x}" for b in "😀".encode()]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 1, 1, 2, 3]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])


def test_logprobs_of_a_stream_equal_those_of_the_answer(connect, fake):
    body = {"prompt": "say:aü😀z", "logprobs": 3, "echo": True}
    whole = complete(connect, type(fake)(), body)["choices"][0]
    joined: dict[str, list] = {}
    text = ""
    for chunk in stream(connect, fake, body):
        (choice,) = chunk["choices"]
        text += choice["text"]
        for name, items in (choice["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(items)
    assert text == whole["text"]
    assert joined == whole["logprobs"]


def test_minus_infinity_is_a_number(connect, fake):
    answer = complete(connect, fake, {"prompt": "x", "logprobs": 5, "max_tokens": 1})
    assert min(answer["choices"][0]["logprobs"]["top_logprobs"][0].values()) == -9999.0


def test_echo_alone_needs_no_engine(connect, fake):
    answer = complete(connect, fake, {"prompt": "abc", "echo": True, "max_tokens": 0, "n": 2})
    assert [(c["text"], c["finish_reason"]) for c in answer["choices"]] == [("abc", "length")] * 2
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == 4
    assert fake.calls == []


@pytest.mark.parametrize("streaming", [False, True])
def test_echo_with_logprobs_scores_every_prompt_token(connect, fake, streaming):
    body = {"prompt": "abc", "echo": True, "max_tokens": 0, "logprobs": 1}
    if streaming:
        (answer,) = stream(connect, fake, body)
    else:
        answer = complete(connect, fake, body)
        assert answer["usage"]["completion_tokens"] == 0
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "abc"
    assert logprobs["tokens"] == ["<s>", "a", "b", "c"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == [0, 0, 1, 2]
    assert fake.calls[0].params.max_tokens == 1
    assert fake.calls[0].params.prompt_logprobs == 1


def test_echo_of_token_ids(connect, fake):
    body = {"prompt": [97, 98], "echo": True, "max_tokens": 1}
    assert complete(connect, fake, body)["choices"][0]["text"] == "abG"
    chunks = stream(connect, type(fake)(), {**body, "max_tokens": 2, "n": 2})
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert texts == ["abG", "abG", "r", "r"], "the prompt once a choice"


def test_prompt_logprobs_and_token_ids(connect, fake):
    body = {"prompt": "ab", "prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 2}
    (choice,) = complete(connect, fake, body)["choices"]
    assert choice["token_ids"] == [ord("G"), ord("r")]
    assert choice["prompt_token_ids"] == [BOS, 97, 98]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["97"]["decoded_token"] == "a"
    assert choice["prompt_logprobs"][1]["97"]["rank"] == 2


def test_tokens_named_by_id(connect, fake):
    body = {"prompt": "x", "logprobs": 1, "max_tokens": 1, "return_tokens_as_token_ids": True}
    (choice,) = complete(connect, fake, body)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{ord('G')}"]
    assert set(choice["logprobs"]["top_logprobs"][0]) == {
        f"token_id:{ord('G')}",
        f"token_id:{ord('H')}",
    }


def test_every_parameter_reaches_the_engine(connect, fake):
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "n": 2,
        "seed": 7,
        "stop": ["END"],
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "min_tokens": 1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "allowed_token_ids": [1, 2],
        "bad_words": ["no"],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    extra = {
        "prompt": "x",
        "max_tokens": 2,
        "logit_bias": {"5": 1.5},
        "logprobs": 4,
        "user": "me",
        "priority": -3,
        "cache_salt": "salt",
        "request_id": "mine",
    }
    answer = complete(connect, fake, given | extra)
    (call,) = fake.calls
    for name, value in (given | {"top_k": 0}).items():
        assert getattr(call.params, name) == value, name
    assert call.params.logit_bias == {5: 1.5}
    assert call.params.logprobs == 4
    assert (call.user, call.priority, call.cache_salt) == ("me", -3, "salt")
    assert answer["id"] == "cmpl-mine"


def test_null_is_the_default(connect, fake):
    names = ["temperature", "top_p", "n", "seed", "stop", "max_tokens", "logit_bias", "logprobs"]
    names += ["echo", "stream", "stream_options", "user"]
    body = {"prompt": "x", **dict.fromkeys(names)}
    assert complete(connect, fake, body)["choices"][0]["text"] == ANSWER
    assert fake.calls[0].params.temperature == 0.6


def test_equal_request_ids_are_unique_in_the_engine(connect, fake):
    async def both():
        async with connect(fake) as client:
            body = {"prompt": ["x", "y"], "request_id": "same"}
            return await asyncio.gather(
                *(client.post("/v1/completions", json=body) for _ in range(2))
            )

    assert [r.json()["id"] for r in run(both())] == ["cmpl-same"] * 2
    assert len({call.request_id for call in fake.calls}) == 4


@pytest.mark.parametrize(("keep", "ids"), [(2, [98, 99]), (-1, [BOS, 97, 98, 99])])
def test_truncate_prompt_tokens(connect, fake, keep, ids):
    complete(connect, fake, {"prompt": "abc", "truncate_prompt_tokens": keep, "max_tokens": 1})
    assert fake.calls[0].prompt["prompt_token_ids"] == ids


def test_truncate_to_what_fits(connect, fake):
    body = {"prompt": "a" * 1000, "truncate_prompt_tokens": -1, "max_tokens": 6}
    complete(connect, fake, body)
    assert len(fake.calls[0].prompt["prompt_token_ids"]) == 250


def test_unknown_parameters_are_ignored_and_named(connect, fake, caplog):
    body = {"prompt": "x", "temprature": 1, "sent\r\nby": 2}
    response = run(post(connect, fake, "/v1/completions", body))
    assert response.status_code == 200
    assert response.headers["x-octavo-ignored-parameters"] == "temprature"
    assert "temprature" in caplog.text


def test_unknown_parameters_can_be_refused(connect, fake):
    body = {"prompt": "x", "temprature": 1}
    response = run(post(connect, fake, "/v1/completions", body, unknown_parameters="refuse"))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "temprature"
    assert "'temperature'" in error["message"]


def test_arguments_of_plugins_reach_the_engine(connect, fake):
    body = {"prompt": "Hi", "max_tokens": 2, "vllm_xargs": {"no_repeat_ngram": 3, "list": [1, 2]}}
    complete(connect, fake, body)
    assert fake.calls[-1].params.extra_args == {"no_repeat_ngram": 3, "list": [1, 2]}
    response = run(post(connect, fake, "/v1/completions", {**body, "vllm_xargs": {"a": {}}}))
    assert response.status_code == 400
    assert "vllm_xargs" in response.text


@pytest.mark.parametrize("name", ["max_completion_tokens", "top_logprobs", "messages", "tools"])
def test_parameters_of_chat_are_refused_by_name(connect, fake, name):
    value = [{"type": "function"}] if name in ("messages", "tools") else 3
    body = {"prompt": "Hi", "max_tokens": 2, name: value}
    response = run(post(connect, fake, "/v1/completions", body))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    assert run(post(connect, fake, "/v1/completions", {**body, name: None})).status_code == 200
