"""`LLM` with the demo model: real tokens through the whole text side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from octavo import SamplingParams

if TYPE_CHECKING:
    from octavo import LLM

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_chat_answers(demo_llm: LLM) -> None:
    question = "What is the capital of France? Answer briefly."
    (result,) = demo_llm.chat([{"role": "user", "content": question}], GREEDY, use_tqdm=False)
    output = result.outputs[0]
    assert output.text == "The capital of France is Paris."
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert demo_llm.get_tokenizer().decode(output.token_ids) == output.text


def test_streams_and_stops_agree_with_generate(demo_llm: LLM) -> None:
    prompt = "Once upon a time, in a"
    whole = demo_llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0]
    deltas = list(demo_llm.stream(prompt, GREEDY))
    assert "".join(delta.outputs[0].text for delta in deltas) == whole.text
    # The last four characters lie across a token border or inside a token: either is found.
    middle = whole.text[len(whole.text) // 2 :][:4]
    cut = demo_llm.generate(
        prompt, SamplingParams(temperature=0, max_tokens=8, stop=[middle]), use_tqdm=False
    )[0].outputs[0]
    assert cut.text == whole.text[: whole.text.index(middle)]
    assert cut.stop_reason == middle
    assert list(cut.token_ids) == list(whole.token_ids)[: len(cut.token_ids)]


def test_logprobs_of_greedy_tokens_are_the_best(demo_llm: LLM) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=0)
    result = demo_llm.generate("The sky is", sampling, use_tqdm=False)[0]
    output = result.outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    chosen = [
        position[token] for position, token in zip(output.logprobs, output.token_ids, strict=True)
    ]
    assert {each.rank for each in chosen} == {1}
    assert "".join(each.decoded_token or "" for each in chosen) == output.text
    assert output.cumulative_logprob == pytest.approx(sum(each.logprob for each in chosen))
    assert result.prompt_logprobs is not None
    assert result.prompt_token_ids is not None
    assert result.prompt_logprobs[0] is None
    for token, position in zip(
        result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True
    ):
        assert position is not None
        assert list(position) == [token]


def test_choices_are_reproducible_and_differ(demo_llm: LLM) -> None:
    sampling = SamplingParams(n=3, seed=5, max_tokens=6)
    runs = [demo_llm.generate("A story:", sampling, use_tqdm=False)[0] for _ in range(2)]
    texts = [[output.text for output in run.outputs] for run in runs]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
