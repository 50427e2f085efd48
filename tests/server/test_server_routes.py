"""Health, models, tokenize, detokenize, and what a client that goes away leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from octavo.core.errors import ModelNotFound


def run(coroutine):
    return asyncio.run(coroutine)


def test_health_waits_for_the_engine(connect, fake):
    go_on = asyncio.Event()
    fake.start_delay, fake.start = 1.0, go_on.wait

    async def go():
        async with connect(fake) as client:
            for path in ("/health", "/ping"):
                response = await client.get(path)
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "engine_loading"
            response = await client.post("/v1/completions", json={"prompt": "x"})
            assert response.status_code == 503
            assert response.headers["retry-after"] == "5"
            assert (await client.get("/version")).status_code == 200
            assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] is None
            go_on.set()
            deadline = time.monotonic() + 60
            while (await client.get("/health")).status_code != 200:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200

    run(go())


def test_failed_start_is_told(connect, fake):
    fake.start_error = ModelNotFound("no model at /nowhere")

    async def go():
        async with connect(fake) as client:
            response = await client.get("/health")
            assert response.status_code == 503
            assert "no model at /nowhere" in response.json()["error"]["message"]

    run(go())


def test_dead_engine(connect, fake):
    async def go():
        async with connect(fake) as client:
            fake.dead_reason = "out of memory"
            for response in (
                await client.get("/health"),
                await client.post("/v1/completions", json={"prompt": "x"}),
            ):
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "engine_dead"
                assert "out of memory" in response.json()["error"]["message"]

    run(go())


def test_models(connect, fake):
    async def go():
        async with connect(fake) as client:
            models = (await client.get("/v1/models")).json()
            assert models["object"] == "list"
            assert [model["id"] for model in models["data"]] == ["fake", "alias"]
            assert {model["max_model_len"] for model in models["data"]} == {256}
            assert {model["root"] for model in models["data"]} == {"fake/model"}
            card = (await client.get("/v1/models/alias")).json()
            assert card == models["data"][1]
            assert (await client.get("/v1/models/a/b")).status_code == 404
            assert (await client.get("/v1/models/")).json() == models

    run(go())


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "/chat/completions; there is /v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/v1/chat/completions; there is /v1/chat/completions"),
        ("/v1/tokenize", "/v1/tokenize; there is /tokenize"),
        ("/v1/embeddings", "/v1/embeddings"),
    ],
)
def test_a_wrong_base_url_is_told(connect, fake, path, hint):
    async def go():
        async with connect(fake) as client:
            response = await client.post(path, json={})
            assert response.status_code == 404
            assert response.json()["error"]["message"] == f"no such route: POST {hint}"

    run(go())


def test_names_of_tokens_are_made_off_the_event_loop(connect, fake, fakes):
    threads = []

    class Tokenizer(fakes.ByteTokenizer):
        def token_bytes(self, token_id):
            threads.append(threading.get_ident())
            return super().token_bytes(token_id)

    fake.tokenizer = Tokenizer()

    async def go():
        async with connect(fake) as client:
            body = {"prompt": "ab", "return_token_strs": True}
            answer = (await client.post("/tokenize", json=body)).json()
            assert answer["token_strs"] == ["<s>", "a", "b"]
        assert threads
        assert threading.get_ident() not in threads

    run(go())


def test_tokenize_and_detokenize(connect, fake):
    async def go():
        async with connect(fake) as client:
            body = {"model": "fake", "prompt": "aü", "return_token_strs": True}
            answer = (await client.post("/tokenize", json=body)).json()
            assert answer == {
                "count": 4,
                "max_model_len": 256,
                "tokens": [256, 97, 0xC3, 0xBC],
                "token_strs": ["<s>", "a", "bytes:\\xc3", "bytes:\\xbc"],
            }
            body = {"prompt": "a", "add_special_tokens": False}
            answer = (await client.post("/tokenize", json=body)).json()
            assert answer == {"count": 1, "max_model_len": 256, "tokens": [97]}
            answer = await client.post(
                "/tokenize", json={"prompt": "", "add_special_tokens": False}
            )
            assert answer.json()["tokens"] == []
            messages = [{"role": "user", "content": "hi"}]
            answer = (await client.post("/tokenize", json={"messages": messages})).json()
            assert bytes(answer["tokens"]) == b"user\nhi\nassistant\n"
            body = {"messages": messages, "add_generation_prompt": False}
            answer = (await client.post("/tokenize", json=body)).json()
            assert bytes(answer["tokens"]) == b"user\nhi\n"
            body = {"messages": messages, "add_special_tokens": True}
            answer = (await client.post("/tokenize", json=body)).json()
            assert answer["tokens"][0] == 256
            answer = await client.post("/detokenize", json={"tokens": [256, 97, 98]})
            assert answer.json() == {"prompt": "<s>ab"}
            assert (await client.post("/detokenize", json={"tokens": []})).json()["prompt"] == ""

    run(go())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": [{"role": "wizard"}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "u"}], "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [259]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_tokenize_mistakes(connect, fake, path, body, param):
    async def go():
        async with connect(fake) as client:
            response = await client.post(path, json=body)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == param
            response = await client.post(path, json={**body, "model": "other"})
            assert response.status_code in (400, 404)

    run(go())


def test_text_work_leaves_the_loop_free(connect, fake):
    begun, go_on = threading.Event(), threading.Event()
    encode = fake.inputs.encode

    def slow(text, **options):
        begun.set()
        assert go_on.wait(60)
        return encode(text, **options)

    fake.inputs.encode = slow

    async def go():
        async with connect(fake) as client:
            request = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
            while not begun.is_set():
                await asyncio.sleep(0.01)
            response = await client.get("/health")
            assert response.status_code == 200
            assert not request.done(), "health was answered while the prompt was tokenized"
            go_on.set()
            assert (await request).status_code == 200

    try:
        run(go())
    finally:
        go_on.set()


async def disconnect(app, path, body, after):
    """Call the app as a server would, and go away once `after()` says so."""
    sent, state = [], {"body": False}

    async def receive():
        if not state["body"]:
            state["body"] = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        while not after(sent):
            await asyncio.sleep(0.005)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "scheme": "http",
        "server": ("test", 80),
        "client": ("test", 1),
        "root_path": "",
    }
    await asyncio.wait_for(app(scope, receive, send), 60)
    return sent


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("prompt", ["slow", ["slow", "slow", "say:x"]])
def test_client_that_leaves_aborts_its_request(connect, fake, streaming, prompt):
    fake.max_model_len = 100000

    async def go():
        async with connect(fake) as client:
            app = client._transport.app
            body = {"prompt": prompt, "stream": streaming, "n": 2}
            running = 1 if prompt == "slow" else 2

            def after(sent):
                return len(fake.calls) >= running and (len(sent) > 3 or not streaming)

            await disconnect(app, "/v1/completions", body, after)
            assert len(fake.aborted) >= running
            assert set(fake.aborted) <= {call.request_id for call in fake.calls}
            assert (await client.get("/load")).json() == {"server_load": 0}
            assert len(asyncio.all_tasks()) <= 2, "nothing is left running"

    run(go())


def test_the_timeline_of_a_request(connect, fake):
    async def go():
        async with connect(fake) as client:
            known = (await client.get("/debug/requests/known")).json()
            assert known == {"id": "known", "events": [{"at": 0.0, "event": "queued"}]}
            unknown = await client.get("/debug/requests/other")
            assert unknown.status_code == 404
            assert "'other'" in unknown.json()["error"]["message"]

    run(go())


def test_the_server_imports_no_torch():
    code = (
        "import octavo.server.process.serve, sys; "
        "print(*(m for m in ('torch', 'transformers') if m in sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert result.stdout.strip() == ""
