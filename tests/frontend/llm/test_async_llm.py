from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import pytest

from octavo.core.errors import EngineDeadError, ModelNotFound, RequestError, RequestTooLong
from octavo.core.messages import EngineRequest
from octavo.core.sampling_params import SamplingParams
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.client import ThreadClient
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.text.inputs import InputProcessor
from octavo.testing.byte_tokenizer import ByteTokenizer
from octavo.testing.scripted_engine import ScriptedEngine

TOKENIZER = ByteTokenizer()
PARAMS = SamplingParams(max_tokens=6)


def repeat(request: EngineRequest) -> list[int]:
    return request.token_ids.tolist() * 3


class Gate:
    """Lets the engine make a step only when the test says so."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self.open = False

    def __call__(self, step: int) -> None:
        if not self.open:
            assert self._permits.acquire(timeout=60), "the test let no step through"

    def let(self, steps: int) -> None:
        self._permits.release(steps)

    def free(self) -> None:
        self.open = True
        self._permits.release(1)


def make(**engine: Any) -> tuple[AsyncLLM, ScriptedEngine]:
    engine.setdefault("reply", repeat)
    scripted = ScriptedEngine(**engine)
    inputs = InputProcessor(TOKENIZER, max_model_len=5000)
    return AsyncLLM.from_client(ThreadClient(lambda: scripted), inputs), scripted


def run(test: Callable[[AsyncLLM, ScriptedEngine], Awaitable[None]], **engine: Any) -> None:
    async def main() -> None:
        llm, scripted = make(**engine)
        async with llm:
            await test(llm, scripted)
        assert scripted.closed

    asyncio.run(asyncio.wait_for(main(), 120))
    assert not any(thread.name.startswith("octavo") for thread in threading.enumerate())


async def last(
    llm: AsyncLLM, prompt: Any, params: SamplingParams = PARAMS, **more: Any
) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, params, **more)]
    assert outputs[-1].finished
    return outputs[-1]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_generate_gives_all_so_far() -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        seen = [o.outputs[0].text async for o in llm.generate("ab", PARAMS)]
        assert seen[-1] == "ababab"
        assert all(later.startswith(text) for text, later in itertools.pairwise(seen))

    run(test)


def test_stream_gives_what_is_new() -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        deltas = [o async for o in llm.stream("ab", PARAMS)]
        assert "".join(o.outputs[0].text for o in deltas) == "ababab"
        assert [t for o in deltas for t in o.outputs[0].token_ids] == [97, 98] * 3
        assert deltas[-1].finished
        assert (await llm.complete("ab", PARAMS)).outputs[0].text == "ababab"

    run(test)


def test_many_at_once_do_not_mix() -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        prompts = [chr(97 + i) * (1 + i % 5) for i in range(20)]
        params = SamplingParams(max_tokens=50)
        outputs = await asyncio.gather(*(last(llm, prompt, params) for prompt in prompts))
        assert [output.outputs[0].text for output in outputs] == [p * 3 for p in prompts]

    run(test, width=2)


def test_a_slow_reader_gets_merged_deltas() -> None:
    gate = Gate()

    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        stream = llm.stream("abcd", SamplingParams(max_tokens=12)).__aiter__()
        reading = asyncio.ensure_future(anext(stream))
        gate.let(1)
        first = await reading
        gate.free()
        await until(lambda: not engine.has_work())  # the engine did not wait for the reader
        await llm.metrics()  # what came before this answer is here
        rest = [o async for o in stream]
        assert len(rest) == 9, "one by one, then what is left in one"
        assert [len(output.outputs[0].text) for output in rest[:-1]] == [1] * 8
        assert "".join(output.outputs[0].text for output in [first, *rest]) == "abcd" * 3

    run(test, before_step=gate)


def test_errors_are_raised_to_their_own_caller() -> None:
    def fail(request: EngineRequest) -> str | None:
        return "no token is left" if request.token_ids[0] == ord("!") else None

    def refuse(request: EngineRequest) -> Exception | None:
        return RequestError("needs 9 blocks of 8") if request.token_ids[0] == ord("?") else None

    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        results = await asyncio.gather(
            last(llm, "ab"),
            last(llm, "!"),
            last(llm, "?"),
            last(llm, ""),
            last(llm, "x" * 6000),
            return_exceptions=True,
        )
        good, failed, refused, empty, long = results
        assert isinstance(good, RequestOutput)
        assert good.outputs[0].text == "ababab"
        assert (type(failed), str(failed)) == (RequestError, "no token is left")
        assert (type(refused), str(refused)) == (RequestError, "needs 9 blocks of 8")
        assert "empty" in str(empty)
        assert isinstance(long, RequestTooLong)
        assert engine.requests == {}

    run(test, fail=fail, refuse=refuse)


def test_a_live_request_id_is_refused() -> None:
    gate = Gate()

    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        first = asyncio.ensure_future(last(llm, "ab", request_id="mine"))
        await until(lambda: bool(engine.requests))
        with pytest.raises(RequestError, match="'mine'"):
            await last(llm, "cd", request_id="mine")
        gate.free()
        assert (await first).request_id == "mine"
        assert (await last(llm, "cd", request_id="mine")).outputs[0].text == "cdcdcd"

    run(test, before_step=gate)


def test_abort_ends_the_request_with_what_there_is() -> None:
    gate = Gate()

    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        stream = llm.generate("abcd", PARAMS, "mine").__aiter__()
        reading = asyncio.ensure_future(anext(stream))
        gate.let(1)
        await reading
        await llm.abort("mine")
        final = await anext(stream)
        assert final.finished
        assert final.outputs[0].finish_reason == "abort"
        assert final.outputs[0].text == "a"
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        gate.free()
        await until(lambda: not engine.has_work())
        assert len(engine.aborted) == 1
        await llm.abort("unknown")

    run(test, before_step=gate)


@pytest.mark.parametrize("how", ["cancel", "leave"])
def test_a_reader_that_goes_away_aborts_its_request(how: str) -> None:
    gate = Gate()

    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        if how == "cancel":
            task = asyncio.ensure_future(last(llm, "abcd"))
            await until(lambda: bool(engine.requests))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            stream = llm.generate("abcd", PARAMS)
            gate.let(1)
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]
        gate.free()
        await until(lambda: not engine.has_work())
        assert engine.aborted == [engine.seen[0].handle]

    run(test, before_step=gate)


def test_a_stop_string_aborts_in_the_engine() -> None:
    gate = Gate()

    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        params = SamplingParams(max_tokens=1000, stop=["c"])
        gate.let(4)
        output = await last(llm, "abcd" * 300, params)
        assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("ab", "c")
        gate.free()
        await until(lambda: not engine.has_work())
        assert engine.aborted == [engine.seen[0].handle]

    run(test, before_step=gate)


def test_a_dying_engine_fails_everything_with_the_reason() -> None:
    gate = Gate()

    def die(step: int) -> None:
        gate(step)
        raise RuntimeError("device lost")

    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        assert llm.is_ready
        await llm.check_health()
        running = [asyncio.ensure_future(last(llm, prompt)) for prompt in ("ab", "cd")]
        await until(lambda: len(llm._processor) == 2)  # type: ignore[arg-type]
        gate.free()
        for task in running:
            with pytest.raises(EngineDeadError, match="RuntimeError: device lost"):
                await task
        assert not llm.is_ready
        assert llm.dead_reason is not None
        for attempt in (last(llm, "ef"), llm.check_health(), llm.metrics()):
            with pytest.raises(EngineDeadError, match="device lost"):
                await attempt

    run(test, before_step=die)


def test_a_failing_text_side_tells_every_reader(caplog: pytest.LogCaptureFixture) -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        def fail(token_id: int) -> bytes:
            if token_id == 98:
                raise LookupError("no such token")
            return bytes([token_id])

        engine.reply = lambda request: [98]
        llm._processor._table.token_bytes = fail  # type: ignore[union-attr,method-assign]
        with pytest.raises(EngineDeadError, match="LookupError: no such token"):
            await last(llm, [97])

    run(test)


def test_shutdown_fails_what_runs() -> None:
    gate = Gate()

    async def main() -> None:
        llm, engine = make(before_step=gate)
        await llm.start()
        running = asyncio.ensure_future(last(llm, "ab"))
        await until(lambda: bool(engine.requests))
        stopping = asyncio.ensure_future(llm.shutdown())
        client = llm._client
        assert isinstance(client, ThreadClient)
        await until(lambda: not client._inbox.empty() or not client._thread.is_alive())
        gate.free()
        await stopping
        await llm.shutdown()
        with pytest.raises(EngineDeadError, match="closed"):
            await running
        with pytest.raises(EngineDeadError, match="closed"):
            await last(llm, "ab")

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_start_that_fails_says_why() -> None:
    def broken() -> ScriptedEngine:
        raise ModelNotFound("nothing is at ./nowhere")

    async def main() -> None:
        inputs = InputProcessor(TOKENIZER, max_model_len=50)
        llm = AsyncLLM.from_client(ThreadClient(broken), inputs)
        with pytest.raises(EngineDeadError, match="starting"):
            await llm.check_health()
        for _ in range(2):
            with pytest.raises(ModelNotFound, match="nowhere"):
                await llm.start()
        await llm.shutdown()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_the_first_request_starts_the_engine() -> None:
    async def main() -> None:
        llm, _ = make()
        try:
            outputs = await asyncio.gather(last(llm, "ab"), last(llm, "cd"))
            assert [o.outputs[0].text for o in outputs] == ["ababab", "cdcdcd"]
        finally:
            await llm.shutdown()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_long_prompts_are_tokenized_off_the_loop() -> None:
    threads = []

    class Recording(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            threads.append(threading.current_thread() is threading.main_thread())
            return super().encode(text, add_special_tokens=add_special_tokens)

    async def main() -> None:
        scripted = ScriptedEngine(repeat)
        inputs = InputProcessor(Recording(), max_model_len=9000)
        async with AsyncLLM.from_client(ThreadClient(lambda: scripted), inputs) as llm:
            await last(llm, "short")
            await last(llm, "x" * 5000)
            assert await llm.encode("ab") == [97, 98]

    asyncio.run(asyncio.wait_for(main(), 120))
    assert threads == [True, False, True]


def test_chat_and_facts() -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        prompt = await llm.render_chat([{"role": "user", "content": "Hi"}])
        assert prompt["prompt"].endswith("assistant\n")
        assert (await last(llm, prompt)).prompt == prompt["prompt"]
        assert llm.tokenizer is TOKENIZER
        assert await llm.get_tokenizer() is TOKENIZER
        assert llm.max_model_len == 5000
        assert llm.default_sampling_params() == SamplingParams()
        assert (await llm.metrics())["steps"] > 0
        assert await llm.reset_prefix_cache() is True

    run(test)


def test_options_reach_the_engine() -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        await last(llm, "ab", priority=3, user="u", cache_salt="s")
        (request,) = engine.seen
        assert (request.priority, request.user, request.extra_keys) == (3, "u", [b"salt:s"])

    run(test)


def test_an_idle_engine_sleeps_and_a_step_is_one_callback() -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        calls = 0
        original = llm._on_outputs

        def counting(outputs: Any) -> None:
            nonlocal calls
            calls += 1
            original(outputs)

        llm._client._on_outputs = counting  # type: ignore[union-attr]
        await asyncio.gather(*(last(llm, "ab") for _ in range(8)))
        await until(lambda: not engine.has_work())
        await llm.metrics()
        steps = engine.steps
        assert 0 < calls <= steps
        await asyncio.sleep(0.02)
        assert engine.steps == steps

    run(test)


def test_a_question_after_death_is_answered() -> None:
    def die(step: int) -> None:
        raise RuntimeError("gone")

    async def main() -> None:
        client = ThreadClient(lambda: ScriptedEngine(repeat, before_step=die))
        died: Future[str] = Future()
        await client.start(lambda outputs: None, died.set_result)
        client.add(InputProcessor(TOKENIZER, max_model_len=9).prepare("a", request_id="r").requests)
        assert "gone" in await asyncio.wrap_future(died)
        with pytest.raises(EngineDeadError, match="gone"):
            client.call("metrics")
        with pytest.raises(EngineDeadError, match="gone"):
            client.add([])
        client.abort([1])
        client.close()

    asyncio.run(asyncio.wait_for(main(), 120))
