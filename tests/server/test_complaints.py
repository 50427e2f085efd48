"""Right values where other engines were reported to give wrong ones, over HTTP and with a real
engine. tests/COMPLAINTS.md says which report each test answers."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.server.app.app import create_app
from octavo.server.config import ServiceConfig
from octavo.testing.model_folder import write_model_folder

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "the quick brown fox"}]
FULL = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture
def post(real_server):
    def post(path=TEXT, **body):
        answer = real_server.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return post


@pytest.fixture
def stream(real_server):
    def stream(path=TEXT, **body):
        answer = real_server.client.post(path, json={**body, "stream": True})
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    return stream


@pytest.fixture
def special(post):
    """Token id of a special token's text."""
    return lambda text: post("/tokenize", prompt=text)["tokens"][0]


def deltas(events, index=0):
    """The parts of one choice."""
    return [part for event in events for part in event["choices"] if part["index"] == index]


# ---- A. streams, usage, several choices ---------------------------------------------------------


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_usage_comes_once_before_the_end_and_is_the_answers(post, stream, path):
    body = {"prompt": "ab"} if path == TEXT else {"messages": HI}
    body |= {"temperature": 0, "max_tokens": 7, "ignore_eos": True, "cache_salt": "one"}
    events = stream(path, **body, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert all(event["usage"] is None and event["choices"] for event in events[:-1])
    usage = post(path, **body | {"cache_salt": "two"})["usage"]
    assert events[-1]["usage"] == usage
    assert usage["completion_tokens"] == 7
    assert usage["total_tokens"] == usage["prompt_tokens"] + 7


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("options", [{}, None, {"include_usage": False}])
def test_no_usage_in_a_stream_that_did_not_ask(stream, path, options):
    body = {"prompt": "ab"} if path == TEXT else {"messages": HI}
    for event in stream(path, **body, max_tokens=3, stream_options=options):
        assert event.get("usage") is None
        assert event["choices"]


@pytest.mark.parametrize("ends_by", ["stop", "length"])
def test_a_chat_stream_has_one_role_one_end_and_no_end_token(stream, special, ends_by):
    bias = {str(special("<|end|>")): 100} if ends_by == "stop" else {}
    events = stream(CHAT, messages=HI, temperature=0, max_tokens=5, logit_bias=bias, min_tokens=2)
    parts = deltas(events)
    assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (
        len(parts) - 1
    )
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [ends_by]
    assert "<|" not in "".join(part["delta"].get("content", "") for part in parts)


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_choices_keep_apart(post, stream, path):
    body = {"prompt": "ab"} if path == TEXT else {"messages": HI}
    body |= {"n": 3, "seed": 5, "temperature": 1.5, "max_tokens": 12, **FULL}
    whole, events = post(path, **body)["choices"], stream(path, **body)
    assert len({tuple(choice["token_ids"]) for choice in whole}) == 3
    for choice in whole:
        parts = deltas(events, choice["index"])
        tokens = [token for part in parts for token in part.get("token_ids") or ()]
        assert tokens == choice["token_ids"]
        assert len(tokens) == 12
        ends = [part["finish_reason"] for part in parts if part["finish_reason"]]
        assert ends == [choice["finish_reason"]] == ["length"]
        if path == TEXT:
            assert "".join(part["text"] for part in parts) == choice["text"]
        else:
            joined = "".join(part["delta"].get("content", "") for part in parts)
            assert joined == choice["message"]["content"]


def test_a_stream_that_echoes_begins_with_the_prompt_once(post, stream):
    body = {"prompt": "the fox", "echo": True, "temperature": 0, "max_tokens": 6}
    parts = deltas(stream(**body))
    assert parts[0]["text"].startswith("the fox")
    text = "".join(part["text"] for part in parts)
    assert text.count("the fox") == 1
    assert text == post(**body)["choices"][0]["text"]


# ---- B. text of tokens, stops -------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_odd_bytes_become_replacement_characters_and_the_stream_goes_on(post, stream, seed):
    body = {"prompt": "ab", "temperature": 2, "seed": seed, "max_tokens": 120, **FULL}
    body |= {"skip_special_tokens": False}
    choice = post(**body)["choices"][0]
    assert "\ufffd" in choice["text"]
    assert len(choice["token_ids"]) == 120
    assert "".join(part["text"] for part in deltas(stream(**body))) == choice["text"]
    assert post("/detokenize", tokens=choice["token_ids"])["prompt"] == choice["text"]


@pytest.mark.parametrize("spaces", [True, False])
def test_special_tokens_that_are_shown_read_as_the_tokenizer_decodes_them(
    post, stream, special, spaces
):
    bias = {str(special(text)): 30 for text in ("<|tool|>", "<|user|>")}
    body = {
        "prompt": "ab",
        "temperature": 1,
        "seed": 3,
        "max_tokens": 40,
        "logit_bias": bias,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": spaces,
        **FULL,
    }
    choice = post(**body)["choices"][0]
    assert "<|tool|>" in choice["text"]
    assert "".join(part["text"] for part in deltas(stream(**body))) == choice["text"]
    assert choice["text"] == post("/detokenize", tokens=choice["token_ids"])["prompt"]


def test_a_stop_token_takes_nothing_from_the_text_before_it(post, stream):
    free = post(prompt="ab", temperature=0, max_tokens=30, **FULL)["choices"][0]["token_ids"]
    stop = next(
        token for place, token in enumerate(free) if place > 3 and token not in free[:place]
    )
    before = free[: free.index(stop)]
    body = {"prompt": "ab", "temperature": 0, "max_tokens": 30, "stop_token_ids": [stop], **FULL}
    choice = post(**body)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"] == [*before, stop]
    assert choice["text"] == post("/detokenize", tokens=before)["prompt"]
    assert "".join(part["text"] for part in deltas(stream(**body))) == choice["text"]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_stop_string_may_name_a_special_token(post, stream, special, skip, streaming):
    body = {
        "prompt": "ab",
        "temperature": 0,
        "max_tokens": 9,
        "min_tokens": 3,
        "stop": ["<|tool|>"],
        "logit_bias": {str(special("<|tool|>")): 100},
        "allowed_token_ids": [65, special("<|tool|>")],
        "skip_special_tokens": skip,
        **FULL,
    }
    if streaming:
        parts = deltas(stream(**body))
        text, last = "".join(part["text"] for part in parts), parts[-1]
    else:
        (last,) = post(**body)["choices"]
        text = last["text"]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "<|tool|>")
    assert text == ("" if skip else "<|tool|>" * 3)


@pytest.mark.parametrize("streaming", [True, False])
def test_min_tokens_is_exact_for_end_and_stop_tokens(real_server, post, special, streaming):
    end = special("<|end|>")
    for stops, ignore in (([], False), ([66], False), ([66], True)):
        likely = end if not stops else 66
        answer = post(
            prompt="ab",
            temperature=0,
            max_tokens=20,
            min_tokens=4,
            logit_bias={str(likely): 100},
            stop_token_ids=stops,
            ignore_eos=ignore,
            return_token_ids=True,
        )
        tokens = answer["choices"][0]["token_ids"]
        assert len(tokens) == answer["usage"]["completion_tokens"] == 5
        assert tokens[-1] == likely
        assert not {end, *stops} & set(tokens[:4]) or ignore
        assert likely not in tokens[:4]


# ---- C. sampling and logprobs -------------------------------------------------------------------


def test_a_seeded_request_is_repeatable_in_any_company(post):
    seeded = {"prompt": "ab", "seed": 42, "temperature": 1, "max_tokens": 20, **FULL}
    others = [
        {"prompt": f"c{number}", "temperature": 1, "max_tokens": 5 + 3 * number}
        for number in range(6)
    ]
    alone = post(**seeded)["choices"][0]["token_ids"]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            crowd = [
                pool.submit(post, **body) for body in [*others[:3], seeded, *others[3:], seeded]
            ]
            answers = [future.result()["choices"][0] for future in crowd]
            assert answers[3]["token_ids"] == answers[7]["token_ids"] == alone


@pytest.mark.parametrize("temperature", [1e-4, 1e-12, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy(post, temperature):
    body = {"prompt": "ab", "max_tokens": 15, **FULL}
    greedy = post(**body, temperature=0)["choices"][0]
    tiny = post(**body, temperature=temperature, logprobs=1)["choices"][0]
    assert tiny["token_ids"] == greedy["token_ids"]
    assert len(tiny["token_ids"]) == 15
    assert all(-100 < value <= 0 for value in tiny["logprobs"]["token_logprobs"])


@pytest.mark.parametrize("top_p", [1e-30, 1e-45, 1e-79, 5e-324])
def test_a_tiny_top_p_keeps_the_best_token(real_server, post, top_p):
    body = {"prompt": "ab", "max_tokens": 15, **FULL}
    greedy = post(**body, temperature=0)["choices"][0]["token_ids"]
    for more in ({}, {"top_k": 5}, {"min_p": 1e-79}, {"temperature": 100}):
        assert post(**body, top_p=top_p, **more)["choices"][0]["token_ids"] == greedy
    real_server.check_control()


@pytest.mark.parametrize("penalty", [1e-30, 1e-45, 1e-79, 5e-324])
def test_a_tiny_penalty_is_a_number(real_server, post, penalty):
    body = {"prompt": "ab", "max_tokens": 15, "repetition_penalty": penalty, **FULL}
    for temperature in (0, 1):
        answer = post(**body, temperature=temperature, seed=1)["choices"][0]
        assert len(answer["token_ids"]) == 15
    real_server.check_control()


def test_top_k_0_and_minus_1_are_off(post):
    body = {"prompt": "ab", "seed": 9, "temperature": 2, "max_tokens": 30, **FULL}
    off = [post(**body, **more)["choices"][0] for more in ({}, {"top_k": 0}, {"top_k": -1})]
    assert off[0]["token_ids"] == off[1]["token_ids"] == off[2]["token_ids"]
    assert post(**body, top_k=1)["choices"][0]["token_ids"] != off[0]["token_ids"]


def test_logprobs_0_is_the_sampled_token_alone(post):
    logprobs = post(prompt="ab", max_tokens=4, logprobs=0, **FULL)["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 4
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top == {token: value}


@pytest.mark.parametrize("streaming", [True, False])
def test_a_prompt_is_scored_without_generating(post, stream, streaming):
    body = {"prompt": [66, 67, 68], "echo": True, "max_tokens": 0, "logprobs": 2}
    if streaming:
        (choice,) = deltas(stream(**body))
    else:
        (choice,) = post(**body)["choices"]
    values = choice["logprobs"]["token_logprobs"]
    assert values[0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert len(values) == 3
    assert all(value < 0 for value in values[1:])
    again = post(**body | {"max_tokens": 5})["choices"][0]["logprobs"]["token_logprobs"]
    assert again[1:3] == pytest.approx(values[1:], abs=1e-4)


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.3},
        {"temperature": 2, "top_p": 0.2, "top_k": 3},
        {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 3},
        {"logit_bias": {"65": 90}},
    ],
)
def test_logprobs_are_the_models_own_whatever_the_sampling(post, more):
    body = {"prompt": "the quick", "max_tokens": 1, "logprobs": 5, "seed": 1, "ignore_eos": True}
    plain = post(**body, temperature=1)["choices"][0]["logprobs"]["top_logprobs"][0]
    other = post(**body, **more)["choices"][0]["logprobs"]
    best = sorted(plain.values())[-5:]
    found = other["top_logprobs"][0]
    assert sorted(found.values())[-5:] == pytest.approx(best, abs=1e-4)
    (token,), (value,) = other["tokens"], other["token_logprobs"]
    assert found[token] == value


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_limit_holds_under_both_names(post, name):
    answer = post(CHAT, messages=HI, ignore_eos=True, **{name: 6})
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["choices"][0]["finish_reason"] == "length"


# ---- D and H, as far as HTTP shows them ---------------------------------------------------------


def test_a_repeated_prompt_is_found_in_the_cache(post):
    body = {"prompt": [70 + n for n in range(64)], "max_tokens": 2, "cache_salt": "cached"}
    counts = [post(**body)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(3)]
    assert counts == [0, 48, 48]
    many = post(**body, n=4)["usage"]
    assert many["prompt_tokens_details"]["cached_tokens"] == 48
    assert many["prompt_tokens"] == 64


# ---- F. one BOS ---------------------------------------------------------------------------------


def test_one_bos_whichever_way_the_text_came_in(tmp_path):
    folder = write_model_folder(tmp_path / "model", max_model_len=64)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings |= {
        "bos_token": "<|bos|>",
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    file.write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = tokenizer.token_to_id("<|bos|>")
    single = [("<|bos|>", bos)]
    tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=single)
    tokenizer.save(str(folder / "tokenizer.json"))
    mapping = {
        "model": {"source": str(folder), "weight_source": "dummy"},
        "plugins": {"load": ["octavo.testing.instant_executor"]},
        "executor": {"kind": "instant"},
        "kv_cache": {"num_blocks": 16},
    }
    hello = [{"role": "user", "content": "hello"}]
    expected = [bos, *tokenizer.encode("hello", add_special_tokens=False).ids]
    with LLM(config=mapping) as llm:
        few = SamplingParams(max_tokens=1)
        assert llm.generate("hello", few)[0].prompt_token_ids == expected
        assert llm.chat(hello, few)[0].prompt_token_ids == expected

    async def online():
        config = ServiceConfig.model_validate(mapping)
        app = create_app(AsyncLLM(config=config), config)
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            await app.state.server.started.wait()
            assert app.state.server.failure is None
            ids = []
            for path, body in (
                (TEXT, {"prompt": "hello"}),
                (CHAT, {"messages": hello}),
            ):
                body |= {"max_tokens": 1, "return_token_ids": True}
                answer = (await client.post(path, json=body)).json()
                ids.append(
                    answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
                )
            for body in ({"prompt": "hello"}, {"messages": hello}):
                ids.append((await client.post("/tokenize", json=body)).json()["tokens"])
            return ids

    assert asyncio.run(online()) == [expected] * 4
