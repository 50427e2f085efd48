"""Every bad value is refused, by the application alone. What a server does with bad requests
is in test_poison_requests.py."""

from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

from octavo import AsyncLLM
from octavo.server.config import ServiceConfig
from octavo.server.http.app import create_app
from octavo.server.openai.protocol.chat import ChatRequest
from octavo.server.openai.protocol.completions import CompletionRequest
from octavo.testing.model_folder import write_model_folder

from .poison import (
    BASE,
    BODIES,
    CHAT,
    GRAMMARS,
    HI,
    HUGE,
    LIMITS,
    NUMBERS,
    PATHS,
    TEXT,
    cases,
    check,
    filled,
)
from .real_server import CONTEXT, CONTROL, SETTINGS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model_folder(tmp_path_factory.mktemp("poison") / "model", max_model_len=CONTEXT)


@pytest.fixture(scope="module")
def vocab(model):
    return json.loads((model / "config.json").read_text())["vocab_size"]


@pytest.fixture(scope="module")
def client(model):
    """A client of the application over a tiny model, which answers at the end as at the start."""
    settings = SETTINGS | {"model": SETTINGS["model"] | {"source": str(model)}}
    config = ServiceConfig.model_validate(settings)
    app = create_app(AsyncLLM(config=config), config)
    with TestClient(app) as client:
        client.portal.call(app.state.server.started.wait)
        before = client.post(TEXT, json=CONTROL)
        assert before.status_code == 200, before.text
        yield client
        after = client.post(TEXT, json=CONTROL)
        assert after.json()["choices"] == before.json()["choices"]


@pytest.mark.parametrize(("path", "name", "value"), list(cases()))
def test_values(client, vocab, path, name, value):
    body = BASE[path] | {name: filled(value, vocab)}
    # What is too much together with the prompt is told of either.
    param = None if name in LIMITS else name
    check(client.post(path, json=body), param=param)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", [*NUMBERS, "logit_bias"])
@pytest.mark.parametrize("written", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_none(client, path, name, written):
    value = f'{{"1": {written}}}' if name == "logit_bias" else written
    text = json.dumps(BASE[path] | {name: "HERE"}).replace('"HERE"', value)
    headers = {"content-type": "application/json"}
    check(client.post(path, content=text, headers=headers))


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_json_object(client, path, name):
    headers = {"content-type": "application/json"}
    check(client.post(path, content=BODIES[name], headers=headers))


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"messages": []}, 400),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, 400),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [HUGE]}, 400),
        ("/detokenize", {"tokens": ["a"]}, 400),
        ("/detokenize", {"tokens": 5}, 400),
        (TEXT, {"prompt": "x", "model": "other"}, 404),
        (CHAT, {"messages": HI, "model": "other"}, 404),
        (
            CHAT,
            {"messages": HI, "add_generation_prompt": True, "continue_final_message": True},
            400,
        ),
        (CHAT, {"messages": HI, "top_logprobs": 2}, 400),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 6}, 400),
        (TEXT, {"prompt": ["x"] * 1000, "n": 8}, 400),
        (TEXT, {"prompt": "x", "stream": True, "prompt_logprobs": 1}, 400),
        ("/v1/nothing", {}, 404),
    ],
)
def test_other_mistakes(client, path, body, status):
    check(client.post(path, json=body), status)


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_bad_grammars(client, path, name):
    check(client.post(path, json=BASE[path] | GRAMMARS[name]))


UNSUPPORTED = [
    (path, name)
    for path, cls in ((TEXT, CompletionRequest), (CHAT, ChatRequest))
    for name in cls.unsupported
]


@pytest.mark.parametrize(("path", "name"), UNSUPPORTED)
def test_known_and_unsupported_parameters_are_refused_by_name(client, path, name):
    answer = client.post(path, json=BASE[path] | {name: {"something": "else"}})
    error = check(answer, param=name)
    assert name in error["message"]
    assert error["code"] == "unsupported_parameter"
    assert client.post(path, json=BASE[path] | {name: None}).status_code == 200
