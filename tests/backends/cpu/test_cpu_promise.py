"""The promise: a request's logits have the same bits whatever else the engine does, with the parts
that `auto` chooses. And no product of a step is left to MKL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import LLM, SamplingParams

VOCAB = 160
SHAPES: dict[str, dict[str, Any]] = {
    # a demo-like layer: 9 query heads of 64 on 3 KV heads, a tied head
    "demo": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    # nothing is a multiple of 16
    "odd": {
        "hidden_size": 70,
        "intermediate_size": 102,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 14,
        "tie_word_embeddings": False,
    },
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random models by shape."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    found = {}
    for name, shape in SHAPES.items():
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=VOCAB,
            num_hidden_layers=2,
            max_position_embeddings=512,
            initializer_range=0.1,
            **shape,
        )
        found[name] = tmp_path_factory.mktemp(name)
        LlamaForCausalLM(config).save_pretrained(found[name])
        words.save(str(found[name] / "tokenizer.json"))
    return found


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts that share beginnings, of lengths around blocks and tiles."""
    generator = np.random.default_rng(11)
    base = generator.integers(3, VOCAB, 100).tolist()
    cuts = (1, 7, 16, 17, 40, 65, 100)
    return [base[:cut] for cut in cuts] + [generator.integers(3, VOCAB, 33).tolist()]


Answer = list[tuple[list[int], np.ndarray]]


def answers(
    folder: Path, prompts: list[list[int]], *, together: bool, **sections: dict[str, Any]
) -> tuple[Answer, dict[str, Any]]:
    """((tokens, logprobs float32[n, V]) of each prompt, the engine's metrics). Even ones are
    greedy, odd ones are sampled with their number modulo 8 as seed."""
    config: dict[str, dict[str, Any]] = {
        "model": {"source": str(folder)},
        "kv_cache": {"num_blocks": 200},
        "executor": {"num_threads": 2},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 256},
    }
    for name, section in sections.items():
        config.setdefault(name, {}).update(section)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [
        SamplingParams(
            temperature=float(number % 2),
            seed=number % 8,
            top_p=0.9,
            max_tokens=9,
            ignore_eos=True,
            logprobs=VOCAB,
            detokenize=False,
        )
        for number in range(len(prompts))
    ]
    llm = LLM(config=config)
    try:
        names = {choice.kind: choice.name for choice in llm.report.plugins}
        if "model" not in sections:
            assert (names["quantization"], names["attention_backend"]) == ("packed", "cpu")
        assert names["graph_runner"] == "native"
        if together:
            outputs = llm.generate(inputs, params, use_tqdm=False)
        else:
            outputs = [
                llm.generate([one], [how], use_tqdm=False)[0]
                for one, how in zip(inputs, params, strict=True)
            ]
        metrics = llm.metrics()
    finally:
        llm.close()
    found = []
    for output in outputs:
        choice = output.outputs[0]
        rows = [[row[token].logprob for token in range(VOCAB)] for row in choice.logprobs]
        found.append((list(choice.token_ids), np.array(rows, np.float32)))
    return found, metrics


def assert_equal(found: Answer, expected: Answer) -> None:
    for number, ((tokens, values), (wanted, logprobs)) in enumerate(
        zip(found, expected, strict=True)
    ):
        assert tokens == wanted, f"prompt {number}"
        assert np.array_equal(values, logprobs), f"prompt {number}"


COLD = {"prefix_caching": False}


@pytest.fixture(scope="session", params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def alone(folders: dict[str, Path], prompts: list[list[int]], shape: str) -> Answer:
    """Each request by itself, its prompt in one piece, nothing reused."""
    found, metrics = answers(folders[shape], prompts, together=False, kv_cache=COLD)
    assert metrics["num_preemptions"] == metrics["prefix_hits"] == 0
    assert len({tuple(tokens) for tokens, _ in found}) > 4
    return found


@pytest.mark.parametrize(
    "sections",
    [
        {"kv_cache": COLD},
        {"kv_cache": COLD, "executor": {"num_threads": 1}},
        {"kv_cache": COLD | {"block_size": 8}, "scheduler": {"max_chunk_tokens": 1}},
        {"kv_cache": COLD | {"block_size": 64}, "scheduler": {"max_chunk_tokens": 7}},
        {"kv_cache": COLD, "scheduler": {"max_num_batched_tokens": 11}},
        {
            "kv_cache": COLD,
            "scheduler": {"chunked_prefill": False, "max_num_batched_tokens": 512},
        },
        {"kv_cache": COLD, "graph": {"runner": "native"}, "executor": {"kind": "threaded"}},
    ],
    ids=["company", "one thread", "single tokens", "chunks", "budget", "whole", "threaded"],
)
def test_company_and_chunks(
    folders: dict[str, Path],
    prompts: list[list[int]],
    shape: str,
    alone: Answer,
    sections: dict[str, Any],
) -> None:
    assert_equal(answers(folders[shape], prompts, together=True, **sections)[0], alone)


@pytest.mark.parametrize("manager", ["paged", "radix"])
def test_prefix_hits(
    folders: dict[str, Path], prompts: list[list[int]], shape: str, alone: Answer, manager: str
) -> None:
    for together in (True, False):
        found, metrics = answers(
            folders[shape], prompts + prompts, together=together, kv_cache={"manager": manager}
        )
        assert metrics["prefix_hits"] > 0
        assert_equal(found, alone + alone)


@pytest.mark.parametrize("policy", ["recompute", "swap"])
def test_preemption(
    folders: dict[str, Path], prompts: list[list[int]], shape: str, alone: Answer, policy: str
) -> None:
    preemption: dict[str, Any] = {"policy": policy}
    if policy == "swap":
        preemption["swap_space"] = 2**24
    found, metrics = answers(
        folders[shape],
        prompts + prompts,
        together=True,
        preemption=preemption,
        kv_cache=COLD | {"num_blocks": 29, "block_size": 4},
    )
    assert metrics["num_preemptions"] > 1
    assert (metrics["num_swap_ins"] > 0) == (policy == "swap")
    assert_equal(found, alone + alone)


@pytest.mark.parametrize(
    ("model", "kv_dtype"),
    [
        ({"quantization": "int8"}, "auto"),
        ({"quantization": "int4"}, "auto"),
        ({"dtype": "bfloat16"}, "auto"),
        ({"quantization": "packed"}, "bfloat16"),
        ({"quantization": "packed"}, "fp8"),
        ({"quantization": "int4"}, "int8"),
    ],
)
def test_other_forms_of_weights_and_cache(
    folders: dict[str, Path],
    prompts: list[list[int]],
    shape: str,
    model: dict[str, str],
    kv_dtype: str,
) -> None:
    common: dict[str, Any] = {"dtype": kv_dtype}
    apart, _ = answers(folders[shape], prompts, together=False, model=model, kv_cache=COLD | common)
    tight = {"num_blocks": 29, "block_size": 4} | common
    found, metrics = answers(
        folders[shape],
        prompts,
        together=True,
        model=model,
        kv_cache=tight,
        scheduler={"max_chunk_tokens": 13},
    )
    assert metrics["num_preemptions"] > 0
    assert_equal(found, apart)


# ---- MKL -----------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Names of the operators that torch runs and that multiply matrices."""

    KINDS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "_attention")

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        name = func.overloadpacket.__name__
        if name in self.KINDS or "attention" in name:
            self.found.add(name)
        return func(*args, **(kwargs or {}))


REFERENCE = {
    "model": {"quantization": "none"},
    "attention": {"backend": "torch"},
    "graph": {"runner": "eager"},
}


@pytest.mark.parametrize(
    ("sections", "products"),
    [
        ({}, False),
        ({"graph": {"runner": "eager"}}, False),
        ({"model": {"quantization": "int4"}}, False),
        (REFERENCE, True),
    ],
    ids=["default", "eager", "int4", "reference"],
)
def test_no_product_is_left_to_mkl(
    folders: dict[str, Path],
    prompts: list[list[int]],
    sections: dict[str, Any],
    products: bool,
) -> None:
    """Prefill, decode and sampling. The reference parts show that the test would see one."""
    config = {"model": {"source": str(folders["odd"])}, "kv_cache": {"num_blocks": 100}}
    for name, section in sections.items():
        config.setdefault(name, {}).update(section)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=4, logprobs=3, detokenize=False)
    llm = LLM(config=config)
    try:
        with Products() as seen:
            llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    finally:
        llm.close()
    assert seen.count > 10, "the engine runs in this thread"
    assert bool(seen.found) == products, seen.found
