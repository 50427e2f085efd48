"""The demo model in float32: greedy tokens equal transformers' own, alone and in company."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from octavo import SamplingParams

if TYPE_CHECKING:
    from octavo import LLM

TEXT = (
    "The history of computing is older than the machines that we call computers. People counted "
    "with stones, with knots in strings and with beads on wires, and they wrote tables of "
    "logarithms so that a multiplication became an addition. Charles Babbage wanted a machine to "
    "print such tables without mistakes. Ada Lovelace saw that it could do more than arithmetic: "
    "whatever could be written in symbols, music for instance, it could work on."
)
PROMPTS = [
    "Hi",
    "Hello, my name is",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Q: What is 2 + 2?\nA:",
    "1, 2, 3, 5, 8,",
    "Grüße aus München! Heute",
    "日本の首都は",
    "😀 😀",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    *(TEXT[:cut] for cut in (20, 45, 80, 120, 150, 200, 260, 310, 370, len(TEXT))),
]
OUTPUT = 8


@pytest.fixture(scope="module")
def expected(demo_llm: LLM) -> list[list[int]]:
    """transformers' continuation of every prompt."""
    from transformers import AutoModelForCausalLM

    source = demo_llm.engine.resolved.weight_source
    folder = source.tokenizer_dir()
    next(iter(source.tensors()))  # the converted checkpoint is there
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = torch.tensor([demo_llm.get_tokenizer().encode(prompt)])
            got = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=OUTPUT,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            out.append(got[0, ids.shape[1] :].tolist())
    return out


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)


def test_twenty_prompts_together(demo_llm: LLM, expected: list[list[int]]) -> None:
    assert len(PROMPTS) == 20
    results = demo_llm.generate(PROMPTS, greedy(), use_tqdm=False)
    assert [list(result.outputs[0].token_ids) for result in results] == expected


def test_twenty_prompts_one_by_one(demo_llm: LLM, expected: list[list[int]]) -> None:
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        (result,) = demo_llm.generate(prompt, greedy(), use_tqdm=False)
        assert list(result.outputs[0].token_ids) == tokens
