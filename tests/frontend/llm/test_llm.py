from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from octavo.core.errors import EngineDeadError, GenerationError, RequestError, RequestTooLong
from octavo.core.messages import EngineRequest
from octavo.core.sampling_params import SamplingParams
from octavo.frontend.llm import LLM
from octavo.frontend.text.inputs import InputProcessor
from octavo.testing.byte_tokenizer import ByteTokenizer
from octavo.testing.scripted_engine import ScriptedEngine

TOKENIZER = ByteTokenizer()


def echo(request: EngineRequest) -> list[int]:
    """Answers with the prompt, twice."""
    return request.token_ids.tolist() * 2


def make(**engine: object) -> tuple[LLM, ScriptedEngine]:
    engine.setdefault("reply", echo)
    scripted = ScriptedEngine(**engine)  # type: ignore[arg-type]
    return LLM.from_engine(scripted, InputProcessor(TOKENIZER, max_model_len=100)), scripted


@pytest.fixture
def llm() -> Iterator[LLM]:
    with make()[0] as made:
        yield made


def texts(llm: LLM, prompts: object, params: object = None) -> list[str]:
    results = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    return [result.outputs[0].text for result in results]


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["a long prompt", "b", "third one", "c"]
    assert texts(llm, prompts) == ["a long prompta l", "bb", "third onethird o", "cc"]
    results = llm.generate(prompts, use_tqdm=False)
    assert [result.prompt for result in results] == prompts
    assert all(result.finished for result in results)


def test_every_form_of_prompt(llm: LLM) -> None:
    assert texts(llm, "ab") == ["abab"]
    assert texts(llm, [97, 98]) == ["abab"]
    assert texts(llm, np.array([97, 98])) == ["abab"]
    assert texts(llm, list(np.array([97, 98]))) == ["abab"]
    assert texts(llm, {"prompt_token_ids": [97, 98]}) == ["abab"]
    assert texts(llm, ["ab", [97, 98], {"prompt": "c"}]) == ["abab", "abab", "cc"]
    assert texts(llm, []) == []


def test_one_sampling_params_for_all_or_one_each(llm: LLM) -> None:
    short, long = SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)
    assert texts(llm, ["ab", "cd"], short) == ["a", "c"]
    assert texts(llm, ["ab", "cd"], [short, long]) == ["a", "cdc"]
    with pytest.raises(RequestError, match="sampling_params has 1 items for 2 prompts"):
        texts(llm, ["ab", "cd"], [short])


def test_a_bad_prompt_is_named_before_anything_runs() -> None:
    llm, engine = make()
    with pytest.raises(RequestTooLong, match=r"^prompts\[1\]: .* 200 tokens"):
        texts(llm, ["good", "x" * 200, "good"])
    assert engine.seen == []
    with pytest.raises(RequestTooLong, match=r"^the prompt has 200 tokens"):
        texts(llm, "x" * 200)
    assert texts(llm, "ab") == ["abab"]


def test_what_the_engine_refuses_leaves_nothing_behind() -> None:
    def refuse(request: EngineRequest) -> Exception | None:
        return RequestTooLong("needs 9 blocks of 8") if len(request.token_ids) > 5 else None

    llm, engine = make(refuse=refuse)
    with pytest.raises(RequestTooLong, match=r"prompts\[1\]: needs 9 blocks of 8"):
        texts(llm, ["ab", "too long"])
    assert engine.requests == {}
    assert texts(llm, "ab") == ["abab"]


def test_a_failed_request_raises_after_the_others_and_keeps_their_results() -> None:
    def fail(request: EngineRequest) -> str | None:
        return "no token is left" if request.token_ids[0] == ord("!") else None

    llm, _ = make(fail=fail)
    with pytest.raises(GenerationError, match=r"^prompts\[1\]: no token is left$") as caught:
        texts(llm, ["ab", "!", "cd"])
    assert [o.outputs[0].text for o in caught.value.outputs] == ["abab", "", "cdcd"]
    assert [o.error for o in caught.value.outputs] == [None, "no token is left", None]
    with pytest.raises(GenerationError, match=r"^no token is left$"):
        texts(llm, "!")


def test_a_dead_engine_says_why_and_takes_nothing_more() -> None:
    def die(step: int) -> None:
        if step == 1:
            raise RuntimeError("device lost")

    llm, _ = make(before_step=die)
    with pytest.raises(EngineDeadError, match="RuntimeError: device lost"):
        texts(llm, "abc")
    with pytest.raises(EngineDeadError, match="device lost"):
        texts(llm, "abc")
    llm.close()


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Hi"}]
    one = llm.chat(talk, SamplingParams(max_tokens=3), use_tqdm=False)
    assert one[0].prompt == "<|im_start|>user\nHi<|end|><|im_start|>assistant\n"
    two = llm.chat([talk, talk], SamplingParams(max_tokens=3), use_tqdm=False)
    assert [result.prompt for result in two] == [one[0].prompt] * 2
    with pytest.raises(RequestError, match=r"^prompts\[1\]: messages\[0\]"):
        llm.chat([talk, [{"content": "x"}]], use_tqdm=False)


def test_stream_gives_what_is_new(llm: LLM) -> None:
    deltas = [output.outputs[0].text for output in llm.stream("ab", SamplingParams(max_tokens=3))]
    assert deltas == ["a", "b", "a"]
    with pytest.raises(RequestError, match="empty"):
        llm.stream("")


def test_leaving_a_stream_aborts_it() -> None:
    llm, engine = make()
    stream = llm.stream("abcd")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine.requests == {}
    assert engine.aborted == [engine.seen[0].handle]


def test_a_stream_goes_on_after_other_work(llm: LLM) -> None:
    stream = llm.stream("abcd", SamplingParams(max_tokens=8))
    first = next(stream)
    assert texts(llm, "xy") == ["xyxy"]
    rest = list(stream)
    assert first.outputs[0].text + "".join(o.outputs[0].text for o in rest) == "abcdabcd"
    assert len(rest) < 7  # what came meanwhile was merged


def test_calls_of_other_threads_wait() -> None:
    inside = threading.Lock()

    def alone(step: int) -> None:
        assert inside.acquire(blocking=False), "two threads step the engine"
        time.sleep(0)  # let others run
        inside.release()

    llm, engine = make(before_step=alone)
    prompts = [[f"{letter}{number}" for number in range(5)] for letter in "abcdefgh"]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda batch: [texts(llm, each) for each in batch], prompts))
    assert found == [[[each * 2] for each in batch] for batch in prompts]
    assert engine.requests == {}


def test_streams_and_calls_of_several_threads_take_turns(llm: LLM) -> None:
    def stream(prompt: str) -> str:
        parts = []
        for output in llm.stream(prompt, SamplingParams(max_tokens=8)):
            parts.append(output.outputs[0].text)
            assert texts(llm, prompt[:2]) == [prompt[:2] * 2]  # nested, as ever
        return "".join(parts)

    prompts = ["abcd", "efgh", "ijkl", "mnop"]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(stream, prompts)) == [prompt * 2 for prompt in prompts]


def test_a_stream_that_is_dropped_during_a_call_is_ended_by_that_call() -> None:
    dropped: list[object] = []

    def drop(step: int) -> None:
        dropped.clear()  # as the garbage collector would, in the midst of a step

    llm, engine = make(before_step=drop)
    stream = llm.stream("abcdefgh", SamplingParams(max_tokens=16))
    next(stream)
    dropped.append(stream)
    del stream
    assert texts(llm, "xyz") == ["xyzxyz"]
    assert engine.requests == {}
    assert engine.aborted == [engine.seen[0].handle]


def test_params_that_were_spoilt_are_refused_and_nothing_else() -> None:
    llm, engine = make()
    params = SamplingParams(max_tokens=3)
    params.n = 0
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match="n must be an integer"):
            call("a", params)
    assert engine.seen == []
    assert texts(llm, "ab") == ["abab"]


def test_a_failing_stream_raises() -> None:
    llm, _ = make(fail=lambda request: "no token is left")
    with pytest.raises(RequestError, match="no token is left"):
        list(llm.stream("a"))


def test_interrupting_ends_the_step_and_aborts() -> None:
    done = []

    def interrupt(step: int) -> None:
        done.append(step)
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    llm, engine = make(before_step=interrupt)
    with pytest.raises(KeyboardInterrupt):
        texts(llm, ["abcdefg", "hijk"])
    assert engine.steps == 3  # the step that was running was finished
    assert engine.requests == {}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert texts(llm, "ab") == ["abab"]


def test_a_second_interrupt_does_not_wait() -> None:
    def interrupt(step: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    llm, engine = make(before_step=interrupt)
    with pytest.raises(KeyboardInterrupt):
        texts(llm, "ab")
    assert engine.steps == 0
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):  # the step was cut short
        texts(llm, "ab")


def test_progress_is_shown_when_asked(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"])
    assert "Processed prompts: 100%" in capsys.readouterr().err
    llm.generate(["a", "b"], use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_the_rest_of_the_interface() -> None:
    llm, engine = make()
    assert llm.get_tokenizer() is TOKENIZER
    assert llm.max_model_len == 100
    assert llm.get_default_sampling_params() == SamplingParams()
    assert llm.metrics()["steps"] == 0
    assert llm.reset_prefix_cache() is True
    llm.close()
    llm.close()
    assert engine.closed
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("a")


def test_the_text_side_does_not_import_torch() -> None:
    code = """
import sys
import octavo.frontend.llm, octavo.frontend.async_llm, octavo.frontend.assembly
import octavo.frontend.client, octavo.frontend.text.output_processor, octavo.frontend.text.inputs
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
