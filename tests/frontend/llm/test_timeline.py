"""`RequestOutput.timeline`, from `LLM` and `AsyncLLM` over the real step loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.client import ThreadClient
from octavo.frontend.llm import LLM
from octavo.frontend.text.inputs import InputProcessor
from octavo.testing.byte_tokenizer import ByteTokenizer
from octavo.testing.fake_engine import make_fake_engine

PROMPT = {"prompt_token_ids": [1, 2, 3]}
ASKS = SamplingParams(max_tokens=4, ignore_eos=True, timeline=True)
SILENT = SamplingParams(max_tokens=4, ignore_eos=True)
KINDS = ["queued", "admitted", "chunk", "decode", "finished"]


def inputs() -> InputProcessor:
    return InputProcessor(ByteTokenizer(), max_model_len=96, vocab_size=97)


def kinds(timeline: list[dict[str, Any]] | None) -> list[str]:
    assert timeline is not None
    return [event["event"] for event in timeline]


def test_llm_returns_the_timeline_of_who_asks() -> None:
    with LLM.from_engine(make_fake_engine(), inputs()) as llm:
        asked, silent = llm.generate([PROMPT, PROMPT], [ASKS, SILENT], use_tqdm=False)
        assert kinds(asked.timeline) == KINDS
        assert silent.timeline is None
        *others, last = llm.stream(PROMPT, ASKS)
        assert kinds(last.timeline) == KINDS
        assert all(output.timeline is None for output in others)


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_async_llm_too(way: str) -> None:
    async def go() -> None:
        client = ThreadClient(make_fake_engine)
        async with AsyncLLM.from_client(client, inputs()) as llm:
            outputs = [o async for o in getattr(llm, way)(PROMPT, ASKS, request_id="x")]
            assert kinds(outputs[-1].timeline) == KINDS
            assert kinds(await llm.timeline("x")) == KINDS
            assert await llm.timeline("y") is None

    asyncio.run(go())


def test_a_stop_string_ends_the_timeline_as_a_stop() -> None:
    with LLM.from_engine(make_fake_engine(), inputs()) as llm:
        (free,) = llm.generate(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True, seed=1), False)
        stop = free.outputs[0].text[2]
        params = SamplingParams(max_tokens=9, ignore_eos=True, seed=1, stop=[stop], timeline=True)
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop"
        assert output.timeline is not None
        assert output.timeline[-1]["reason"] == "stop"


def test_priority_reaches_the_policy() -> None:
    engine = make_fake_engine(policy={"name": "priority", "ageing_s": 1e6}, max_num_seqs=1)
    with LLM.from_engine(engine, inputs()) as llm:
        outputs = llm.generate([PROMPT] * 3, ASKS, use_tqdm=False, priority=[5, 3, 4])
        ends = [output.timeline[-1]["at"] for output in outputs]  # type: ignore[index]
        assert ends[1] < ends[2] < ends[0]
        assert [output.timeline[0]["priority"] for output in outputs] == [5, 3, 4]  # type: ignore[index]
