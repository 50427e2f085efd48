"""What rounding the weights costs: perplexity of the demo model on text that it made itself."""

from __future__ import annotations

import math

import pytest

from octavo import LLM, SamplingParams

TOPICS = ("the history of Rome", "how bread is made", "the ocean", "a detective in Paris")


def engine(source: str, quantization: str) -> LLM:
    return LLM(
        config={
            "model": {"source": source, "dtype": "float32", "quantization": quantization},
            "attention": {"backend": "cpu"},
            "graph": {"runner": "native"},
            "kv_cache": {"num_blocks": 200},
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 512},
        }
    )


def perplexity(llm: LLM, texts: list[tuple[list[int], list[int]]]) -> float:
    """Of the answers, given their prompts."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    inputs = [{"prompt_token_ids": prompt + answer} for prompt, answer in texts]
    total, count = 0.0, 0
    for (prompt, answer), output in zip(
        texts, llm.generate(inputs, params, use_tqdm=False), strict=True
    ):
        for at, token in enumerate(answer, start=len(prompt)):
            total -= output.prompt_logprobs[at][token].logprob
            count += 1
    assert count > 300
    return math.exp(total / count)


@pytest.mark.slow
def test_rounding_costs_little(demo_model: str) -> None:
    llm = engine(demo_model, "packed")
    try:
        params = SamplingParams(temperature=1.0, max_tokens=160, seed=1)
        messages = [[{"role": "user", "content": f"Write about {topic}."}] for topic in TOPICS]
        outputs = llm.chat(messages, params, use_tqdm=False)
        texts = [(list(o.prompt_token_ids), list(o.outputs[0].token_ids)) for o in outputs]
        exact = perplexity(llm, texts)
    finally:
        llm.close()
    for quantization, most in (("int8", 1.01), ("int4", 1.08)):
        llm = engine(demo_model, quantization)
        try:
            ratio = perplexity(llm, texts) / exact
        finally:
            llm.close()
        assert ratio < most, f"{quantization}: perplexity times {ratio:.4f}"
