"""One answer, whatever the configuration: greedy tokens equal transformers' own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.core.errors import ConfigError
from octavo.core.messages import EngineRequest
from octavo.core.sampling_params import SamplingParams
from octavo.testing.fake_engine import Collector, assert_clean

OUTPUT = 12


def request(handle, tokens, max_tokens=OUTPUT, *, seed=0, index=0, parent=None, **sampling):
    sampling = {"temperature": 0.0, "ignore_eos": True, **sampling}
    return EngineRequest(
        handle=handle,
        request_id=str(handle),
        token_ids=np.asarray(tokens, np.int32),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        seed=seed,
        max_tokens=max_tokens,
        index=index,
        parent=parent,
    )


def run(engine, requests, together=True):
    """Tokens by handle."""
    collector = Collector(engine)
    for req in requests:
        engine.add(req)
        if not together:
            collector.run()
    collector.run()
    assert set(collector.reasons.values()) <= {"length"}
    assert_clean(engine)
    return [collector.tokens[req.handle] for req in requests]


@pytest.fixture(scope="session")
def reference(tiny_model, prompts):
    """transformers' greedy continuation of every prompt."""
    out = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            got = tiny_model[1].generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=OUTPUT,
                min_new_tokens=OUTPUT,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
            out.append(got[0, len(prompt) :].tolist())
    return out


def greedy(prompts):
    return [request(handle, prompt) for handle, prompt in enumerate(prompts, 1)]


@pytest.mark.parametrize("executor", ["local", "wire", "threaded"])
def test_executors(make_engine, prompts, reference, executor):
    engine = make_engine({"executor": {"kind": executor}})
    assert run(engine, greedy(prompts)) == reference


def test_alone(make_engine, prompts, reference):
    assert run(make_engine(), greedy(prompts), together=False) == reference


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, None])
def test_chunk_sizes(make_engine, prompts, reference, chunk):
    engine = make_engine({"scheduler": {"max_chunk_tokens": chunk}})
    assert run(engine, greedy(prompts)) == reference


def test_without_chunked_prefill(make_engine, prompts, reference):
    engine = make_engine(
        {
            "model": {"max_model_len": 90},
            "scheduler": {"chunked_prefill": False, "max_num_batched_tokens": 90},
        }
    )
    assert run(engine, greedy(prompts)) == reference


@pytest.mark.parametrize("budget", [8, 33])
def test_small_token_budgets(make_engine, prompts, reference, budget):
    engine = make_engine({"scheduler": {"max_num_batched_tokens": budget}})
    assert run(engine, greedy(prompts)) == reference


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_block_sizes_and_prefix_caching(
    make_engine, prompts, reference, block_size, prefix_caching
):
    engine = make_engine({"kv_cache": {"block_size": block_size, "prefix_caching": prefix_caching}})
    twice = greedy(prompts) + [
        request(100 + handle, prompt) for handle, prompt in enumerate(prompts)
    ]
    assert run(engine, twice) == reference + reference
    hits = engine.metrics()["prefix_hits"]
    assert (hits > 0) == prefix_caching


@pytest.mark.parametrize("executor", ["local", "wire", "threaded"])
def test_a_pool_so_small_that_sequences_are_preempted(make_engine, prompts, reference, executor):
    config = {"kv_cache": {"num_blocks": 12, "block_size": 8}, "executor": {"kind": executor}}
    engine = make_engine(config)
    assert run(engine, greedy(prompts)) == reference
    assert engine.metrics()["num_preemptions"] > 3


TIGHT = {"num_blocks": 12, "block_size": 8}


def twice(prompts):
    return greedy(prompts) + [
        request(100 + number, prompt) for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("manager", ["paged", "radix", "none"])
def test_swapped_sequences_go_on_with_the_same_tokens(make_engine, prompts, reference, manager):
    engine = make_engine(
        {
            "kv_cache": {**TIGHT, "manager": manager},
            "preemption": {"policy": "swap", "swap_space": 2**20},
        }
    )
    assert engine.report.num_swap_blocks > 20
    assert run(engine, greedy(prompts)) == reference
    metrics = engine.metrics()
    assert metrics["num_swap_ins"] == metrics["num_swap_outs"] == metrics["num_preemptions"] > 3


def test_the_cheaper_way_to_preempt_is_measured(make_engine, prompts, reference):
    engine = make_engine({"kv_cache": TIGHT, "preemption": {"policy": "auto"}})
    assert run(engine, greedy(prompts)) == reference
    metrics = engine.metrics()
    assert metrics["num_preemptions"] > 3
    assert metrics["num_swap_outs"] > 0  # the first one at least, to measure
    policy = engine.scheduler.preemption.policy
    assert policy.reason()
    assert policy._copy.value > 0
    assert policy._prefill.value > 0


def test_evicted_prefixes_come_back_from_the_host(make_engine, prompts, reference):
    engine = make_engine({"kv_cache": {**TIGHT, "num_blocks": 14, "host_cache_bytes": 2**20}})
    assert run(engine, twice(prompts)) == reference + reference
    metrics = engine.metrics()
    assert 0 < metrics["host_cache_hits"] < metrics["host_cache_queries"]


@pytest.mark.parametrize("manager", ["radix", "none"])
def test_other_managers(make_engine, prompts, reference, manager):
    engine = make_engine({"kv_cache": {"manager": manager}})
    assert run(engine, twice(prompts)) == reference + reference
    assert (engine.metrics()["prefix_hits"] > 0) == (manager == "radix")


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"manager": "radix", "eviction": "lfu"}, "kv_cache.eviction"),
        ({"manager": "none", "host_cache_bytes": 2**20}, "kv_cache.host_cache_bytes"),
    ],
)
def test_what_a_manager_does_not_do_is_refused(make_engine, config, path):
    with pytest.raises(ConfigError, match=rf"{path}.*the KV cache manager '{config['manager']}'"):
        make_engine({"kv_cache": config})


SAMPLED = {"temperature": 1.0, "top_k": 40, "top_p": 0.95}


def sampled(prompts):
    return [
        request(handle, prompt, seed=handle * 977, **SAMPLED)
        for handle, prompt in enumerate(prompts, 1)
    ]


def test_seeded_sampling_does_not_depend_on_company(make_engine, prompts):
    alone = run(make_engine(), sampled(prompts), together=False)
    assert run(make_engine(), sampled(prompts)) == alone
    assert run(make_engine(), sampled(prompts)[::-1]) == alone[::-1]
    chunked = make_engine({"scheduler": {"max_chunk_tokens": 5}, "executor": {"kind": "threaded"}})
    assert run(chunked, sampled(prompts)) == alone
    small = make_engine({"kv_cache": {"num_blocks": 12, "block_size": 8}})
    assert run(small, sampled(prompts)) == alone
    assert small.metrics()["num_preemptions"] > 3


def test_choices_differ_and_equal_single_requests(make_engine, prompts):
    def choices(first):
        return [
            request(first + i, prompts[12], seed=5, index=i, parent=first if i else None, **SAMPLED)
            for i in range(4)
        ]

    together = run(make_engine(), choices(1))
    assert len({tuple(tokens) for tokens in together}) > 1
    apart = [
        run(make_engine(), [request(9, prompts[12], seed=5, index=i, **SAMPLED)])[0]
        for i in range(4)
    ]
    assert together == apart
    tight = make_engine({"kv_cache": {"num_blocks": 12, "block_size": 8}})
    assert run(tight, choices(1)) == apart


def test_logprobs_are_those_of_transformers(make_engine, tiny_model, prompts):
    prompt = prompts[9]
    engine = make_engine({"scheduler": {"max_chunk_tokens": 10}})
    engine.add(request(1, prompt, 3, logprobs=2, prompt_logprobs=1))
    chosen, prompt_values = [], {}
    while engine.has_work():
        outputs = engine.step()
        for part in outputs.prompt_logprobs:
            for i, row in enumerate(part.logprobs.rows.tolist()):
                assert part.start + i == row or part.logprobs.rows[0] == row - i
            for i in range(len(part.logprobs.values)):
                prompt_values[part.start + i] = (
                    int(part.logprobs.token_ids[i, 0]),
                    float(part.logprobs.values[i, 0]),
                )
        if outputs.logprobs is not None:
            chosen.append((outputs.token_ids[0, 0], outputs.logprobs))
    with torch.inference_mode():
        tokens = [*prompt, *[int(token) for token, _ in chosen]]
        logits = tiny_model[1](torch.tensor([tokens])).logits[0].log_softmax(-1)
    for step, (token, logprobs) in enumerate(chosen):
        row = logits[len(prompt) - 1 + step]
        assert logprobs.token_ids[0].tolist()[0] == token
        assert logprobs.token_ids[0].tolist()[1:3] == row.topk(2).indices.tolist()
        assert logprobs.values[0][0] == pytest.approx(float(row[token]), abs=1e-4)
        assert logprobs.ranks[0] == 1
    assert sorted(prompt_values) == list(range(1, len(prompt)))
    for position, (token, value) in prompt_values.items():
        assert token == prompt[position]
        assert value == pytest.approx(float(logits[position - 1, token]), abs=1e-4)
