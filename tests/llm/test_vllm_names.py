"""What scripts written for vLLM's `LLM` use beside `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import octavo
from octavo import SamplingParams

if TYPE_CHECKING:
    from octavo import LLM

TURNS = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]


def test_tokenizer_answers_to_transformers_names(demo_llm: LLM) -> None:
    tokenizer = demo_llm.get_tokenizer()
    text = tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert text == tokenizer.chat(TURNS, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer("Hi") == {"input_ids": tokenizer.encode("Hi"), "attention_mask": [1]}
    assert tokenizer.eos_token_id in tokenizer.eos_token_ids
    greedy = SamplingParams(temperature=0, max_tokens=12)
    prompt = octavo.TokensPrompt(prompt_token_ids=ids)
    (result,) = demo_llm.generate(prompt, greedy, lora_request=None, use_tqdm=False)
    assert result.outputs[0].text == "The capital of France is Paris."
    with pytest.raises(octavo.RequestError, match="adapters"):
        demo_llm.generate("Hi", greedy, lora_request=object())


def test_clone_shares_nothing() -> None:
    first = SamplingParams(stop=["a"], logit_bias={1: 2.0})
    second = first.clone()
    second.stop.append("b")
    assert (first.stop, second.stop) == (["a"], ["a", "b"])
