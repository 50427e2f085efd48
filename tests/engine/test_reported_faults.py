"""Faults that users of other engines reported of their KV cache and scheduler, and their kin.

Each test names the report. Faults that show at the HTTP server only are tested there:
disconnects (ROCm/ATOM#1562, vllm#9428) in tests/server/test_server_engine.py and
test_server_openai.py, prompts larger than the pool (vllm#39734) in
tests/server/process/test_process_refusals.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.contracts.logits_processor import HostLogitsProcessor
from octavo.core.contracts.observer import Observer
from octavo.core.errors import RequestTooLong
from octavo.core.registry import Registry
from octavo.engine.builder import build_engine
from octavo.engine.resolve import resolve
from octavo.frontend.config import load_config
from octavo.testing.fake_engine import (
    Collector,
    assert_clean,
    expected,
    make_fake_engine,
    request,
)
from octavo.testing.model_folder import write_model_folder

MANAGERS = ["paged", "radix", "none"]
PREEMPTION = ["recompute", "swap", "cost_model"]


def answers(engine, reqs, most=96):
    """Runs the requests; every one has the tokens of an undisturbed run, and nothing is left."""
    for req in reqs:
        engine.add(req)
    collector = Collector(engine).run()
    assert collector.tokens == {req.handle: expected(req, most) for req in reqs}
    assert_clean(engine)
    return engine.scheduler.stats()


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("preemption", PREEMPTION)
@pytest.mark.parametrize("manager", MANAGERS)
def test_prefix_hits_of_preempted_sequences(manager, preemption, in_flight):
    """nano-vllm#211, #233: a prefix hit after a preemption was an index error. Here most sequences
    are preempted, share a prefix with the others and with their own earlier life."""
    engine = make_fake_engine(
        manager=manager,
        preemption=preemption,
        num_swap_blocks=0 if preemption == "recompute" else 9,
        num_blocks=20,
        max_num_seqs=6,
        in_flight=in_flight,
    )
    prompts = [[7] * 8 + [h % 3] * (h % 6) for h in range(14)]
    reqs = [request(h, p, 24, ignore_eos=True) for h, p in enumerate(prompts, 1)]
    stats = answers(engine, reqs, 76)
    assert stats.num_preemptions > 5
    assert (stats.prefix_hits > 0) == (manager != "none")


@pytest.mark.parametrize("num_shared", [3, 4, 5, 16, 17])
@pytest.mark.parametrize("manager", ["paged", "radix"])
def test_only_computed_blocks_are_shared(manager, num_shared):
    """nano-vllm#208: a block was reused before it was computed, in the batch that computes it. All
    eight are admitted in one step: nobody finds anything; those who come a step later do."""
    engine = make_fake_engine(manager=manager, budget=400, max_num_seqs=16)
    together = [request(h, [5] * num_shared + [10 + h], 6, ignore_eos=True) for h in range(1, 9)]
    for req in together:
        engine.add(req)
    collector = Collector(engine)
    collector.step()
    assert engine.scheduler.num_running == 8
    assert engine.scheduler.kv.stats().prefix_hits == 0
    late = request(20, [5] * num_shared + [99], 6, ignore_eos=True)
    engine.add(late)
    collector.run()
    # Full blocks were computed: paged finds those that are shared, radix what of them is shared.
    hits = {"paged": num_shared // 4 * 4, "radix": min(num_shared, (num_shared + 1) // 4 * 4)}
    assert engine.scheduler.kv.stats().prefix_hits == hits[manager]
    assert collector.tokens == {req.handle: expected(req) for req in [*together, late]}


@pytest.mark.parametrize("manager", MANAGERS)
def test_prefix_caching_hits_on_a_cpu(tmp_path, manager):
    """vllm#17954: prefix caching was on and never hit on a CPU. The real worker: the second time
    the same tokens come out, with the prompt's full blocks from the cache."""
    folder = write_model_folder(tmp_path / "model", 256)
    config = load_config(
        mapping={
            "model": {"source": str(folder), "weight_source": "dummy"},
            "executor": {"device": "cpu", "num_threads": 1},
            "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
            "kv_cache": {"num_blocks": 40, "manager": manager},
        }
    )
    registry = Registry.discover()
    engine = build_engine(resolve(config, registry), registry)
    try:
        prompt = (np.arange(50) * 7 % 200).tolist()
        tokens, cached = {1: [], 2: []}, {}
        for handle, generated in tokens.items():
            engine.add(request(handle, prompt, 5, ignore_eos=True))
            while engine.has_work():
                outputs = engine.step()
                assert outputs is not None
                generated += outputs.token_ids[:, 0].tolist()
                cached |= outputs.cached
        assert tokens[1] == tokens[2]
        assert len(tokens[1]) == 5
        # radix: to the token, the last one of the prompt is always computed.
        assert cached == {1: 0, 2: {"paged": 48, "radix": 49, "none": 0}[manager]}
    finally:
        engine.close()


@pytest.mark.parametrize("manager", MANAGERS)
def test_a_prompt_larger_than_the_pool_blocks_nobody(manager):
    """vllm#39734: a prompt that fits max_model_len but not the KV pool blocked the queue for ever.
    It is refused with both numbers; one that just fits is served among others."""
    engine = make_fake_engine(manager=manager, num_blocks=9, max_model_len=96)
    small = [request(h, [h, 1], 6, ignore_eos=True) for h in (1, 2, 3)]
    engine.add(small[0])
    for length in (32, 33, 95):
        with pytest.raises(RequestTooLong, match=rf"{length} tokens.*KV cache holds 32"):
            engine.add(request(50, [1] * length))
    largest = request(60, [1] * 31, 9)
    engine.add(largest)
    for req in small[1:]:
        engine.add(req)
    collector = Collector(engine).run()
    assert collector.tokens == {r.handle: expected(r, 32) for r in [*small, largest]}
    assert len(collector.tokens[60]) == 1
    assert_clean(engine)


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("swap", [0, 1, 3, 60])
@pytest.mark.parametrize("preemption", ["swap", "cost_model"])
def test_swapping_never_stalls_and_never_aborts(preemption, swap, manager):
    """vllm#546, #787: a full swap space stalled everything, or aborted requests. Groups of four
    choices on a tiny pool, with no, little and ample host memory."""
    engine = make_fake_engine(
        manager=manager, preemption=preemption, num_blocks=14, num_swap_blocks=swap, in_flight=2
    )
    reqs = []
    for handle in range(1, 9):
        first = handle - (handle - 1) % 4
        parent = None if handle == first else first
        index = handle - first
        reqs.append(request(handle, [first] * 11, 20, parent=parent, index=index, ignore_eos=True))
    stats = answers(engine, reqs, 52)
    assert stats.num_preemptions > 0
    assert stats.num_swap_ins == stats.num_swap_outs <= stats.num_preemptions


class Counting(HostLogitsProcessor):
    """Keeps its own count of each sequence's tokens and compares it with what it is given."""

    def __init__(self):
        self.seen: dict[int, list[int]] = {}
        self.handles: dict[int, int] = {}
        self.output: dict[int, list[int]] = {}
        self.num_resumed = 0

    def attach(self, req):
        assert req.slot not in self.handles, "the slot's last user was not detached"
        output = req.output.tolist()
        assert output == self.output.get(req.handle, []), "an earlier life is told wrong"
        self.num_resumed += bool(output)
        self.handles[req.slot] = req.handle
        self.seen[req.slot] = [*req.prompt.tolist(), *output]
        return True

    def accept(self, slots, token_ids):
        for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True):
            self.seen[slot].append(token)
            self.output.setdefault(self.handles[slot], []).append(token)

    def detach(self, slot):
        del self.handles[slot], self.seen[slot]

    def mask(self, slots, bitmask):
        assert len(set(slots.tolist())) == len(slots)
        assert all(slot in self.seen for slot in slots.tolist()), "asked for a part of a prompt"


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("budget", [5, 64])
def test_processors_see_kept_tokens_only(budget, preemption, in_flight):
    """vllm#29045: a custom logits processor's state was corrupted by partial prefill and lost on
    preemption. Chunks of 5 tokens, a tiny pool: it accepts exactly what is generated, once."""
    counting = Counting()
    engine = make_fake_engine(
        host_processors=[counting],
        budget=budget,
        num_blocks=14,
        num_swap_blocks=20,
        preemption=preemption,
        max_num_seqs=5,
        in_flight=in_flight,
    )
    reqs = [request(h, [h] * (3 * h), 14, ignore_eos=True) for h in range(1, 7)]
    stats = answers(engine, reqs, 52)
    assert counting.output == {req.handle: expected(req, 52) for req in reqs}
    assert not counting.handles, "a slot was not detached"
    assert stats.num_preemptions > 0
    assert counting.num_resumed > 0


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("chunk", [None, 1, 3, 4])
def test_chunked_prefill_with_and_without_the_cache(chunk, caching, manager):
    """sglang#2282 (issue 2255): chunked prefill asserted with the cache disabled."""
    engine = make_fake_engine(
        manager=manager, prefix_caching=caching, max_chunk=chunk, budget=7, max_num_seqs=3
    )
    reqs = [request(h, [4] * 21 + [h], 6, ignore_eos=True) for h in range(1, 6)]
    stats = answers(engine, reqs)
    assert (stats.prefix_hits > 0) == (caching and manager != "none")
    widest = max(tokens for _, tokens in engine.executor.worker.steps)
    assert widest <= 7


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding", "swapped", "last step"])
def test_an_abort_frees_everything_at_once(when):
    """ROCm/ATOM#1562, vllm#9428: a request whose client had left went on generating."""
    engine = make_fake_engine(
        budget=8, max_num_seqs=2, num_blocks=12, num_swap_blocks=20, preemption="swap"
    )
    collector = Collector(engine)
    tokens = 20 if when == "swapped" else 3
    for handle in (1, 2, 3):
        engine.add(request(handle, [handle] * 11, tokens, ignore_eos=True))
    sequences = engine.scheduler.sequences

    def is_there(sequence):
        running = sequence.slot >= 0
        known = engine.scheduler.slots.num_tokens[sequence.slot] if running else 0
        computed = engine.scheduler.slots.num_computed[sequence.slot] if running else 0
        return {
            "waiting": not running and sequence.swapped is None,
            "prefilling": running and 0 < computed < 11,
            "decoding": running and known == 12,
            "swapped": sequence.swapped is not None,
            "last step": running and known == 13,
        }[when]

    found = []
    while not found:
        collector.step()
        found = [handle for handle, sequence in sequences.items() if is_there(sequence)]
    had = len(collector.tokens.get(found[0], []))
    engine.abort(found[:1])
    collector.run()
    assert collector.reasons[found[0]] == "abort"
    assert len(collector.tokens.get(found[0], [])) == had, "it went on generating"
    assert sorted(collector.reasons) == [1, 2, 3]
    assert_clean(engine)


class Broken(Observer):
    """Fails whatever it is told."""

    def on_step(self, record):
        raise ArithmeticError("the counter would be negative")

    def on_request(self, record):
        raise ArithmeticError("the counter would be negative")


class Ends(Observer):
    def __init__(self):
        self.reasons = []

    def on_request(self, record):
        self.reasons.append(record.finish_reason)


def test_metrics_are_never_fatal_and_count_aborts():
    """vllm#10430, #31503: an exception in a counter killed the engine; the count of aborted
    requests stayed 0."""
    ends = Ends()
    engine = make_fake_engine(observers=[("broken", Broken()), ("ends", ends)], max_num_seqs=2)
    for handle in range(1, 6):
        engine.add(request(handle, [handle, 1], 9, ignore_eos=True))
    collector = Collector(engine)
    collector.step()
    engine.abort([1, 5, 77])  # one that runs, one that waits, one that never was
    engine.abort([1])
    collector.run()
    assert sorted(collector.reasons.values()) == ["abort", "abort", "length", "length", "length"]
    assert sorted(ends.reasons) == sorted(collector.reasons.values())
    assert engine.metrics()["observer_failures"]["broken"] > 5
    assert_clean(engine)
