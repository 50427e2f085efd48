"""Chat templates over real HTTP: a real tokenizer, rendering processes, an engine that answers by
script."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import time
from pathlib import Path

import httpx
import openai
import pytest
from tokenizers import Tokenizer, decoders, models, processors
from tokenizers import pre_tokenizers as pre

from octavo import LLM, SamplingParams
from octavo.core.contracts import NoOptions
from octavo.core.contracts.tokenizer import TokenizerContext
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.client import ThreadClient
from octavo.frontend.text.inputs import InputProcessor
from octavo.models.tokenizers.fast import FastTokenizer
from octavo.testing.scripted_engine import ScriptedEngine

PATH = "/v1/chat/completions"
BOS, EOS = 256, 257
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if 'wizard' in (m.role, m.content) %}{{ raise_exception('no wizards here') }}{% endif %}"
    "{% if m.role == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
    "{% if m.role == 'slow' %}{% for a in range(200) %}{% for b in range(5000) %}"
    "{% endfor %}{% endfor %}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if documents %}<{{ documents[0].text }}>{% endif %}"
    "{% if think %}(think){% endif %}"
    "{% if reasoning_effort %}(effort {{ reasoning_effort }}){% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Every byte is a token; `<s>` is put in front of a text, as Llama's tokenizers do."""
    folder: Path = tmp_path_factory.mktemp("model")
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return FastTokenizer(NoOptions(), TokenizerContext(folder, {}, {}))


class Served:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.engine = ScriptedEngine(
            lambda request: [*tokenizer.encode("ok", add_special_tokens=False), EOS],
            vocab_size=258,
        )
        inputs = InputProcessor(tokenizer, max_model_len=4096, vocab_size=258)
        self.llm = AsyncLLM.from_client(ThreadClient(lambda: self.engine), inputs)

    @property
    def seen(self):
        """The last prompt that the engine got."""
        return self.tokenizer.decode(
            self.engine.seen[-1].token_ids.tolist(), skip_special_tokens=False
        )


@pytest.fixture(scope="module")
def served(live_over, tokenizer):
    found = Served(tokenizer)
    with live_over(found.llm, chat_template_timeout_s=3) as live:
        found.url = live.url
        yield found


@pytest.fixture(scope="module")
def trusting(live_over, tokenizer):
    found = Served(tokenizer)
    settings = {"trust_request_chat_template": True, "chat_template_timeout_s": 3}
    with live_over(found.llm, **settings) as live:
        found.url = live.url
        yield found


def post(served, path=PATH, **body):
    body = {"messages": [{"role": "user", "content": "Hi"}]} | body
    body = {key: value for key, value in body.items() if value is not None or key != "messages"}
    return httpx.post(served.url + path, json=body, timeout=60)


def ok(served, **body):
    response = post(served, **body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "ok"
    return served.seen


def test_rendered_and_tokenized_with_one_bos(served):
    plain = "<s>[user]Hi</s>[assistant]"
    assert ok(served) == plain
    assert served.engine.seen[-1].token_ids.tolist().count(BOS) == 1
    assert ok(served, add_special_tokens=True) == plain
    for prompt in (plain, plain.removeprefix("<s>")):
        httpx.post(
            f"{served.url}/v1/completions", json={"prompt": prompt}, timeout=60
        ).raise_for_status()
        assert served.seen == plain
    counted = post(served, "/tokenize").json()
    assert counted["tokens"] == served.engine.seen[-1].token_ids.tolist()
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        client.responses.create(model="fake", input="Hi")
    assert served.seen == plain


def test_offline_sees_the_same_tokens(served):
    plain = "<s>[user]Hi</s>[assistant]"
    engine = ScriptedEngine(vocab_size=258)
    params = SamplingParams(max_tokens=1)
    inputs = InputProcessor(served.tokenizer, max_model_len=4096, vocab_size=258)
    with LLM.from_engine(engine, inputs) as llm:
        llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)
        llm.generate([plain, plain.removeprefix("<s>")], params, use_tqdm=False)
        llm.chat(
            [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": None, "tool_calls": []},
                {"role": "assistant", "content": "Sure"},
            ],
            params,
            use_tqdm=False,
            continue_final_message=True,
        )
    prompts = [request.token_ids.tolist() for request in engine.seen]
    assert prompts[0] == prompts[1] == prompts[2]
    last = served.tokenizer.decode(prompts[3], skip_special_tokens=False)
    assert last == "<s>[user]q</s>[assistant]</s>[assistant]Sure"


def test_parameters_of_the_template(served):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Sure"}]
    plain = "<s>[user]q</s>[assistant]Sure"
    assert ok(served, messages=messages, continue_final_message=True) == plain
    assert ok(served, messages=messages, add_generation_prompt=False) == plain + "</s>"
    assert "<doc>" in ok(served, documents=[{"text": "doc"}])
    assert "(think)" in ok(served, chat_template_kwargs={"think": True})
    assert "(effort low)" in ok(served, reasoning_effort="low")
    assert "(effort max)" in ok(
        served, reasoning_effort="max", chat_template_kwargs={"reasoning_effort": "low"}
    )
    assert "effort" not in ok(served, reasoning_effort=None)
    counted = post(served, "/tokenize", reasoning_effort="none").json()["count"]
    assert counted == len("[user]Hi[assistant](effort none)") + 2
    assert "[system]x" in ok(served, messages=[{"role": "developer", "content": "x"}])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "[user]a\nb<" in ok(served, messages=[{"role": "user", "content": parts}])


def test_responses_name_their_own_fields(served):
    """Whatever the parts that they share with chats call them."""

    def answer(**body):
        return httpx.post(f"{served.url}/v1/responses", json={"input": "Hi"} | body, timeout=60)

    def refused(**body):
        response = answer(**body)
        assert response.status_code == 400, response.text
        return response.json()["error"]

    response = answer(reasoning={"effort": "high", "summary": "auto"}).json()
    assert "(effort high)" in served.seen
    assert response["reasoning"] == {"effort": "high", "summary": "auto"}
    error = refused(input=[{"role": "user", "content": "wizard"}])
    assert (error["param"], error["message"]) == ("input", "chat template: no wizards here")
    error = refused(input=[{"role": "user", "content": "x"}] * 5000)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert refused(chat_template_kwargs={"tools": []})["param"] == "chat_template_kwargs"
    include = ["message.output_text.logprobs"]
    error = refused(top_logprobs=500, include=include)
    assert (error["param"], error["message"].split()[0]) == ("top_logprobs", "top_logprobs")
    assert refused(top_logprobs=-1, include=include)["param"] == "top_logprobs"
    tool = {"type": "function", "name": "f", "parameters": {}}
    assert refused(tools=[tool, tool])["param"] == "tools[1].name"
    assert refused(max_output_tokens=99999)["param"] == "input"
    assert refused(reasoning={"effort": "lots"})["param"] == "reasoning.effort"
    assert refused(reasoning={"summary": "detailed"})["param"] == "reasoning.summary"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", "no wizards here"),
        ({"messages": [{"role": "loop", "content": "x"}]}, "messages", "longer than 3 s"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "not trusted"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages'"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "exclude",
        ),
        ({"reasoning_effort": "lots"}, "reasoning_effort", "'lots'"),
        ({"reasoning_effort": 3}, "reasoning_effort", "'low'"),
        ({"max_tokens": 99999}, "messages", "max_model_len"),
    ],
)
def test_refusals(served, body, param, says):
    before = len(served.engine.seen)
    response = post(served, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert len(served.engine.seen) == before
    ok(served)


def test_template_of_a_request(trusting):
    assert ok(trusting, chat_template="<{{ messages[0].content }}>") == "<Hi>"
    response = post(trusting, chat_template="{% bad %}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "chat_template"


def test_endless_templates_of_requests_delay_nobody_else(trusting):
    async def go():
        async with httpx.AsyncClient(base_url=trusting.url, timeout=60) as client:
            hi = {"messages": [{"role": "user", "content": "Hi"}]}
            await client.post(PATH, json=hi)
            bad = [
                asyncio.create_task(client.post(PATH, json=hi | {"chat_template": ENDLESS}))
                for _ in range(6)
            ]
            await asyncio.sleep(0.1)
            answers = [await client.post(PATH, json=hi) for _ in range(5)]
            assert not any(task.done() for task in bad), "others are served meanwhile"
            assert [answer.status_code for answer in answers] == [200] * 5
            for first in itertools.islice(asyncio.as_completed(bad), 2):
                response = await first
                assert response.status_code == 400
                assert "longer than" in response.json()["error"]["message"]
            for task in bad:
                task.cancel()
            await asyncio.gather(*bad, return_exceptions=True)

    asyncio.run(go())
    ok(trusting)


def children():
    """Processes that render."""
    found = set()
    for file in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found |= set(file.read_text().split())
    return {child for child in found if renders(child)}


def renders(pid):
    with contextlib.suppress(OSError):
        return b"render_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@pytest.fixture
def fresh(live_over, tokenizer):
    """A server of its own, and `children`: the processes that render for it."""
    found = Served(tokenizer)
    others = children()
    with live_over(found.llm, chat_template_timeout_s=3) as live:
        found.url = live.url
        ok(found)
        found.children = children() - others
        yield found


def test_who_leaves_costs_no_process(fresh):
    """It takes a second to make a new one, for a template that would end in milliseconds."""
    body = json.dumps({"messages": [{"role": "slow", "content": "x"}]}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    address = httpx.URL(fresh.url)
    for _ in range(3):
        with socket.create_connection((address.host, address.port)) as client:
            client.sendall(head + body)
            time.sleep(0.02)
        ok(fresh, messages=[{"role": "slow", "content": "y"}])
        assert "y</s>" in fresh.seen
    assert fresh.children
    assert fresh.children <= children()


def test_no_process_is_left(live_over, tokenizer):
    before = children()
    found = Served(tokenizer)
    with live_over(found.llm) as live:
        found.url = live.url
        ok(found)
        assert children() - before
    assert not children() - before
