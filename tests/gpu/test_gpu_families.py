"""Every family on a GPU: transformers' tokens, whatever the parts."""

from __future__ import annotations

import pytest
import torch

FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 24},
    "Qwen2": {},
    "Qwen2-window": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "Qwen3": {"head_dim": 128},
}
OUTPUT = 10


@pytest.fixture(params=FAMILIES)
def family(request, tiny):
    """A model folder."""
    return tiny(request.param.partition("-")[0], **FAMILIES[request.param])


@pytest.fixture(scope="module")
def references(answer, requests_of):
    """The reference's answers by folder and dtype, made when asked for."""
    made = {}

    def reference(folder, dtype):
        key = (folder, dtype)
        if key not in made:
            made[key] = answer(
                folder,
                requests_of(greedy=True),
                dtype,
                attention="torch",
                sampler={"backend": "torch"},
                graph={"runner": "eager"},
            )
        return made[key]

    return reference


def test_a_family_has_the_tokens_of_transformers(family, references, prompts, device):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(family, dtype=torch.float32).eval().to(device)
    for prompt, tokens in zip(prompts, references(family, "float32").tokens, strict=True):
        ids = torch.tensor([prompt], device=device)
        for token in tokens:
            with torch.inference_mode():
                logits = model(ids).logits[0, -1]
            assert int(logits.argmax()) == token
            ids = torch.cat((ids, torch.tensor([[token]], device=device)), dim=1)


@pytest.fixture
def run(family, answer, requests_of):
    def run(attention, dtype, **parts):
        return answer(family, requests_of(greedy=True), dtype, attention=attention, **parts)

    return run


def test_a_family_in_float32(family, references, run):
    found = run("triton", "float32", graph={"runner": "triton"})
    assert found.tokens == references(family, "float32").tokens


@pytest.mark.parametrize("attention", ["flashinfer", "triton"])
def test_a_family_in_bfloat16(family, references, run, attention):
    run(attention, "bfloat16").check_like(references(family, "bfloat16"), "bfloat16")
