"""`octavo run-batch`: files, answers, resumption; with a fake engine, and as a process."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from octavo.core.errors import ConfigError, EngineDeadError
from octavo.server.command_line import main as cli
from octavo.server.command_line import run_batch
from octavo.server.command_line.batch_file import BadBatchFile, Results, read_requests
from octavo.server.command_line.run_batch import Batch, batch_urls
from octavo.server.config import ServiceConfig
from octavo.testing.model_folder import write_model_folder

CONFIG = ServiceConfig.model_validate(
    {"model": {"source": "fake/model"}, "server": {"served_model_name": "fake"}}
)


def line(number, prompt, url="/v1/completions", **body):
    if url == "/v1/completions":
        body = {"prompt": prompt, **body}
    else:
        body = {"messages": [{"role": "user", "content": prompt}], **body}
    return {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body}


@pytest.fixture
def files(tmp_path):
    """`files(lines)` writes requests; `.results()` reads results."""

    class Files:
        requests, output = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"

        def __call__(self, lines):
            self.requests.write_text("".join(json.dumps(item) + "\n" for item in lines))
            return read_requests(self.requests, batch_urls())

        def results(self):
            return [json.loads(item) for item in self.output.read_text().splitlines()]

    return Files()


def answer(files, requests, llm, limit=4, config=CONFIG, **options):
    with Results(files.output, requests, **options) as results:
        status = asyncio.run(Batch(files.requests, results, limit).run(lambda: llm, config))
        results.sort()
    return status


# ---- answers ------------------------------------------------------------------------------------


def test_answers_in_order_and_errors_by_line(files, fake):
    chat = "/v1/chat/completions"
    requests = files(
        [
            line(0, "say:" + "long" * 20),
            line(1, "say:hello", chat, model="fake"),
            line(2, "x", temperature=-1),
            line(3, "x", model="gpt-4o"),
            line(4, "x", stream=True),
            line(5, "refuse"),
            line(6, "say:end", n=2),
        ]
    )
    assert answer(files, requests, fake) == 0
    results = files.results()
    assert [item["custom_id"] for item in results] == [f"id-{n}" for n in range(7)]
    assert len({item["id"] for item in results}) == 7
    assert all(set(item) == {"id", "custom_id", "response", "error"} for item in results)
    assert all(item["error"] is None for item in results)
    responses = [item["response"] for item in results]
    assert [response["status_code"] for response in responses] == [
        200,
        200,
        400,
        404,
        400,
        400,
        200,
    ]
    assert responses[0]["body"]["choices"][0]["text"] == "long" * 20
    assert responses[1]["body"]["choices"][0]["message"]["content"] == "hello"
    assert responses[1]["request_id"] == responses[1]["body"]["id"]
    assert [c["text"] for c in responses[6]["body"]["choices"]] == ["end", "end"]
    errors = [response["body"]["error"] for response in responses[2:6]]
    assert [error["param"] for error in errors] == ["temperature", "model", "stream", "prompt"]
    assert fake.closed


def test_it_answers_as_the_server_does(files, fake, fakes, connect):
    body = {"prompt": "say:abc", "logprobs": 2, "echo": True, "max_tokens": 3, "request_id": "me"}
    requests = files([line(0, **body)])
    answer(files, requests, fake)
    (result,) = files.results()

    async def served():
        async with connect(fakes.FakeAsyncLLM()) as client:
            return (await client.post("/v1/completions", json=body)).json()

    expected = asyncio.run(served()) | {"created": result["response"]["body"]["created"]}
    assert result["response"]["body"] == expected


def test_at_most_so_many_at_once_and_no_overload(files, fake, monkeypatch):
    now = most = 0
    stream = fake.stream

    async def counted(*args, **kwargs):
        nonlocal now, most
        now += 1
        most = max(most, now)
        try:
            async for output in stream(*args, **kwargs):
                await asyncio.sleep(0)
                yield output
        finally:
            now -= 1

    monkeypatch.setattr(fake, "stream", counted)
    config = ServiceConfig.model_validate({"server": {"max_queued_requests": 1}})
    fake.num_queued = 5
    requests = files([line(n, f"say:{n}") for n in range(20)])
    assert answer(files, requests, fake, limit=3, config=config) == 0
    assert [item["response"]["body"]["choices"][0]["text"] for item in files.results()] == [
        str(n) for n in range(20)
    ]
    assert most == 3


# ---- what is wrong with the input ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON: Input data was truncated"),
        ("[1]", "not a batch request: Expected `object`, got `array`"),
        ('{"custom_id": "b"}', "not a batch request: Object missing required field `method`"),
        (json.dumps(line(1, "x") | {"custom_id": 3}), "not a batch request: Expected `str`, got"),
        (json.dumps(line(1, "x") | {"custom_id": ""}), "custom_id is empty"),
        (json.dumps(line(1, "x") | {"method": "GET"}), "expected method 'POST', got 'GET'"),
        (
            json.dumps(line(1, "x") | {"url": "/v1/completion"}),
            "there is no url '/v1/completion' for batches; did you mean '/v1/completions'?",
        ),
        (json.dumps(line(1, "x") | {"body": [1]}), "expected body to be an object"),
        (json.dumps(line(0, "x")), "custom_id 'id-0' is that of line 1 too"),
        ('{"custom_id": NaN}', "not valid JSON"),
    ],
)
def test_bad_lines_are_named(files, text, message):
    files.requests.write_text(json.dumps(line(0, "x")) + "\n\n" + text + "\n" + "{\n")
    with pytest.raises(BadBatchFile) as caught:
        read_requests(files.requests, batch_urls())
    first, second = caught.value.problems
    assert str(first).startswith(f"{files.requests}:3: {message}")
    assert str(second).startswith(f"{files.requests}:4: not valid JSON")


def test_files_that_cannot_be_used(files, tmp_path):
    with pytest.raises(ConfigError, match=r"none.jsonl: cannot be read: No such file"):
        read_requests(tmp_path / "none.jsonl", batch_urls())
    files.requests.write_text("\n\n")
    with pytest.raises(ConfigError, match="the file has no requests"):
        read_requests(files.requests, batch_urls())
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        Results(tmp_path, [])


# ---- resumption ---------------------------------------------------------------------------------


def test_results_are_continued(files, fake, fakes):
    requests = files([line(n, f"say:{n}") for n in range(6)])
    answer(files, requests, fake)
    whole = files.results()
    kept = [whole[4], whole[1]]
    broken = json.dumps(whole[2]).encode()
    failed = json.dumps(whole[3] | {"response": {"status_code": 503, "body": {}}})
    head = "".join(json.dumps(item) + "\n" for item in kept) + failed + "\n"
    files.output.write_bytes(head.encode() + broken[:-5])
    again = fakes.FakeAsyncLLM()
    assert answer(files, requests, again) == 0
    asked = [again.tokenizer.decode(call.prompt["prompt_token_ids"]) for call in again.calls]
    assert sorted(asked) == ["say:0", "say:2", "say:3", "say:5"]
    results = files.results()
    assert [r["custom_id"] for r in results] == [r["custom_id"] for r in whole]
    assert [results[4], results[1]] == kept
    assert {r["response"]["status_code"] for r in results} == {200}


def test_results_of_other_requests_are_left_alone(files, fake):
    requests = files([line(n, "say:a") for n in range(2)])
    for text, message in (
        (json.dumps({"custom_id": "x", "response": {"status_code": 200}}), "'x' is not among the"),
        (json.dumps(line(0, "say:a")), "not a result of a batch"),
        ("something else", "not a result of a batch"),
    ):
        files.output.write_text(text + "\n")
        with pytest.raises(ConfigError, match=message):
            Results(files.output, requests)
        assert files.output.read_text() == text + "\n"
    assert answer(files, requests, fake, restart=True) == 0
    assert len(files.results()) == 2


def test_two_runs_do_not_write_one_file(files):
    requests = files([line(0, "x")])
    with Results(files.output, requests) as first:
        first.write("id-0", 200, b'{"custom_id":"id-0","response":{"status_code":200}}')
        with pytest.raises(ConfigError, match="another run writes this file"):
            Results(files.output, requests, restart=True)
        assert len(files.results()) == 1


def test_a_dead_engine_ends_the_run_and_writes_no_refusals(files, fakes):
    class Dying(fakes.FakeAsyncLLM):
        """Dead from its third request on."""

        def stream(self, *args, **options):
            if len(self.calls) == 2:
                self.dead_reason = "it broke"
            return super().stream(*args, **options)

    requests = files([line(0, "say:a"), line(1, "say:b"), line(2, "fail:0")])
    with pytest.raises(EngineDeadError, match="it broke"):
        answer(files, requests, Dying(), limit=1)
    assert [item["custom_id"] for item in files.results()] == ["id-0", "id-1"]


# ---- as a process -------------------------------------------------------------------------------


@pytest.fixture
def take(tmp_path):
    """`take(seconds)`: how long a step takes, from the next run on."""
    folder = write_model_folder(tmp_path / "model")
    settings = {
        "model": {"source": str(folder), "weight_source": "dummy"},
        "plugins": {"load": ["octavo.testing.instant_executor"]},
        "kv_cache": {"num_blocks": 512},
        "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
    }

    def take(seconds):
        executor = {"kind": {"name": "instant", "step_s": seconds}}
        (tmp_path / "engine.yaml").write_text(yaml.safe_dump(settings | {"executor": executor}))

    return take


@pytest.fixture
def command(tmp_path, files, take):
    """Arguments of a run over an executor without a model."""
    take(0)
    names = ["-i", files.requests, "-o", files.output, "--config", tmp_path / "engine.yaml"]
    return [sys.executable, "-m", "octavo.server.command_line.main", "run-batch", *map(str, names)]


def started(command):
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def wait_for_results(files, count, process):
    deadline = time.monotonic() + 60
    while not files.output.exists() or files.output.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)


def test_interrupted_killed_and_continued(files, command, take):
    files([line(n, "x", max_tokens=30, ignore_eos=True) for n in range(40)])
    take(0.02)  # four answers in 0.6 seconds, all in 6
    for number, status in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        count = files.output.read_bytes().count(b"\n") if files.output.exists() else 0
        process = started(command)
        wait_for_results(files, count + 4, process)
        before = files.output.read_bytes()
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == status, errors
        assert files.output.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert "requests are left; the same command continues" in errors
    assert "Traceback" not in errors
    answered = files.output.read_bytes().count(b"\n")
    assert 8 <= answered < 40
    take(0)
    process = started(command)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert errors.splitlines()[-1] == "40 requests answered"
    results = files.results()
    assert [item["custom_id"] for item in results] == [f"id-{n}" for n in range(40)]
    texts = {item["response"]["body"]["choices"][0]["text"] for item in results}
    assert texts == {"a" * 30}


def test_requests_are_not_written_over(files, command, capsys):
    files([line(0, "x")])
    before = files.requests.read_bytes()
    files.output.symlink_to(files.requests)
    assert cli.main(command[3:]) == 2
    assert "holds the requests; expected another output file" in capsys.readouterr().err
    assert files.requests.read_bytes() == before


def test_exit_status_and_messages(files, command, tmp_path, capsys):
    parser = argparse.ArgumentParser()
    run_batch.add_arguments(parser)
    arguments = parser.parse_args(command[4:])
    files.requests.write_text("{\n[\n")
    assert run_batch.main(arguments) == 2
    assert [item.partition(": ")[0] for item in capsys.readouterr().err.splitlines()] == [
        "octavo",
        "octavo",
    ]
    assert not files.output.exists()
    files([line(0, "x", max_tokens=2), line(1, "x", top_p=3)])
    assert run_batch.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.endswith("2 requests answered, 1 of them with an error\n")
    assert run_batch.main(arguments) == 1  # nothing is left to do
    assert capsys.readouterr().err == "2 requests answered, 1 of them with an error\n"
    with pytest.raises(SystemExit):
        parser.parse_args([*command[4:], "--max-concurrency", "0"])
