"""Large bodies: read as small ones are, and without holding up others."""

from __future__ import annotations

import asyncio
import json
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.server.http import large_body
from octavo.server.http.body import parse_object, parsed
from octavo.server.http.errors import ApiError
from octavo.server.http.large_body import (
    LARGE,
    MAX_VALUES,
    Threads,
    count_values,
    decode_large,
    token_ids,
)

PADDING = {"user": "x" * LARGE}

numbers = st.integers(-(2**63), 2**64 - 1)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.floats(allow_nan=False, allow_infinity=False)
    | st.text() | st.sampled_from(['"', "\\", '\\"', '],["', "a\\\\", "{,}"])
    | st.lists(numbers) | st.lists(st.lists(numbers)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)  # fmt: skip
spaces = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")])


@pytest.fixture(scope="module", autouse=True)
def _small_pieces():
    """So that small examples are cut, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_body, "PIECE", 3)
        yield


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=3), values, max_size=4), spaces, st.booleans())
def test_what_is_read_is_what_was_sent(found, separators, ascii):
    data = json.dumps(found, separators=separators, ensure_ascii=ascii).encode()
    assert decode_large(data) == msgspec.json.decode(data)


def count(value) -> int:
    if isinstance(value, dict):
        return max(len(value), 1) + sum(map(count, value.values()))
    return max(len(value), 1) + sum(map(count, value)) if isinstance(value, list) else 0


@settings(max_examples=60, deadline=None)
@given(values, spaces)
def test_values_are_counted(value, separators):
    """Of an empty array or object its bracket counts, of others the commas besides."""
    data = json.dumps(value, separators=separators).encode()
    assert count_values(data, 10**9) == count(value)
    assert (count_values(data, 2) > 2) == (count(value) > 2)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=30).map(lambda data: b'{"a":"' + data), st.integers(0, 5))
def test_what_is_no_json_is_refused_as_ever(data, cut):
    data = data + b'"}'[cut:]
    try:
        expected = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError):
        expected = None
    try:
        found = decode_large(data)
    except (msgspec.MsgspecError, ValueError):
        found = None
    assert found == expected


def test_only_lists_of_integers_are_token_ids():
    assert token_ids(b"[1,2, -3 ,4]") == [1, 2, -3, 4]
    assert token_ids(b"[ [1,2] ,\n[3],[] ]") == [[1, 2], [3], []]
    assert token_ids(b"[    ]") == []
    for other in (b"[1,[2]]", b"[[1],2]", b'[1,"2"]', b"[1.5,2]", b'["1,2"]', b"[[1,[2]]]", b'"x"'):
        assert token_ids(other) is None, other


TOO_MANY = {
    "objects": {"tools": [{}] * (MAX_VALUES + 1)},
    "strings": {"stop": ["a"] * (MAX_VALUES + 1)},
    "members": {str(i): 1 for i in range(MAX_VALUES + 1)},
    "lists of ids": {"prompt": [[1]] * (MAX_VALUES + 1)},
    "together": {"a": [{}] * (MAX_VALUES // 2), "b": [{}] * (MAX_VALUES // 2 + 9)},
}


@pytest.mark.parametrize("body", TOO_MANY.values(), ids=TOO_MANY)
def test_too_many_values_are_refused(body):
    with pytest.raises(ApiError, match=f"at most {MAX_VALUES} values") as refused:
        parse_object(json.dumps(body | PADDING).encode())
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


def test_token_ids_and_text_may_be_many():
    ids = list(range(MAX_VALUES + 5))
    body = {"prompt": ids, "batch": [ids[:70_000], ids], "text": ['{"a": [1,2]}, '] * 9} | PADDING
    assert parse_object(json.dumps(body).encode()) == body
    assert parse_object(json.dumps({"text": "[{, " * LARGE}).encode()) == {"text": "[{, " * LARGE}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'["%s"]', "must be a JSON object"),
        (b'{"a": "%s", }', "not valid JSON: trailing comma in object"),
        (b'{"a": "%s\xff"}', "not valid UTF-8 at byte"),
        (b'{"a": "%s', "not valid JSON"),
        (b'{"a": "%s\\', "not valid JSON"),
        (b'{"a": "%s\\ud800"}', "not valid JSON"),
        (b'{"a": "%s", "b": NaN}', "not valid JSON"),
        (b'{"a": "%s", "b": 1e999}', "out of range"),
        (b'{"a": "%s", "b": ' + b"[" * 9999, "nested too deeply"),
    ],
)
def test_errors_say_what_is_wrong(data, message):
    with pytest.raises(ApiError, match=message) as refused:
        parse_object(data.replace(b"%s", b"x" * LARGE))
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


def test_others_go_on_while_a_large_body_is_parsed():
    async def turns(data):
        """How often others had a turn, and in which thread it was parsed."""
        count, done = 0, False

        async def others():
            nonlocal count
            while not done:
                await asyncio.sleep(0)
                count += 1

        running = asyncio.create_task(others())
        thread = await parsed(threads, data, lambda _: threading.get_ident())
        before, done = count, True
        await running
        return before, thread

    threads = Threads()
    small, large = b'{"prompt": "x"}', json.dumps({"prompt": [7] * 10**6}).encode()
    assert asyncio.run(turns(small)) == (0, threading.get_ident())
    count, thread = asyncio.run(turns(large))
    threads.close()
    assert count > 0
    assert thread != threading.get_ident()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_server_reads_them(real_server, path):
    def refusal(body):
        answer = real_server.client.post(path, json=body | {"user": "x" * LARGE})
        assert answer.status_code == 400
        return answer.json()["error"]

    name = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}.get(path, "input")
    text = [{"role": "user", "content": "fox " * 9}]
    given = "fox " * 9 if name == "prompt" else text
    body = {name: given, "user": "x" * LARGE}
    assert real_server.client.post(path, json=body).status_code == 200
    assert refusal({name: given, "top_k": -5})["param"] == "top_k"
    assert refusal({name: given, "metadata": [{}] * (MAX_VALUES + 1)})["code"] == "invalid_json"
    many = ["fox"] * 30_000 if name == "prompt" else text * 12_000
    assert refusal({name: many})["param"] == name


def test_tokenize_and_detokenize_read_them(real_server):
    post = real_server.client.post
    tokens = post("/tokenize", json={"prompt": "fox " * (LARGE // 4)}).json()
    assert tokens["count"] == len(tokens["tokens"]) > 1000
    assert post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"] == "fox " * (
        LARGE // 4
    )
    chat = {"messages": [{"role": "user", "content": "fox"}] * 12_000}
    assert post("/tokenize", json=chat).json()["count"] > 12_000
    wrong = post("/detokenize", json={"tokens": [*tokens["tokens"], -1]}).json()["error"]
    assert wrong["param"] == "tokens"


def test_small_prompts_do_not_wait_for_large_ones(connect, fake):
    """However many there are, and however long their tokenizing takes."""
    begun, go_on, number = threading.Event(), threading.Event(), 40
    encode = fake.inputs.encode

    def slow(text, **options):
        if len(text) > LARGE:
            begun.set()
            assert go_on.wait(60)
            text = "say:x"
        return encode(text, **options)

    fake.inputs.encode = slow
    fake.inputs.fewest_tokens = lambda text: 0  # none is refused before it is tokenized

    async def go():
        async with connect(fake) as client:

            async def ask(prompt):
                body = {"prompt": prompt, "max_tokens": 2}
                return (await client.post("/v1/completions", json=body)).status_code

            large = [asyncio.create_task(ask("x" * (LARGE + 1))) for _ in range(number)]
            while not begun.is_set():
                await asyncio.sleep(0.01)
            assert await ask("say:hi") == 200
            assert not any(task.done() for task in large)
            go_on.set()
            assert await asyncio.gather(*large) == [200] * number

    try:
        asyncio.run(go())
    finally:
        go_on.set()
