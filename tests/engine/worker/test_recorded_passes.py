"""Engines whose decodes run from recorded passes, as they run from CUDA graphs: the tokens of eager
engines, whatever comes and goes. See `graph_recording`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from octavo.backends.graph_runners.cuda_graph import CudaGraphRunner
from octavo.backends.graph_runners.options import CompileOptions, CudaGraphOptions
from octavo.core.contracts import NoOptions
from octavo.core.contracts.attention_backend import AttentionBackend, KVLayout
from octavo.core.sampling_params import SamplingParams
from octavo.engine.worker.model_runner import ModelRunner
from octavo.testing.graph_recording import RecordingCapture

POOL = 16 * 16 + 1
SIZES = [1, 2, 4, 6]


class FixedAttention(AttentionBackend):
    """Decodes by operators whose shapes depend on the number of rows alone, over all of a row's
    block table, from where the batch lies."""

    graph_support = "decode"

    def __init__(self, context):
        self._context = context
        self._plain = None

    @staticmethod
    def supports(spec, platform):
        return None

    @staticmethod
    def kv_layouts(spec):
        return [KVLayout(("block", "token", "head", "kv", "dim"))]

    def plan(self, batch):
        self._batch = batch

    def run(self, layer, q, k, v, out):
        batch, spec = self._batch, layer.spec
        size, kv_heads = layer.k_cache.shape[1:3]
        block, offset = batch.slot_mapping // size, batch.slot_mapping % size
        layer.k_cache.index_put_((block, offset), k)
        layer.v_cache.index_put_((block, offset), v)
        rows = torch.arange(batch.num_rows)
        counts = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
        row_of = rows
        if batch.num_decodes != batch.num_rows:
            row_of = torch.repeat_interleave(rows, counts.long())
        table = batch.block_table.index_select(0, row_of).long()
        keys = layer.k_cache[table].flatten(1, 2)
        values = layer.v_cache[table].flatten(1, 2)
        group = spec.num_heads // kv_heads
        scores = torch.einsum("thd,tjhd->thj", q, keys.repeat_interleave(group, dim=2)) * spec.scale
        places = torch.arange(keys.shape[1])
        hidden = places > batch.positions[:, None]
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
        values = values.repeat_interleave(group, dim=2).nan_to_num()
        out.copy_(torch.einsum("thj,tjhd->thd", weights, values))


@pytest.fixture
def recorded(tiny_llama):
    """A runner that records every size, and what records."""
    capture = RecordingCapture()

    def make(attention, sampler=None, **settings):
        plain = tiny_llama.runner(**settings)
        options = CudaGraphOptions(capture_sizes=SIZES, compile=CompileOptions(backend="eager"))
        changes = {
            "attention_backend": attention,
            "graph_runner": lambda context: CudaGraphRunner(options, context, lambda: capture),
            "graph_batch_sizes": tuple(SIZES),
        }
        if sampler is not None:
            changes["sampler"] = sampler
        runner = ModelRunner(plain.settings, dataclasses.replace(plain._factories, **changes))
        runner.load()
        runner.allocate_kv(POOL)
        return runner

    return make, capture


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


def test_rows_come_and_go(recorded, driver, tiny_llama):
    make, capture = recorded
    runner = make(FixedAttention)
    prompts = {slot: prompt(5 + 3 * slot, seed=slot) for slot in (4, 1, 3, 0, 5)}
    generated = {slot: [] for slot in prompts}

    def step(counts):
        before = capture.num_replays
        for slot, token in driver.run(runner, counts).items():
            generated[slot].append(token)
        return capture.num_replays - before

    for slot in (4, 1):
        driver.admit(slot, prompts[slot])
    assert step({4: 17, 1: 8}) == 0
    for _ in range(6):
        assert step({4: 1, 1: 1}) == 1
    driver.admit(3, prompts[3])
    assert step({4: 1, 1: 1, 3: 14}) == 0
    for _ in range(5):
        assert step({4: 1, 1: 1, 3: 1}) == 1  # padded to 4
    assert step({3: 1}) == 1
    assert step({1: 1, 4: 1}) == 1
    driver.admit(0, prompts[0])
    driver.admit(5, prompts[5])
    assert step({0: 5, 5: 20}) == 0
    for _ in range(3):
        assert step({0: 1, 5: 1, 1: 1, 4: 1, 3: 1}) == 1
    for slot, tokens in generated.items():
        assert tokens == tiny_llama.generate(prompts[slot], len(tokens)), f"slot {slot}"
    runner.close()


def triton_parts():
    """The backend and the sampler whose kernels run in Triton's interpreter here."""
    pytest.importorskip("triton")
    from octavo.backends.triton.attention import TritonAttention
    from octavo.backends.triton.options import TritonAttentionOptions
    from octavo.backends.triton.sampler import TritonSampler

    return (
        lambda context: TritonAttention(TritonAttentionOptions(), context),
        lambda context: TritonSampler(NoOptions(), context),
    )


@pytest.mark.slow
def test_the_triton_backend_and_sampler_in_recorded_passes(recorded, driver, tiny_llama):
    make, capture = recorded
    runner = make(*triton_parts(), block_size=8)
    driver.block_size, driver.blocks_each = 8, 8
    assert capture.num_captures == 2 * (len(SIZES) + 2)  # passes and draws; two sizes for a trial
    prompts = {slot: prompt(4 + 3 * slot, seed=slot) for slot in (2, 0, 1)}
    generated = {slot: [] for slot in prompts}
    for slot, tokens in prompts.items():
        driver.admit(slot, tokens)
    for counts in ({2: 10, 0: 4, 1: 7}, {2: 1, 0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}, {2: 1}):
        before = capture.num_replays
        for slot, token in driver.run(runner, counts).items():
            generated[slot].append(token)
        decodes = all(count == 1 for count in counts.values())
        assert capture.num_replays - before == (2 if decodes else 0)
    for slot, tokens in generated.items():
        assert tokens == tiny_llama.generate(prompts[slot], len(tokens)), f"slot {slot}"
    runner.close()


PARAMS = {
    "greedy": [{"temperature": 0.0}] * 3,
    "drawn": [{"temperature": 0.9}] * 3,
    "both": [{"temperature": 0.0}, {"temperature": 1.3}, {"temperature": 0.0}],
    "filtered": [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 5}, {"temperature": 0.7}],
    "logprobs": [{"temperature": 0.0, "logprobs": 2}, {"temperature": 0.9}, {"temperature": 0.0}],
}


def test_draws_of_recorded_passes(recorded, new_driver, tiny_llama):
    """In turn, so that no parameters of an earlier batch may linger at the fixed addresses."""
    make, capture = recorded
    _, sampler = triton_parts()
    runner = make(FixedAttention, sampler)
    plain = tiny_llama.runner()
    plain.load()
    plain.allocate_kv(POOL)
    for name in ("drawn", "greedy", "both", "greedy", "filtered", "drawn", "logprobs", "greedy"):
        tokens = []
        for runs in (plain, runner):
            driver = new_driver()
            for slot, sampling in enumerate(PARAMS[name]):
                driver.admit(slot, prompt(5 + slot, seed=slot), params=SamplingParams(**sampling))
            got = [driver.run(runs, {0: 5, 1: 6, 2: 7})]
            for _ in range(3):
                before = capture.num_replays
                got.append(driver.run(runs, {0: 1, 1: 1, 2: 1}))
                replayed = capture.num_replays - before
                expected = 1 if name in ("filtered", "logprobs") else 2
                assert replayed == (0 if runs is plain else expected), name
            tokens.append(got)
        assert tokens[0] == tokens[1], name
    runner.close()
    plain.close()


def test_a_draw_that_cannot_be_captured_is_launched_step_by_step(recorded, driver, tiny_llama):
    """It waits for the device; the passes stay captured, and the report names it."""
    make, capture = recorded
    _, triton_sampler = triton_parts()

    def waiting(context):
        sampler = triton_sampler(context)
        sample = sampler.sample

        def look(logits, batch):
            assert bool((logits.sum() != 0.5).item())
            return sample(logits, batch)

        sampler.sample = look
        return sampler

    runner = make(FixedAttention, waiting)
    (note,) = runner._graph_runner.captured().notes
    assert "could not capture the draw of tokens" in note
    assert "not permitted when stream is capturing" in note
    tokens = prompt(6)
    driver.admit(0, tokens)
    generated = [driver.run(runner, {0: 6})[0]]
    for _ in range(3):
        before = capture.num_replays
        generated.append(driver.run(runner, {0: 1})[0])
        assert capture.num_replays - before == 1
    assert generated == tiny_llama.generate(tokens, 4)
    runner.close()
