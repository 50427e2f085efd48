"""Built-in logits processors against a naive reference, over many lives in few slots."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.contracts import NoOptions
from octavo.core.contracts.logits_processor import LogitsProcessorContext
from octavo.core.messages import AdmittedRow
from octavo.core.sampling_params import SamplingParams
from octavo.engine.worker.sampling_state import ProcessorSet
from octavo.plugins.logits_processors import PROVIDERS
from octavo.plugins.logits_processors.allowed_tokens import AllowedTokensProcessor
from octavo.plugins.logits_processors.bad_words import BadWordsProcessor
from octavo.plugins.logits_processors.bias import BiasProcessor
from octavo.plugins.logits_processors.min_tokens import MinTokensProcessor
from octavo.plugins.logits_processors.penalties import PenaltiesProcessor

V, SLOTS = 12, 5
EOS = 11
TYPES = {
    "bias": BiasProcessor,
    "allowed_tokens": AllowedTokensProcessor,
    "penalties": PenaltiesProcessor,
    "bad_words": BadWordsProcessor,
    "min_tokens": MinTokensProcessor,
}


def make_set(*names: str) -> ProcessorSet:
    context = LogitsProcessorContext(V, SLOTS, 64, torch.device("cpu"))
    names = names or tuple(TYPES)
    return ProcessorSet([TYPES[name](NoOptions(), context) for name in names], SLOTS, names)


@dataclass
class Life:
    """A request, as a naive processor sees it."""

    params: SamplingParams
    prompt: list[int]
    output: list[int] = field(default_factory=list)

    def row(self, slot: int) -> AdmittedRow:
        return AdmittedRow(
            slot=slot,
            handle=slot,
            token_ids=np.array(self.prompt + self.output, np.int32),
            num_prompt=len(self.prompt),
            num_computed=0,
            blocks=np.zeros((1, 1), np.int32),
            sampling=self.params,
            seed=0,
            eos_token_ids=[EOS],
        )

    def edit(self, logits: list[np.float32]) -> None:
        params = self.params
        for token, bias in (params.logit_bias or {}).items():
            logits[token] += np.float32(bias)
        if params.allowed_token_ids is not None:
            for token in set(range(V)) - set(params.allowed_token_ids):
                logits[token] = np.float32(-np.inf)
        repetition = np.float32(params.repetition_penalty)
        for token in set(self.prompt) | set(self.output):
            if logits[token] > 0:
                logits[token] /= repetition
            else:
                logits[token] *= repetition
        for token in set(self.output):
            count = np.float32(self.output.count(token))
            logits[token] -= np.float32(params.frequency_penalty) * count
            logits[token] -= np.float32(params.presence_penalty)
        for word in params.bad_words_token_ids or ():
            *before, last = word
            if not before or self.output[-len(before) :] == before:
                logits[last] = np.float32(-np.inf)
        if len(self.output) < params.min_tokens:
            ends = [] if params.ignore_eos else [EOS]
            for token in ends + (params.stop_token_ids or []):
                logits[token] = np.float32(-np.inf)


TOKEN = st.integers(0, V - 1)
PARAMS = st.builds(
    SamplingParams,
    logit_bias=st.none() | st.dictionaries(TOKEN, st.floats(-3, 3, width=32), max_size=4),
    allowed_token_ids=st.none() | st.lists(TOKEN, min_size=1, max_size=8),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.4]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.9, -1.1]),
    bad_words_token_ids=st.none()
    | st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=3),
    min_tokens=st.sampled_from([0, 0, 2, 5]),
    stop_token_ids=st.none() | st.lists(TOKEN, max_size=2),
    ignore_eos=st.booleans(),
)
# Output of few different tokens, so that bad words of several tokens do match.
OUTPUT_TOKEN = st.integers(0, 2)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_lives_of_requests(data: st.DataObject) -> None:
    processors = make_set()
    lives: dict[int, Life] = {}
    preempted: list[Life] = []
    generator = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    for _ in range(data.draw(st.integers(1, 25))):
        kind = data.draw(st.sampled_from(["admit", "end", "preempt", "rollback", *["step"] * 4]))
        free = [slot for slot in range(SLOTS) if slot not in lives]
        if kind == "admit" and free:
            slot = data.draw(st.sampled_from(free))
            fresh = Life(data.draw(PARAMS), data.draw(st.lists(TOKEN, min_size=1, max_size=6)))
            lives[slot] = preempted.pop() if preempted and data.draw(st.booleans()) else fresh
            processors.attach(lives[slot].row(slot))
        elif not lives:
            continue
        elif kind in ("end", "preempt"):
            slot = data.draw(st.sampled_from(sorted(lives)))
            processors.release(slot)
            life = lives.pop(slot)
            if kind == "preempt":
                preempted.append(life)
        elif kind == "rollback":
            slot = data.draw(st.sampled_from(sorted(lives)))
            life = lives[slot]
            # What an earlier life generated is settled: only tokens of this one can be taken back.
            processors.release(slot)
            processors.attach(life.row(slot))
            extra = data.draw(st.lists(OUTPUT_TOKEN, min_size=1, max_size=3))
            for token in extra:
                processors.accept(np.array([slot], np.intp), np.array([token], np.int32))
            processors.rollback(slot, len(extra))
        else:
            step(data, processors, lives, generator)
    for slot in lives:
        processors.release(slot)
    assert not processors.errors
    assert not processors.active


def step(
    data: st.DataObject,
    processors: ProcessorSet,
    lives: dict[int, Life],
    generator: np.random.Generator,
) -> None:
    batch = data.draw(st.permutations(sorted(lives)))
    batch = batch[: data.draw(st.integers(1, len(batch)))]
    slots = np.array(batch, np.intp)
    logits = generator.normal(0, 2, (len(batch), V)).astype(np.float32)
    logits[generator.random(logits.shape) < 0.1] = -np.inf
    expected = [list(row) for row in logits]
    for life, row in zip([lives[slot] for slot in batch], expected, strict=True):
        life.edit(row)
    tensor = torch.from_numpy(logits)
    processors.apply(tensor, slots)
    assert tensor.tolist() == [[float(value) for value in row] for row in expected]
    tokens = [data.draw(OUTPUT_TOKEN) for _ in batch]
    processors.accept(slots, np.array(tokens, np.int32))
    for slot, token in zip(batch, tokens, strict=True):
        lives[slot].output.append(token)


def apply(processors: ProcessorSet, slots: list[int], value: float = 0.0) -> torch.Tensor:
    logits = torch.full((len(slots), V), value)
    processors.apply(logits, np.array(slots, np.intp))
    return logits


def accept(processors: ProcessorSet, slot: int, *tokens: int) -> None:
    for token in tokens:
        processors.accept(np.array([slot], np.intp), np.array([token], np.int32))


def masked(logits: torch.Tensor) -> list[int]:
    return torch.isneginf(logits).nonzero().squeeze(1).tolist()


def test_a_mask_wins_over_a_bias() -> None:
    processors = make_set()
    params = SamplingParams(logit_bias={EOS: 100.0, 3: 1.0}, min_tokens=1)
    processors.attach(Life(params, [1]).row(0))
    assert masked(apply(processors, [0])[0]) == [EOS]
    accept(processors, 0, 3)
    assert apply(processors, [0])[0, EOS] == 100.0


def test_nothing_is_left_for_the_next_user_of_a_slot() -> None:
    processors = make_set()
    params = SamplingParams(
        logit_bias={1: 5.0},
        allowed_token_ids=[1, 2, EOS],
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        bad_words_token_ids=[[2], [1, 1]],
        min_tokens=9,
    )
    processors.attach(Life(params, [1, 2]).row(3))
    accept(processors, 3, 1, 1)
    processors.release(3)
    processors.attach(Life(SamplingParams(), [1, 2]).row(3))
    assert not processors.active
    # A user of every processor, whose parameters do nothing for these logits.
    other = SamplingParams(
        logit_bias={0: 0.0},
        allowed_token_ids=list(range(V)),
        presence_penalty=0.5,
        bad_words_token_ids=[[5, 5]],
        min_tokens=1,
        stop_token_ids=[4],
        ignore_eos=True,
    )
    processors.attach(Life(other, [1, 2]).row(3))
    logits = apply(processors, [3], 1.0)[0]
    assert masked(logits) == [4]
    assert logits[:4].tolist() == [1.0] * 4


def test_the_repetition_penalty_counts_the_prompt_and_the_others_do_not() -> None:
    processors = make_set("penalties")
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    processors.attach(Life(params, [1, 1, 2], [3, 3]).row(0))
    assert apply(processors, [0], 4.0)[0, :5].tolist() == [4.0, 2.0, 2.0, 0.75, 4.0]


def test_penalties_of_a_long_sequence() -> None:
    """The table of tokens grows while other slots are attached."""
    processors = make_set("penalties")
    processors.attach(Life(SamplingParams(frequency_penalty=1.0), [0]).row(0))
    processors.attach(Life(SamplingParams(repetition_penalty=2.0), [1]).row(1))
    for _ in range(300):
        accept(processors, 0, 5)
    logits = apply(processors, [1, 0], 8.0)
    assert logits[0].tolist() == [8.0, 4.0] + [8.0] * 10
    assert logits[1].tolist() == [8.0] * 5 + [-292.0] + [8.0] * 6


def test_bad_words_match_the_output_only() -> None:
    processors = make_set("bad_words")
    params = SamplingParams(bad_words_token_ids=[[1, 2, 3], [7]])
    processors.attach(Life(params, [1, 2]).row(0))
    assert masked(apply(processors, [0])[0]) == [7]
    accept(processors, 0, 1)
    assert masked(apply(processors, [0])[0]) == [7]
    accept(processors, 0, 2)
    assert masked(apply(processors, [0])[0]) == [3, 7]
    processors.rollback(0, 1)
    assert masked(apply(processors, [0])[0]) == [7]


def test_bad_words_longer_than_the_output() -> None:
    processors = make_set("bad_words")
    params = SamplingParams(bad_words_token_ids=[[1, 1, 2], [0, 3], [0, 1, 4]])
    processors.attach(Life(params, [1]).row(0))
    assert masked(apply(processors, [0])[0]) == []
    accept(processors, 0, 1)
    assert masked(apply(processors, [0])[0]) == []
    accept(processors, 0, 1)
    assert masked(apply(processors, [0])[0]) == [2]


def test_penalties_after_a_rollback() -> None:
    processors = make_set("penalties")
    params = SamplingParams(frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=2.0)
    processors.attach(Life(params, [0], [1]).row(0))
    accept(processors, 0, 1, 2, 1, 2)
    processors.rollback(0, 3)
    assert apply(processors, [0], 8.0)[0, :4].tolist() == [4.0, 1.5, 8.0, 8.0]
    accept(processors, 0, 2)
    assert apply(processors, [0], 8.0)[0, :4].tolist() == [4.0, 1.5, 2.5, 8.0]


def test_a_rollback_beside_a_longer_sequence() -> None:
    processors = make_set("penalties")
    params = SamplingParams(repetition_penalty=2.0)
    processors.attach(Life(params, [0]).row(0))
    processors.attach(Life(params, [4] * 9).row(1))
    accept(processors, 0, 5, 6)
    processors.rollback(0, 2)
    logits = apply(processors, [0, 1], 8.0)
    assert logits[0].tolist() == [4.0] + [8.0] * 11


def test_allowed_tokens_of_two_users_of_a_slot() -> None:
    processors = make_set("allowed_tokens")
    for allowed in ([1, 2], [2, 3], [0]):
        processors.attach(Life(SamplingParams(allowed_token_ids=allowed), [1]).row(2))
        processors.attach(Life(SamplingParams(allowed_token_ids=[5]), [1]).row(0))
        for slots in ([2, 0], [0, 2], [1, 2, 0]):
            logits = apply(processors, slots)
            row = logits[slots.index(2)]
            assert masked(row) == [t for t in range(V) if t not in allowed]
        processors.release(2)


def test_min_tokens_after_a_preemption_and_a_rollback() -> None:
    processors = make_set("min_tokens")
    params = SamplingParams(min_tokens=3, stop_token_ids=[5, 10_000])
    processors.attach(Life(params, [1], [2, 2]).row(0))
    assert masked(apply(processors, [0])[0]) == [5, EOS]
    accept(processors, 0, 2)
    assert masked(apply(processors, [0])[0]) == []
    processors.rollback(0, 1)
    assert masked(apply(processors, [0])[0]) == [5, EOS]
    processors.attach(Life(params, [1], [2, 2, 2]).row(1))
    assert masked(apply(processors, [1])[0]) == []


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {V: 1.0}}, f"logit_bias has token id {V}, expected 0 to {V - 1}"),
        (
            {"allowed_token_ids": [0, 99]},
            f"allowed_token_ids has token id 99, expected 0 to {V - 1}",
        ),
        ({"bad_words_token_ids": [[1, 99]]}, f"bad_words has token id 99, expected 0 to {V - 1}"),
        ({"bad_words_token_ids": [[1], []]}, "bad_words has a word without tokens"),
    ],
)
def test_a_bad_parameter_fails_its_request_alone(params: dict[str, Any], message: str) -> None:
    processors = make_set()
    processors.attach(Life(SamplingParams(**params), [1]).row(0))
    processors.attach(Life(SamplingParams(logit_bias={2: 1.0}), [1]).row(1))
    assert processors.errors == {0: (message, False)}
    logits = apply(processors, [0, 1])
    assert logits[0].tolist() == [0.0] * V
    assert logits[1, 2] == 1.0


def test_the_providers_are_defaults_in_the_documented_order() -> None:
    ranked = sorted(PROVIDERS, key=lambda provider: -provider.rank)
    assert [provider.name for provider in ranked] == list(TYPES)
    assert all(provider.rank > 0 for provider in ranked)
    for provider in ranked:
        module, _, attribute = str(provider.factory).partition(":")
        assert TYPES[provider.name].__module__ == module
        assert TYPES[provider.name].__name__ == attribute


def test_listing_providers_imports_no_torch() -> None:
    code = (
        "import sys, octavo.plugins.samplers, octavo.plugins.logits_processors;"
        "import octavo.kernels.random;"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
