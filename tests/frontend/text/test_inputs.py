from __future__ import annotations

import numpy as np
import pytest

from octavo.core.errors import RequestError, RequestTooLong
from octavo.core.sampling_params import SamplingParams
from octavo.frontend.text.chat import render_chat
from octavo.frontend.text.inputs import InputProcessor, Prompt
from octavo.testing.byte_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


@pytest.fixture
def inputs() -> InputProcessor:
    seeds = iter(range(1000, 2000))
    return InputProcessor(TOKENIZER, max_model_len=20, seed_source=lambda: next(seeds))


@pytest.mark.parametrize(
    "prompt",
    [
        "Hi é",
        {"prompt": "Hi é"},
        {"prompt_token_ids": TOKENIZER.encode("Hi é")},
        TOKENIZER.encode("Hi é"),
        np.array(TOKENIZER.encode("Hi é")),
    ],
)
def test_a_prompt_has_many_forms(inputs: InputProcessor, prompt: Prompt) -> None:
    prepared = inputs.prepare(prompt, SamplingParams(), request_id="r")
    assert prepared.token_ids == TOKENIZER.encode("Hi é")
    (request,) = prepared.requests
    assert request.token_ids.tolist() == prepared.token_ids
    assert request.token_ids.dtype == np.int32
    assert request.eos_token_ids == [TOKENIZER.id_of("<|end|>")]
    has_text = isinstance(prompt, str) or (isinstance(prompt, dict) and "prompt" in prompt)
    assert prepared.prompt == ("Hi é" if has_text else None)


def test_text_may_come_with_token_ids_and_a_salt(inputs: InputProcessor) -> None:
    prompt = {"prompt": "shown", "prompt_token_ids": [65, 66], "cache_salt": "s"}
    prepared = inputs.prepare(prompt, SamplingParams(), request_id="r")
    assert (prepared.prompt, prepared.token_ids) == ("shown", [65, 66])
    other = inputs.prepare([65, 66], SamplingParams(), request_id="r", cache_salt="t")
    plain = inputs.prepare([65, 66], SamplingParams(), request_id="r")
    keys = [p.requests[0].extra_keys for p in (prepared, other, plain)]
    assert keys[2] == []
    assert keys[0] != keys[1] != keys[2]


def test_choices_share_a_prompt_and_a_seed(inputs: InputProcessor) -> None:
    sampling = SamplingParams(n=3, prompt_logprobs=1)
    prepared = inputs.prepare("Hi", sampling, request_id="r", priority=2, user="u")
    first, *others = prepared.requests
    assert [r.index for r in prepared.requests] == [0, 1, 2]
    assert first.parent is None
    assert {r.parent for r in others} == {first.handle}
    assert len({r.handle for r in prepared.requests}) == 3
    assert {r.seed for r in prepared.requests} == {1000}
    assert {(r.priority, r.user) for r in prepared.requests} == {(2, "u")}
    assert first.sampling.prompt_logprobs == 1
    assert {r.sampling.prompt_logprobs for r in others} == {None}
    assert inputs.prepare("Hi", SamplingParams(seed=7), request_id="r").requests[0].seed == 7


def test_seeds_are_random_without_a_source() -> None:
    inputs = InputProcessor(TOKENIZER, max_model_len=20)
    seeds = {inputs.prepare("a", None, request_id="r").requests[0].seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(("asked", "given"), [(None, 18), (5, 5), (100, 18), (0, 1)])
def test_max_tokens_is_bounded_by_the_context(
    inputs: InputProcessor, asked: int | None, given: int
) -> None:
    prepared = inputs.prepare("Hi", SamplingParams(max_tokens=asked), request_id="r")
    assert prepared.requests[0].max_tokens == given


def test_a_prompt_that_cannot_fit_is_refused_with_both_numbers(inputs: InputProcessor) -> None:
    inputs.prepare([65] * 19, None, request_id="r")
    with pytest.raises(RequestTooLong, match=r"20 tokens.*max_model_len is 20") as caught:
        inputs.prepare([65] * 20, None, request_id="r")
    assert caught.value.param == "prompt"


class Counting(ByteTokenizer):
    """Counts what it has encoded."""

    characters = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.characters += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_a_text_far_too_long_is_refused_without_being_tokenized() -> None:
    tokenizer = Counting()
    inputs = InputProcessor(tokenizer, max_model_len=2000)
    text = "word " * 100_000
    least = inputs.fewest_tokens(text)
    assert 2000 <= least <= len(TOKENIZER.encode(text))
    for refused in (
        lambda: inputs.prepare(text, request_id="r"),
        lambda: inputs.prepare({"prompt": text}, request_id="r"),
        lambda: render_chat(inputs, [{"role": "user", "content": text}]),
    ):
        with pytest.raises(RequestTooLong, match=r"has at least \d+ tokens.*max_model_len is 2000"):
            refused()
    assert tokenizer.characters == 0
    with pytest.raises(RequestError, match="lone surrogate"):
        inputs.prepare(text + "\ud83d", request_id="r")
    # Soon encoded, so exact.
    with pytest.raises(RequestTooLong, match="has 15000 tokens and needs"):
        inputs.prepare("word " * 3000, request_id="r")
    assert len(inputs.encode(text)) == len(TOKENIZER.encode(text)), "no limit of its own"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ({}, "'prompt' or 'prompt_token_ids'"),
        ({"prompts": "x"}, "did you mean 'prompt'"),
        ({"prompt": 3}, "must be a string, got int"),
        ("a\ud83d b", r"lone surrogate U\+D83D at character 1"),
        ([65, 999], "prompt has token id 999, expected 0 to 272"),
        ([65, -1], "prompt has token id -1, expected 0 to 272"),
        ([65, "a"], r"prompt_token_ids\[1\] must be an integer"),
        ([True], "must be an integer"),
        (None, "got NoneType"),
        (b"bytes", "got bytes"),
    ],
)
def test_bad_prompts_are_named(inputs: InputProcessor, prompt: Prompt, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        inputs.prepare(prompt, None, request_id="r")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": ["a"], "detokenize": False}, "detokenize"),
        ({"stop": ["\udc00"]}, "stop is not valid Unicode"),
        ({"bad_words": ["\udc00"]}, "bad_words is not valid Unicode"),
        ({"allowed_token_ids": [1, 5000]}, "allowed_token_ids has token id 5000"),
        ({"logit_bias": {273: 1.0}}, "logit_bias has token id 273"),
        ({"logprobs": 5000}, "logprobs must be at most"),
    ],
)
def test_sampling_is_checked_against_the_model(
    inputs: InputProcessor, params: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        inputs.prepare("Hi", SamplingParams(**params), request_id="r")  # type: ignore[arg-type]


def test_sampling_is_checked_again_where_a_request_is_made(inputs: InputProcessor) -> None:
    params = SamplingParams()
    params.temperature = "hot"  # type: ignore[assignment]
    with pytest.raises(RequestError, match="temperature must be a number"):
        inputs.prepare("Hi", params, request_id="r")
    params.temperature = 0.5
    prepared = inputs.prepare("Hi", params, request_id="r")
    params.temperature = 2.0
    assert prepared.requests[0].sampling.temperature == 0.5


def test_sampling_must_be_sampling_params(inputs: InputProcessor) -> None:
    with pytest.raises(RequestError, match="got dict"):
        inputs.prepare("Hi", {"n": 1}, request_id="r")  # type: ignore[arg-type]


def test_bad_words_are_tokenized_with_and_without_a_space(inputs: InputProcessor) -> None:
    given = SamplingParams(bad_words=["the", " Paris"])
    prepared = inputs.prepare("Hi", given, request_id="r")
    assert prepared.requests[0].sampling.bad_words_token_ids == [
        TOKENIZER.encode("the"),
        [TOKENIZER.id_of(" the")],
        TOKENIZER.encode("Paris"),
        [TOKENIZER.id_of(" Paris")],
    ]
    assert given.bad_words_token_ids is None


def test_defaults_come_from_the_generation_config() -> None:
    config = {"temperature": 0.2, "top_k": 5, "max_new_tokens": 9, "top_p": None, "other": 1}
    inputs = InputProcessor(TOKENIZER, max_model_len=20, generation_config=config)
    expected = SamplingParams(temperature=0.2, top_k=5, max_tokens=9)
    assert inputs.default_sampling_params() == expected
    assert inputs.prepare("Hi", None, request_id="r").sampling == expected
    bare = InputProcessor(TOKENIZER, max_model_len=20)
    assert bare.default_sampling_params() == SamplingParams()


def test_a_conversation_becomes_a_prompt() -> None:
    inputs = InputProcessor(TOKENIZER, max_model_len=200)
    prompt = render_chat(inputs, [{"role": "user", "content": "Hi"}])
    assert prompt["prompt"] == "<|im_start|>user\nHi<|end|><|im_start|>assistant\n"
    assert prompt["prompt_token_ids"][0] == TOKENIZER.id_of("<|im_start|>")
    assert inputs.prepare(prompt, None, request_id="r").prompt == prompt["prompt"]


@pytest.mark.parametrize("messages", [[], "Hi", [{"content": "no role"}], ["text"], [{"role": 1}]])
def test_bad_conversations_are_refused(inputs: InputProcessor, messages: object) -> None:
    with pytest.raises(RequestError, match="messages"):
        render_chat(inputs, messages)  # type: ignore[arg-type]


def test_a_last_message_is_continued_or_answered_not_both(inputs: InputProcessor) -> None:
    messages = [{"role": "assistant", "content": "The"}]
    with pytest.raises(RequestError, match="exclude each other"):
        render_chat(inputs, messages, continue_final_message=True, add_generation_prompt=True)
    prompt = render_chat(inputs, messages, continue_final_message=True)
    assert prompt["prompt"].endswith("The")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"priority": "high"}, "priority must be an integer, got 'high'"),
        ({"priority": 1.5}, "priority must be an integer, got 1.5"),
        ({"priority": True}, "priority must be an integer, got True"),
        ({"priority": 2**63}, "priority must fit into 64 bits, got 9223372036854775808"),
        ({"user": 5}, "user must be a string, got int"),
        ({"user": "\ud800"}, "user is not valid Unicode: a lone surrogate"),
        ({"request_id": "\ud800"}, "request_id is not valid Unicode: a lone surrogate"),
    ],
)
def test_what_the_engine_could_not_hold_is_refused(
    inputs: InputProcessor, keywords: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        inputs.prepare("Hi", SamplingParams(), **{"request_id": "r"} | keywords)  # type: ignore[arg-type]
    prepared = inputs.prepare("Hi", SamplingParams(), request_id="r", priority=np.int64(-3))
    assert type(prepared.requests[0].priority) is int


def test_numbers_that_no_message_holds_are_refused() -> None:
    with pytest.raises(RequestError, match=r"max_tokens must be an integer in \[0, 9223372036854"):
        SamplingParams(max_tokens=2**63)
