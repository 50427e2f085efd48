"""Parts of the engine process that need no process: splitting outputs, wire messages, the queue."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

import numpy as np
import pytest

from octavo.core.messages import EngineOutputs, EngineRequest, Finish, Logprobs, PromptLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.engine.process import process, wire
from octavo.engine.process.folder import SOCKET, make_folder, remove_folder
from octavo.engine.process.process import plain
from octavo.engine.process.split import adopt, globally, split
from octavo.server.config import ServerConfig, ServiceConfig
from octavo.server.http.errors import ApiError
from octavo.server.http.overload import Queue


def columns(rows: list[int]) -> Logprobs:
    count = len(rows)
    return Logprobs(
        rows=np.array(rows, np.int32),
        token_ids=np.arange(count * 2, dtype=np.int32).reshape(count, 2),
        values=-np.arange(count * 2, dtype=np.float32).reshape(count, 2),
        ranks=np.arange(count, dtype=np.int32),
        num=np.ones(count, np.int32),
    )


def test_outputs_go_to_their_own_front_end() -> None:
    handles = [globally(5, 1), globally(5, 2), globally(6, 1), globally(9, 3)]
    outputs = EngineOutputs(
        step=4,
        handles=np.array(handles, np.int64),
        token_ids=np.array([[10], [20], [11], [30]], np.int32),
        counts=np.array([1, 1, 1, 1], np.int32),
        finished=[
            Finish(handle=handles[1], reason="stop"),
            Finish(handle=globally(7, 4), reason="abort"),
        ],
        cached={handles[0]: 16, handles[3]: 0},
        logprobs=columns([1, 2, 2]),
        prompt_logprobs=[PromptLogprobs(handle=handles[3], start=1, logprobs=columns([0]))],
    )
    parts = split(outputs)
    assert sorted(parts) == [1, 2, 3, 4]
    assert parts[1].handles.tolist() == [5, 6]
    assert parts[1].token_ids.tolist() == [[10], [11]]
    assert parts[1].cached == {5: 16}
    assert parts[1].logprobs is not None
    assert parts[1].logprobs.rows.tolist() == [1, 1]
    assert parts[1].logprobs.token_ids.tolist() == [[2, 3], [4, 5]]
    assert parts[2].logprobs is not None
    assert parts[2].logprobs.rows.tolist() == [0]
    assert [finish.handle for finish in parts[2].finished] == [5]
    assert parts[3].logprobs is None
    assert [part.handle for part in parts[3].prompt_logprobs] == [9]
    assert parts[4].handles.tolist() == []
    assert [finish.handle for finish in parts[4].finished] == [7]
    assert outputs.handles.tolist() == handles, "the engine's own are left alone"
    assert outputs.finished[0].handle == handles[1]


def test_outputs_of_one_front_end_stay_whole() -> None:
    handles = np.array([globally(1, 2), globally(2, 2)], np.int64)
    outputs = EngineOutputs(step=0, handles=handles, token_ids=np.array([[1], [2]], np.int32))
    (part,) = split(outputs).items()
    assert part[0] == 2
    assert part[1].handles.tolist() == [1, 2]
    assert part[1].token_ids is outputs.token_ids
    nothing = EngineOutputs(step=0, handles=handles[:0], token_ids=outputs.token_ids[:0])
    assert split(nothing) == {}


def test_messages_survive_the_wire() -> None:
    request = EngineRequest(
        handle=3,
        request_id="r",
        token_ids=np.array([1, 2, 3], np.int32),
        sampling=SamplingParams(logit_bias={5: -1.5}, extra_args={"mine": {"a": [1, None]}}),
        seed=2**64 - 1,
        max_tokens=4,
        parent=2,
        index=1,
        extra_keys=[b"salt:\x00"],
    )
    codec = wire.to_engine()
    (sent,) = codec.decode(codec.encode(wire.Submit([request]))).requests
    assert sent.token_ids.tolist() == [1, 2, 3]
    assert (sent.sampling, sent.seed, sent.extra_keys) == (
        request.sampling,
        2**64 - 1,
        [b"salt:\x00"],
    )
    adopt(sent, 7)
    assert (sent.handle, sent.parent) == (globally(3, 7), globally(2, 7))
    with pytest.raises(TypeError):
        codec.encode(wire.Call(1, "f", [object()]))


def test_nothing_can_be_unpickled(repository) -> None:
    """Who can write to a socket can then at most send a message that is refused."""
    unsafe = re.compile(
        r"^\s*(import|from) (pickle|cPickle|dill|cloudpickle|marshal|shelve)\b", re.M
    )
    files = [f for top in ("core", "server", "plugins") for f in (repository / top).rglob("*.py")]
    assert len(files) > 100
    assert [str(file) for file in files if unsafe.search(file.read_text())] == []


def test_no_secret_is_sent_to_the_engine() -> None:
    config = ServiceConfig.model_validate(
        {"model": {"source": "x"}, "server": {"api_keys": {"me": "sesame"}, "port": 1}}
    )
    assert plain(config) == {"model": {"source": "x"}, "server": {"port": 1}}


def test_folders_are_private_and_short(monkeypatch, tmp_path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    folder = make_folder()
    try:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(str(folder / SOCKET)) < 104
        assert not list(deep.iterdir())
    finally:
        remove_folder(folder)
    assert not folder.exists()
    remove_folder(folder)


def test_the_last_words_of_an_engine_may_come_late(tmp_path) -> None:
    """With the exit status of one that has said why it ended, they are waited for."""

    async def go() -> None:
        downs: list[str] = []
        engine = process.EngineProcess(ServiceConfig())
        engine.on_down = downs.append
        run = SimpleNamespace(
            died=None,
            reason=None,
            process=SimpleNamespace(returncode=process.SAID_WHY),
            channel=SimpleNamespace(drain=lambda: None, close=lambda: None),
            folder=tmp_path / "none",
            why=lambda ran: process._Run.why(run, ran=ran),
        )
        engine._run = run  # type: ignore[assignment]
        engine._is_up("ipc://somewhere", None)
        engine._exited(run)  # type: ignore[arg-type]
        await asyncio.sleep(2 * process.LAST_WORDS_S)
        assert downs == []
        engine._take(wire.Died("RuntimeError", "the prompt asked for it"))
        assert downs == ["the engine stopped: RuntimeError: the prompt asked for it"]

    asyncio.run(go())


def queue(waiting: int = 0, tokens: int = 0, **limits: int) -> tuple[Queue, SimpleNamespace]:
    llm = SimpleNamespace(num_queued=waiting, num_queued_tokens=tokens, refused=[])
    return Queue(llm, ServerConfig(**limits), llm.refused.append), llm  # type: ignore[arg-type]


def refused(call) -> str:
    with pytest.raises(ApiError) as error:
        call()
    assert error.value.status == 503
    assert error.value.code == "server_overloaded"
    assert int(error.value.headers["retry-after"]) > 0
    return error.value.message


def test_a_full_queue_refuses_and_counts() -> None:
    line, llm = queue(waiting=2, tokens=90, max_queued_requests=3, max_queued_tokens=100)
    place = line.enter()
    assert "3 requests wait (limit 3" in refused(line.enter)
    assert "90 tokens wait" in refused(lambda: place.settle([11]))
    place.settle([10])
    place.leave()
    place.leave()
    llm.num_queued, llm.num_queued_tokens = 3, 100
    refused(line.enter)
    assert sorted(llm.refused) == ["requests", "requests", "tokens"]
    llm.num_queued = llm.num_queued_tokens = 0
    line.enter().settle([50])


def test_a_request_alone_is_taken_however_large() -> None:
    line, llm = queue(max_queued_requests=2, max_queued_tokens=10)
    place = line.enter()
    place.settle([9, 9, 9, 9])
    refused(line.enter)
    place.leave()
    llm.num_queued, llm.num_queued_tokens = 1, 1
    batch = line.enter()
    refused(lambda: batch.settle([1, 1]))
    batch.leave()


def test_workers_share_the_limits() -> None:
    line, _ = queue(waiting=2, max_queued_requests=4, api_workers=2)
    assert "limit 2" in refused(line.enter)


def test_no_limits_by_default() -> None:
    line, _ = queue(waiting=10**6, tokens=10**9)
    line.enter().settle([10**9])


def test_children_that_need_no_keys_get_none(monkeypatch):
    from octavo.core import envvars

    monkeypatch.setenv("OCTAVO_API_KEYS", "secret-key")
    monkeypatch.setenv("SOMETHING_ELSE", "kept")
    environment = envvars.child_environment()
    assert "secret-key" not in environment.values()
    assert environment["SOMETHING_ELSE"] == "kept"
