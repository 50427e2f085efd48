"""What scripts written for vLLM's `LLM` use beside `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import octavo
from octavo import SamplingParams
from octavo.core.sampling_params import UNSUPPORTED
from octavo.frontend.vllm.differences import METHODS

if TYPE_CHECKING:
    from pathlib import Path

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
    with pytest.raises(octavo.RequestError, match="LoRA is not supported yet"):
        demo_llm.generate("Hi", greedy, lora_request=object())


def test_clone_shares_nothing() -> None:
    first = SamplingParams(stop=["a"], logit_bias={1: 2.0})
    second = first.clone()
    second.stop.append("b")
    assert (first.stop, second.stop) == (["a"], ["a", "b"])


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_are_not_there_say_what_is(name: str, repository: Path) -> None:
    llm = octavo.LLM.__new__(octavo.LLM)
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=f"LLM.{name}: .* is not supported"):
        getattr(llm, name)
    assert name in (repository / "docs" / "from-vllm.md").read_text()


def test_other_attributes_are_absent_as_ever() -> None:
    llm = octavo.LLM.__new__(octavo.LLM)
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'generat'"):
        llm.generat  # noqa: B018


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_parameters_that_are_not_there_say_what_is(name: str, repository: Path) -> None:
    with pytest.raises(TypeError, match=f"SamplingParams has no '{name}': "):
        octavo.SamplingParams(**{name: 1})
    assert name in (repository / "docs" / "from-vllm.md").read_text()


def test_token_ids_are_prompts() -> None:
    llm = octavo.LLM.__new__(octavo.LLM)
    with pytest.raises(octavo.RequestError, match="token ids are passed as prompts") as caught:
        llm.generate(prompt_token_ids=[[1, 2]])
    assert caught.value.param == "prompt_token_ids"
    with pytest.raises(octavo.RequestError, match="expected a prompt or a list of prompts"):
        llm.generate()
