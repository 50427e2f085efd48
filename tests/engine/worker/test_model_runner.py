"""The model runner, driven by hand-made plans, against transformers."""

from __future__ import annotations

import dataclasses
import weakref

import numpy as np
import pytest
import torch

from octavo.core.errors import ConfigError
from octavo.core.messages import AdmittedRow, LogitMasks, StepPlan
from octavo.core.sampling_params import SamplingParams

POOL = 16 * 16 + 1


@pytest.fixture(scope="module")
def runner(tiny_llama):
    made = tiny_llama.runner()
    made.load()
    made.allocate_kv(POOL)
    yield made
    made.close()


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


@pytest.fixture(autouse=True)
def fresh(runner):
    """Every test begins with free slots and a pool of NaN."""
    for slot in range(6):
        runner._sampling.release(slot)
        runner._processors.release(slot)
    runner.mirror.clear()
    runner.allocate_kv(POOL)
    runner._builder._layout = None


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 11])
def test_chunks_generate_what_transformers_does(runner, driver, tiny_llama, chunk):
    tokens = prompt(11)
    driver.admit(0, tokens)
    while driver.computed[0] < len(tokens):
        sampled = driver.run(runner, {0: min(chunk, len(tokens) - driver.computed[0])})
    generated = [sampled[0]]
    for _ in range(9):
        generated.append(driver.run(runner, {0: 1})[0])
    assert generated == tiny_llama.generate(tokens, 10)


def test_logits_equal_transformers(runner, driver, tiny_llama):
    tokens = prompt(13, seed=3)
    driver.admit(2, tokens)
    driver.run(runner, {2: 6})
    runner.forward(driver.plan({2: 7}))
    expected = tiny_llama.logits(tokens)[-1]
    torch.testing.assert_close(runner._step[1].logits[0], expected, atol=1e-4, rtol=1e-4)
    runner.sample(None)


def test_rows_of_all_sorts_in_one_batch(runner, driver, tiny_llama):
    """Decodes, whole prompts, chunks and one-token chunks side by side; slots come and go."""
    prompts = {slot: prompt(5 + 3 * slot, seed=slot) for slot in (4, 1, 3, 0, 5)}
    generated = {slot: [] for slot in prompts}

    def step(counts):
        for slot, token in driver.run(runner, counts).items():
            generated[slot].append(token)

    for slot in (4, 1):
        driver.admit(slot, prompts[slot])
    step({4: 17, 1: 8})
    driver.admit(3, prompts[3])
    step({4: 1, 1: 1, 3: 1})
    driver.admit(0, prompts[0])
    step({3: 12, 1: 1, 0: 5, 4: 1})
    step({3: 1, 1: 1, 0: 1, 4: 1})
    step({4: 1, 0: 1})
    first = {slot: list(tokens) for slot, tokens in generated.items()}
    driver.release(4)
    driver.admit(5, prompts[5])
    driver.admit(4, prompts[4])
    step({0: 1, 5: 20, 4: 16})
    step({0: 1, 5: 1, 1: 1, 4: 1})
    step({0: 1, 5: 1, 1: 1, 4: 1})
    assert len(generated[4]) == 7
    assert generated[4][5:] == first[4][:2]
    del generated[4]
    for slot, tokens in generated.items():
        assert tokens == tiny_llama.generate(prompts[slot], len(tokens)), f"slot {slot}"
        assert tokens


def test_a_resumed_sequence_continues(runner, driver, tiny_llama):
    """Preempted by recompute: admitted anew with its output, on another slot."""
    tokens = prompt(6)
    driver.admit(0, tokens)
    known = [*tokens, driver.run(runner, {0: 6})[0]]
    known.append(driver.run(runner, {0: 1})[0])
    driver.release(0)
    driver.admit(3, known, num_prompt=6)
    known.append(driver.run(runner, {3: 8})[3])
    assert known[6:] == tiny_llama.generate(tokens, 3)


def test_copied_blocks_continue_a_prefix(runner, driver, tiny_llama):
    """A fork: two tokens of the parent's second block are copied, then both write into theirs."""
    tokens = prompt(6)
    driver.admit(0, tokens)
    parent = [driver.run(runner, {0: 6})[0]]
    driver.admit(1, tokens)
    row = driver.admitted[0]
    row.num_computed = driver.computed[1] = 5
    row.blocks = np.asarray([[driver.block(0, 0), driver.block(1, 1)]], np.int32)
    driver.told[1] = 2
    copies = np.asarray([[0, 0, driver.block(0, 1), driver.block(1, 1), 1]], np.int32).T
    sampled = driver.run(runner, {0: 1, 1: 1}, copies=copies)
    parent.append(sampled[0])
    child = [sampled[1]]
    for _ in range(4):
        sampled = driver.run(runner, {0: 1, 1: 1})
        parent.append(sampled[0])
        child.append(sampled[1])
    assert parent == tiny_llama.generate(tokens, 6)
    assert child == parent[:5]


def test_prompt_and_sampled_logprobs(runner, driver, tiny_llama):
    tokens = prompt(10, seed=5)
    driver.admit(0, prompt(4), logprobs=None)
    driver.admit(1, tokens, logprobs=3, prompt_logprobs=2)
    found = {}
    for count in (1, 4, 3, 2):
        counts = {1: count} if count != 3 else {0: 4, 1: 3}
        plan = driver.plan(counts)
        runner.forward(plan)
        result = runner.sample(None)
        driver.take(plan, result)
        for item in result.prompt_logprobs:
            assert item.handle == 101
            assert item.logprobs.rows.tolist() == list(
                range(item.start, item.start + len(item.logprobs.rows))
            )
            for i, row in enumerate(item.logprobs.rows.tolist()):
                found[row] = (item.logprobs.token_ids[i].tolist(), item.logprobs.values[i])
    expected = tiny_llama.logits(tokens).log_softmax(-1)
    assert sorted(found) == list(range(1, 10))
    for position, (ids, values) in found.items():
        row = expected[position - 1]
        assert ids == [tokens[position], *row.topk(2).indices.tolist()]
        np.testing.assert_allclose(values, row[ids].numpy(), atol=1e-4)
    sampled = result.logprobs
    assert sampled.rows.tolist() == [0]
    assert sampled.num.tolist() == [3]
    assert sampled.ranks.tolist() == [1]
    assert sampled.token_ids[0, 0] == driver.known[1][-1]
    np.testing.assert_allclose(
        sampled.values[0, 1:], expected[-1].topk(3).values.numpy(), atol=1e-4
    )


def test_a_mask_forbids_and_a_row_without_tokens_fails_alone(runner, driver, tiny_llama):
    tokens = {slot: prompt(5, seed=slot) for slot in (0, 1, 2)}
    for slot, known in tokens.items():
        driver.admit(slot, known)
    best = {
        slot: tiny_llama.logits(known)[-1].topk(2).indices.tolist()
        for slot, known in tokens.items()
    }
    plan = driver.plan(dict.fromkeys(tokens, 5))
    runner.forward(plan)
    bitmask = np.full((2, 4), -1, np.int32)
    bitmask[0] = 0
    bits = np.unpackbits(bitmask[1:].view(np.uint8), bitorder="little")
    bits[best[2][0]] = 0
    bitmask[1] = np.packbits(bits, bitorder="little").view(np.int32)
    result = runner.sample(LogitMasks(rows=np.asarray([1, 2], np.int32), bitmask=bitmask))
    assert list(result.errors) == [1]
    assert "masked" in result.errors[1]
    assert result.token_ids[0, 0] == best[0][0]
    assert result.token_ids[2, 0] == best[2][1]


def test_a_result_that_is_waited_for_holds_no_logits(runner, driver, monkeypatch):
    """The next step, which is launched before it is taken, has the memory."""
    made = []
    compute = runner.model.compute_logits

    def kept(hidden):
        logits = compute(hidden)
        made.extend([weakref.ref(hidden), weakref.ref(logits)])
        return logits

    monkeypatch.setattr(runner.model, "compute_logits", kept)
    driver.admit(0, prompt(5))
    runner.forward(driver.plan({0: 5}))
    assert [tensor() is None for tensor in made] == [False, False]
    result = runner.launch(None)
    assert [tensor() is None for tensor in made] == [True, True]
    assert result().token_ids.shape == (1, 1)


def test_nan_in_one_sequence_stays_there(runner, driver, tiny_llama):
    """Also when another sequence gets its blocks."""
    driver.admit(0, prompt(5))
    driver.admit(1, prompt(5, seed=1))
    driver.run(runner, {0: 5, 1: 5})
    with torch.inference_mode():
        for cache in runner.pool.layers:
            cache.k[driver.block(0, 1), 0] = float("nan")
            cache.v[driver.block(0, 1), 0] = float("nan")
    plan = driver.plan({0: 1, 1: 1})
    runner.forward(plan)
    result = runner.sample(None)
    assert list(result.errors) == result.faults == [0]
    driver.take(plan, result)
    driver.release(0)
    driver.admit(0, prompt(2, seed=8))
    driver.run(runner, {0: 2, 1: 1})
    for _ in range(3):
        driver.run(runner, {0: 1, 1: 1})
    assert driver.known[0][2:] == tiny_llama.generate(prompt(2, seed=8), 4)
    assert driver.known[1][5:] == tiny_llama.generate(prompt(5, seed=1), 6)


def test_the_report(tiny_llama):
    runner = tiny_llama.runner(max_num_batched_tokens=None)
    report = runner.load()
    assert all(layer.cache is None for layer in runner._attention.layers.values())
    runner.close()
    assert report.num_parameters == sum(p.numel() for p in tiny_llama.reference.parameters())
    assert report.block_bytes == 3 * 2 * 4 * 2 * 8 * 4
    assert report.vocab_size == 97
    assert report.kv_budget == (6 * 16 + 1) * report.block_bytes
    assert 64 <= report.step_token_limit <= 8192
    assert report.step_token_limit % 16 == 0
    assert {"build model", "load weights", "profile"} <= set(report.phases)


def test_a_pool_needs_a_block_beside_the_null_block(tiny_llama):
    runner = tiny_llama.runner()
    runner.load()
    with pytest.raises(ConfigError, match="at least 2 blocks"):
        runner.allocate_kv(1)
    runner.close()


def test_every_class_of_decodes_ran_before_the_first_request(tiny_llama, monkeypatch):
    runner = tiny_llama.runner()
    runner.load()
    runner.asynchronous = True  # as on a GPU
    rows, drawn = [], []
    forward, sample = runner._graph_runner.forward, runner._sampler.sample
    monkeypatch.setattr(
        runner._graph_runner,
        "forward",
        lambda ids, positions, decodes: rows.append(decodes) or forward(ids, positions, decodes),
    )
    monkeypatch.setattr(
        runner._sampler, "sample", lambda *args: drawn.append(len(args[0])) or sample(*args)
    )
    warm = runner.allocate_kv(POOL)
    assert (rows, drawn) == ([1, 2, 4, 6], [1])
    assert "first decodes" in warm.phases
    assert all(not layer.k[0].any() for layer in runner.pool.layers)
    runner.close()


def test_layers_in_two_groups(tiny_llama, monkeypatch):
    """Each group has block tables of its own; here the second one's blocks are the first's,
    reversed."""
    from octavo.models.families.decoder import Decoder

    plain = Decoder.kv_specs
    monkeypatch.setattr(
        Decoder,
        "kv_specs",
        lambda self: [dataclasses.replace(spec, group=spec.layer % 2) for spec in plain(self)],
    )
    runner = tiny_llama.runner()
    runner.load()
    runner.allocate_kv(40)
    tokens = prompt(7)
    row = AdmittedRow(
        slot=0,
        handle=1,
        token_ids=np.asarray(tokens, np.int32),
        num_prompt=7,
        num_computed=0,
        blocks=np.asarray([[5, 6], [6, 5]], np.int32),
        sampling=SamplingParams(temperature=0),
        seed=0,
    )
    known = list(tokens)
    for count in (7, 1, 1):
        runner.forward(
            StepPlan(
                step=0,
                slots=np.zeros(1, np.int32),
                counts=np.asarray([count], np.int32),
                num_decodes=int(count == 1),
                sample_rows=np.zeros(1, np.int32),
                layout=0,
                released=np.zeros(0, np.int32),
                appended=np.asarray(
                    [(0, 0, 2, 7), (1, 0, 2, 9)] if len(known) == 9 else [], np.int32
                )
                .reshape(-1, 4)
                .T,
                copies=np.zeros((5, 0), np.int32),
                admitted=[row] if count == 7 else [],
            )
        )
        known.append(int(runner.sample(None).token_ids[0, 0]))
    assert known[7:] == tiny_llama.generate(tokens, 3)
    used = [cache.k[:, 0, 0, 0].isnan().logical_not() for cache in runner.pool.layers]
    assert [mask.nonzero().flatten().tolist() for mask in used] == [
        [0, 5, 6, 7],
        [0, 5, 6, 9],
        [0, 5, 6, 7],
    ]
    runner.close()


def test_memory_of_sampling_is_measured_with_filters_in_every_row(runner, driver, monkeypatch):
    sample, seen = runner._sampler.sample, []

    def spy(logits, batch):
        seen.append((len(logits), batch.any_top_p, batch.any_min_p, batch.any_top_k))
        return sample(logits, batch)

    monkeypatch.setattr(runner._sampler, "sample", spy)
    with torch.inference_mode():
        runner._probe_sampling(torch.randn(6, 32))
    assert seen == [(6, True, True, False)]
    # Nothing of it stays: the next greedy request is greedy.
    tokens = prompt(5)
    driver.admit(0, tokens)
    driver.run(runner, {0: 5})
    assert seen[1] == (1, False, False, False)
