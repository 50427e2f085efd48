"""Stepping ahead: a step is planned and launched before the host has the tokens of the one before
it, which reach it on the device. Nothing that a caller sees may differ from one step at a time.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.core.contracts import Provider, hookimpl
from octavo.core.contracts.logits_processor import HostLogitsProcessor
from octavo.core.messages import EngineRequest
from octavo.core.sampling_params import SamplingParams
from octavo.testing.fake_engine import assert_clean
from octavo.testing.tiny_model import make_engine, write_tiny_model

VOCABULARY = 256
"""Token ids of the prompts; the model knows a few more."""


class NoneTwice(HostLogitsProcessor):
    """Forbids what the sequence generated last: a mask needs the token of the step before."""

    def __init__(self, options, context):
        self.last: dict[int, int] = {}

    def attach(self, request):
        if not request.params.extra_args:
            return False
        self.last[request.slot] = int(request.output[-1]) if request.output.size else -1
        return True

    def accept(self, slots, token_ids):
        self.last.update(zip(slots.tolist(), token_ids.tolist(), strict=True))

    def mask(self, slots, bitmask):
        for row, slot in enumerate(slots.tolist()):
            token = self.last[slot]
            if token >= 0:
                bitmask[row, token // 32] &= ~np.array(1 << token % 32).astype(np.int32)

    def detach(self, slot):
        del self.last[slot]


class Plugin:
    @hookimpl
    def octavo_logits_processors(self):
        return [Provider(name="none_twice", factory=NoneTwice)]


EXECUTORS = {
    "one at a time": "local",
    "ahead": {"name": "local", "max_in_flight": 2},
    "as bytes": {"name": "wire", "max_in_flight": 2},
    "in a thread": "threaded",
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    made = {}
    for name, executor in EXECUTORS.items():
        config = {
            "executor": {"kind": executor},
            "kv_cache": {"num_blocks": 14, "block_size": 8},
            "scheduler": {"max_num_seqs": 5, "max_num_batched_tokens": 24},
            "logits_processors": ["none_twice"],
        }
        made[name] = make_engine(folder, config, [Plugin()])
    yield made
    for engine in made.values():
        engine.close()


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.9]),
        "top_k": st.just(20),
        "top_p": st.just(0.8),
        "repetition_penalty": st.just(1.4),
        "frequency_penalty": st.just(0.7),
        "logit_bias": st.just({7: 3.0, 9: -100.0}),
        "bad_words_token_ids": st.just([[30], [5, 6]]),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(st.integers(0, VOCABULARY - 1), min_size=40, max_size=80),
        "logprobs": st.sampled_from([0, 3, -1]),
        "prompt_logprobs": st.just(2),
        "extra_args": st.just({"mask": True}),
        "allowed_token_ids": st.just([]),
    },
)


@st.composite
def workloads(draw):
    """[(step at which it arrives, prompt, parameters, tokens after which it is aborted)]"""
    count = draw(st.integers(1, 7))
    shared = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=20, max_size=20))
    made = []
    for _ in range(count):
        own = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12))
        params = draw(PARAMS)
        if "allowed_token_ids" in params:
            params["allowed_token_ids"] = [3, 30, 31, 200]
            params.pop("stop_token_ids", None)
        made.append(
            (
                draw(st.integers(0, 6)),
                shared[: draw(st.integers(0, 20))] + own,
                params,
                draw(st.none() | st.integers(1, 5)),
            )
        )
    return made


def request(handle, prompt, params):
    sampling = SamplingParams(max_tokens=9, ignore_eos=True, **params)
    return EngineRequest(
        handle=handle,
        request_id=str(handle),
        token_ids=np.asarray(prompt, np.int32),
        sampling=sampling,
        seed=handle * 31,
        max_tokens=9,
    )


def described(logprobs, row):
    """What is told of one position."""
    count = 1 + int(logprobs.num[row])
    return (
        logprobs.token_ids[row, :count].tolist(),
        logprobs.values[row, :count].round(4).tolist(),
        int(logprobs.ranks[row]),
    )


def outcome(engine, workload):
    """Everything that callers see, by handle."""
    seen = {handle: {"tokens": [], "logprobs": [], "prompt": {}} for handle in range(len(workload))}
    abort = {handle: after for handle, (_, _, _, after) in enumerate(workload) if after}
    arrivals = sorted(range(len(workload)), key=lambda handle: workload[handle][0])
    step = 0
    while arrivals or engine.has_work():
        while arrivals and workload[arrivals[0]][0] <= step:
            handle = arrivals.pop(0)
            engine.add(request(handle, workload[handle][1], workload[handle][2]))
        outputs = engine.step()
        step += 1
        if outputs is None:
            continue
        handles = outputs.handles.tolist()
        for handle, token in zip(handles, outputs.token_ids[:, 0].tolist(), strict=True):
            seen[handle]["tokens"].append(token)
        if outputs.logprobs is not None:
            for i, row in enumerate(outputs.logprobs.rows.tolist()):
                seen[handles[row]]["logprobs"].append(described(outputs.logprobs, i))
        for part in outputs.prompt_logprobs:
            for i in range(len(part.logprobs.ranks)):
                seen[part.handle]["prompt"][part.start + i] = described(part.logprobs, i)
        for finish in outputs.finished:
            seen[finish.handle]["end"] = (finish.reason, finish.stop_token, finish.error)
        for handle, after in abort.items():
            if len(seen[handle]["tokens"]) == after and "end" not in seen[handle]:
                engine.abort([handle], "stop")
    assert_clean(engine)
    engine.reset_prefix_cache()
    return seen


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(workload=workloads())
def test_nothing_that_callers_see_differs(engines, workload):
    wanted = outcome(engines["one at a time"], workload)
    for name, engine in engines.items():
        if name != "one at a time":
            assert outcome(engine, workload) == wanted, name


def test_the_host_really_does_not_know(engines, monkeypatch):
    """A step in flight is a placeholder in the mirror and in the next batch, until the device puts
    the token there."""
    engine = engines["ahead"]
    runner = engine.executor._worker
    fill, seen = runner._feed.fill, []

    def spy(token_ids, slots, unfinished, **flags):
        before = token_ids.tolist()
        fill(token_ids, slots, unfinished, **flags)
        seen.append((len(unfinished), before, runner.mirror.last_token[slots].tolist()))
        assert (token_ids >= 0).all()

    monkeypatch.setattr(runner._feed, "fill", spy)
    engine.add(request(1, [5, 6, 7], {"temperature": 0.0}))
    while engine.has_work():
        engine.step()
    assert seen[0] == (0, [5, 6, 7], [7])
    assert len(seen) == 9
    for step in seen[1:]:
        assert step == (1, [-1], [-1])
    assert not runner._sampling_step.unfinished


def test_stop_strings(tmp_path):
    """They are found by the text side, when the engine is a step ahead; what it generated since is
    in neither text nor counts."""
    from octavo import LLM

    folder = write_tiny_model(tmp_path / "model")
    prompts = ["one two", "three", "four five six"]
    seen = []
    for executor in ("local", EXECUTORS["ahead"]):
        config = {"executor": {"kind": executor}, "kv_cache": {"num_blocks": 60}}
        with LLM(str(folder), config=config) as llm:
            plain = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12))
            # A piece from the middle of each text, as it comes, and one that spans tokens.
            params = [
                SamplingParams(
                    temperature=0.0, max_tokens=12, stop=[out.outputs[0].text[3:6]], logprobs=1
                )
                for out in plain
            ]
            stopped = llm.generate(prompts, params)
            seen.append(
                [
                    (out.text, list(out.token_ids), out.finish_reason, out.stop_reason)
                    for out in (result.outputs[0] for result in stopped)
                ]
            )
    assert seen[0] == seen[1]
    assert {reason for _, _, reason, _ in seen[0]} == {"stop"}
