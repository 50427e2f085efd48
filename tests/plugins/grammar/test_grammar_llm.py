"""Structured output through `LLM` and `AsyncLLM`, over a tiny model of random weights; grammars
come from the reference engine, handed over as a plugin is."""

from __future__ import annotations

import asyncio
import re

import pytest

from octavo import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from octavo.core.errors import GenerationError, RequestError
from octavo.testing.model_folder import write_model_folder
from octavo.testing.regex_grammar import RegexGrammarEngine

from .conftest import grammars_of

PATTERN = r"[a-f]{3,9}( the| fox){1,2}[0-9]{2}"
PROMPTS = ["the quick brown fox", "jumps over", "the the the the the the the the the"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model_folder(tmp_path_factory.mktemp("tiny"), max_model_len=128))


def settings(executor="local", **more):
    return {
        "model": {"weight_source": {"name": "dummy", "seed": 3}, "dtype": "float32"},
        "executor": {"kind": executor, "device": "cpu", "num_threads": 1},
        "kv_cache": {"num_blocks": 64, "block_size": 4},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 16},
        **more,
    }


@pytest.fixture(scope="module", params=["local", "wire", "threaded"])
def llm(request, folder):
    with LLM(folder, config=settings(request.param), plugins=[RegexGrammarEngine]) as made:
        yield made


def bound(regex=PATTERN, **more):
    values = {"temperature": 0, "max_tokens": 40, "structured_outputs": {"regex": regex}, **more}
    return SamplingParams(**values)


def free(**more):
    return SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **more)


def outputs(llm, prompts, params):
    return [r.outputs[0] for r in llm.generate(prompts, params, use_tqdm=False)]


def test_mixed_batches(llm):
    alone = [out.token_ids for out in outputs(llm, PROMPTS, free())]
    params = [free(), bound(), free(), bound("[xyz]{20,}"), free(), bound("yes|no")]
    mixed = outputs(llm, [p for p in PROMPTS for _ in range(2)], params)
    assert [out.token_ids for out in mixed[::2]] == alone
    assert re.fullmatch(PATTERN, mixed[1].text)
    assert mixed[1].finish_reason == "stop"
    assert re.fullmatch("[xyz]{20,40}", mixed[3].text)
    assert mixed[5].text in ("yes", "no")


def test_several_choices_of_one_seed(llm):
    params = bound(temperature=1.5, seed=11, n=4)
    first, again = (
        [out.text for out in llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs]
        for _ in range(2)
    )
    assert first == again
    assert len(set(first)) > 1
    assert all(re.fullmatch(PATTERN, text) for text in first)
    single = outputs(llm, PROMPTS[0], bound(temperature=1.5, seed=11))[0].text
    assert single == first[0]


def test_preempted_outputs_are_the_same(llm, folder):
    params = [bound(rf"[a-f]{{{20 + i},60}}[0-9]", temperature=1.0, seed=i) for i in range(6)]
    prompts = [PROMPTS[i % 3] for i in range(6)]
    calm = [out.token_ids for out in outputs(llm, prompts, params)]
    for policy in ("recompute", "swap"):
        config = settings(preemption={"policy": policy})
        config["kv_cache"] = {**config["kv_cache"], "num_blocks": 34}
        with LLM(folder, config=config, plugins=[RegexGrammarEngine]) as small:
            assert [out.token_ids for out in outputs(small, prompts, params)] == calm
            assert small.metrics()["num_preemptions"] > 0


def test_logprobs_are_the_models_own(llm):
    out = outputs(llm, PROMPTS[0], bound(logprobs=3))[0]
    assert len(out.logprobs) == len(out.token_ids)
    for token, position in zip(out.token_ids, out.logprobs, strict=True):
        assert token in position
        assert all(value.logprob <= 0 for value in position.values())
        assert len(position) >= 3


def test_min_tokens_and_stop_strings(llm):
    out = outputs(llm, PROMPTS[0], bound("[a-f]{2,}", min_tokens=9))[0]
    assert len(out.token_ids) >= 9
    short = outputs(llm, PROMPTS[0], bound("[a-f]{2}", min_tokens=9))[0]
    assert (len(short.text), short.finish_reason) == (2, "stop")
    stopped = outputs(llm, PROMPTS[0], bound("x+y{3}0", stop=["yy"]))[0]
    assert stopped.finish_reason in ("stop", "length")
    assert "yy" not in stopped.text


def test_nothing_allowed_by_grammar_and_parameters_together(llm):
    params = [bound("abc", allowed_token_ids=[60, 61]), free()]
    with pytest.raises(GenerationError, match="no token can be sampled") as caught:
        llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert (
        caught.value.outputs[1].outputs[0].token_ids
        == outputs(llm, PROMPTS[1], free())[0].token_ids
    )


def test_errors_name_what_is_wrong(llm):
    with pytest.raises(GenerationError, match="regex cannot be compiled") as caught:
        llm.generate(PROMPTS[:2], [bound("[a-"), free()], use_tqdm=False)
    assert caught.value.outputs[1].outputs[0].finish_reason == "length"
    with pytest.raises(RequestError, match="ignore_eos"):
        bound(ignore_eos=True)
    with pytest.raises(RequestError, match="not supported by this engine"):
        llm.generate("x", SamplingParams(structured_outputs={"json_object": True}), use_tqdm=False)


def test_streamed_pieces_join(llm):
    whole = outputs(llm, PROMPTS[0], bound())[0].text
    assert "".join(d.outputs[0].text for d in llm.stream(PROMPTS[0], bound())) == whole


def test_asyncio(folder):
    async def go():
        async with AsyncLLM(folder, config=settings(), plugins=[RegexGrammarEngine]) as llm:
            good, bad = bound(), bound("[a-")

            async def last(prompt, params):
                async for output in llm.generate(prompt, params):
                    found = output
                return found.outputs[0]

            return await asyncio.gather(
                last(PROMPTS[0], good),
                last(PROMPTS[1], bad),
                last(PROMPTS[2], free()),
                return_exceptions=True,
            )

    one, two, three = asyncio.run(go())
    assert re.fullmatch(PATTERN, one.text)
    assert isinstance(two, RequestError)
    assert two.param == "structured_outputs"
    assert three.finish_reason == "length"


def test_without_an_engine_a_request_says_what_to_install(folder, monkeypatch):
    from octavo.core.registry import checks

    installed = checks._installed
    monkeypatch.setattr(
        checks, "_installed", lambda package: package != "xgrammar" and installed(package)
    )
    with LLM(folder, config=settings()) as llm:
        with pytest.raises(RequestError, match=r"pip install 'octavo\[grammar\]'"):
            llm.generate("x", bound(), use_tqdm=False)
        assert llm.generate("x", free(), use_tqdm=False)[0].finished
        lines = "\n".join(llm.report.lines())
        assert "none: " in lines
        assert "not xgrammar: package 'xgrammar' is not installed" in lines
    from octavo.core.errors import PluginUnavailable

    with pytest.raises(PluginUnavailable, match="xgrammar"):
        LLM(folder, config=settings(structured_outputs={"engine": "xgrammar"}))


def test_an_object_that_no_other_process_can_import(folder):
    class Local(RegexGrammarEngine):
        name = "local"
        isolated = True

    with LLM(folder, config=settings(), plugins=[Local]) as llm:  # noqa: SIM117
        with pytest.raises(GenerationError, match="must be importable by name"):
            llm.generate("x", bound(), use_tqdm=False)


def test_what_compiles_may_start_with_the_engine(folder):
    named = {"engine": RegexGrammarEngine.name}
    for given, early in (
        ({}, False),
        ({"preload": True}, True),
        (named, True),
        (named | {"preload": False}, False),
    ):
        config = settings(structured_outputs=given)
        with LLM(folder, config=config, plugins=[RegexGrammarEngine]) as llm:
            thread = grammars_of(llm.engine)._compiler._thread
            assert (thread is not None) is early
            assert "structured_outputs.preload" in llm.engine.resolved.reasons or "preload" in given
        assert thread is None or not thread.is_alive()


def test_equal_specifications_in_all_spellings():
    spec = StructuredOutputsParams(choice=("a", "b"))
    for given in (spec, {"choice": ["a", "b"]}, {"choice": ("a", "b"), "regex": None}):
        assert SamplingParams(structured_outputs=given).structured_outputs == spec
