"""Two steps in flight on a GPU: nothing that callers see differs from one step at a time."""

from __future__ import annotations

import pytest

PARAMS = {
    "plain": {},
    "penalties": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.4,
        "logit_bias": {7: 3.0, 9: -100.0},
    },
    "logprobs": {"logprobs": 4, "prompt_logprobs": 2},
    "nucleus": {"top_p": 0.8, "min_p": 0.01},
}


def flying(steps):
    return {"kind": {"name": "local", "max_in_flight": steps}}


@pytest.mark.parametrize(
    ("runner", "params"), [*(("cuda_graph", name) for name in PARAMS), ("triton", "plain")]
)
def test_two_steps_in_flight(tiny, answer, requests_of, runner, params):
    """Requests that end at different steps, one of them aborted."""
    requests = requests_of(**PARAMS[params])
    requests = [(p, {**params_, "max_tokens": 9 + n}) for n, (p, params_) in enumerate(requests)]
    one, two = (
        answer(
            tiny(),
            requests,
            abort_at={1: 5},
            attention="triton",
            graph={"runner": runner},
            executor=flying(steps),
        )
        for steps in (1, 2)
    )
    assert two.tokens == one.tokens
    assert two.reasons == one.reasons == ["length", "abort", "length", "length"]
    if params == "logprobs":
        two.check_like(one, "float32")


@pytest.mark.parametrize("executor", ["threaded", "wire"])
def test_other_executors(tiny, answer, requests_of, executor):
    """A thread of its own, which captures and replays, and plans that were sent as bytes."""
    parts = {"attention": "triton", "graph": {"runner": "cuda_graph"}}
    one = answer(tiny(), requests_of(), executor=flying(1), **parts)
    other = answer(tiny(), requests_of(), executor={"kind": executor}, **parts)
    assert other.tokens == one.tokens


@pytest.mark.parametrize("runner", ["cuda_graph", "triton"])
def test_stop_strings_with_two_steps_in_flight(tmp_path_factory, device, rehearsing, runner):
    from octavo import LLM, SamplingParams
    from octavo.testing.tiny_model import write_tiny_model

    folder = write_tiny_model(tmp_path_factory.mktemp("bytes"))
    texts = ["the quick brown fox", "jumps", "over the lazy dog and on and on"]
    graph = "eager" if rehearsing else runner
    found = {}
    for steps in (1, 2):
        config = {
            "model": {"source": str(folder), "dtype": "float32"},
            "kv_cache": {"num_blocks": 60},
            "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
            "graph": {"runner": graph},
            "executor": {"device": device, **flying(steps)},
        }
        with LLM(config=config) as llm:
            free = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
            whole = [r.outputs[0].text for r in llm.generate(texts, free, use_tqdm=False)]
            stops = [text[len(text) // 2 :][:2] for text in whole]
            params = [
                SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=[stop])
                for stop in stops
            ]
            outputs = [r.outputs[0] for r in llm.generate(texts, params, use_tqdm=False)]
            found[steps] = [(o.text, list(o.token_ids), o.finish_reason) for o in outputs]
            for text, stop, (cut, _, reason) in zip(whole, stops, found[steps], strict=True):
                assert cut == text.partition(stop)[0]
                assert reason == "stop"
    assert found[2] == found[1]


def test_auto_has_two_steps_in_flight(tiny, make_engine, device):
    engine = make_engine(tiny(), attention="auto")
    assert engine.executor.max_in_flight == (2 if device == "cuda" else 1)
    engine.close()
