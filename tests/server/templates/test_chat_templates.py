"""Chat templates: rendered in processes that can be killed, content formats, one BOS."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from octavo.core.contracts.tokenizer import ChatSource
from octavo.core.errors import RequestError
from octavo.models.tokenizers.chat import ChatTemplates
from octavo.server.templates.renderer import ChatRenderer

USER = {"role": "user", "content": "Hi"}
KEYWORDS: dict[str, Any] = {
    "tools": None,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "template": None,
    "kwargs": {},
}
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def renderer(template: str, **settings: Any) -> ChatRenderer:
    arguments = {"templates": {"default": template}, "special_tokens": {"bos_token": "<s>"}}
    source = ChatSource("octavo.models.tokenizers.chat:ChatTemplates", arguments)
    values = {"timeout_s": 30.0, "memory": 2**28, "longest": 10**6} | settings
    return ChatRenderer(source, **values)


def render(made: ChatRenderer, message: Any = USER, **changes: Any) -> Any:
    return made.render([message], **{**KEYWORDS, **changes})


def children() -> set[str]:
    """Processes of this one that render."""
    found = set()
    for file in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found |= set(file.read_text().split())
    return {child for child in found if renders(child)}


def renders(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return b"render_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def test_as_in_this_process_and_errors_with_the_templates_message() -> None:
    async def go() -> None:
        template = PLAIN + "{% if x is defined %}{{ raise_exception('no ' + x) }}{% endif %}"
        made = renderer(template)
        here = ChatTemplates({"default": template}, {"bos_token": "<s>"})
        try:
            for message in (USER, {"role": "user", "content": "é 👍" * 50_000}):
                expected = here.render([message], **KEYWORDS)
                assert await render(made, message) == expected
            with pytest.raises(RequestError, match="chat template: no wizards"):
                await render(made, kwargs={"x": "wizards"})
            with pytest.raises(RequestError, match="line 1") as caught:
                await render(made, template="{% if %}{{ x }}")
            assert caught.value.param == "chat_template"
            with pytest.raises(RequestError, match="cannot be rendered"):
                await render(made, kwargs={"x": 2**70})
            assert len(children()) == 1, "one process served all of them"
        finally:
            await made.close()
        assert children() == set()

    asyncio.run(go())


ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}{{ x }}"
)
HUGE = (
    "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
    "{{ n.s }}"
)
POWER = "{{ 9 ** (9 ** (9 ** 9)) }}"
REPEATED = "{{ 'ab' * 10 ** 11 }}"
PADDED = "{{ '%1000000000000d' % 1 }}{{ x }}"
RECURSIVE = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"
LONG = "{% for i in range(90000) %}0123456789abcdef{% endfor %}{{ x }}"
NESTED = "{% if x %}" * 3000 + "{{ x }}" + "{% endif %}" * 3000


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (ENDLESS, "longer than 2 s"),
        (POWER, "longer than 2 s|too much memory"),
        (HUGE, "too much memory"),
        (REPEATED, "too much memory"),
        (PADDED, "too much memory|OverflowError|too big"),
        (RECURSIVE, "recursion"),
        (LONG, "at most 1000000"),
        (NESTED, "nested too deep|too many|died"),
    ],
    ids=["endless", "power", "huge", "repeated", "padded", "recursive", "long", "nested"],
)
def test_bad_templates_are_bounded_and_harm_nobody(template: str, says: str) -> None:
    async def go() -> None:
        limit = 2.0 if "longer" in says else 60.0
        made = renderer(PLAIN, timeout_s=limit, memory=2**27, processes=2)
        try:
            assert await render(made) == "[user]Hi"
            bad = asyncio.create_task(render(made, template=template))
            for _ in range(5):
                assert await render(made) == "[user]Hi", "others are served meanwhile"
            with pytest.raises(RequestError, match=says):
                await bad
            assert await render(made) == "[user]Hi"
        finally:
            await made.close()
        assert children() == set()

    asyncio.run(go())


def test_a_render_that_is_given_up_frees_its_process() -> None:
    """At its time limit, if it does not end before."""

    async def go() -> None:
        made = renderer(PLAIN, processes=1, timeout_s=2.0)
        try:
            task = asyncio.create_task(render(made, template=ENDLESS))
            while not children():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await render(made) == "[user]Hi"
        finally:
            await made.close()

    asyncio.run(go())


def test_a_process_that_was_killed_is_replaced() -> None:
    async def go() -> None:
        made = renderer(PLAIN)
        try:
            await made.prepare()
            (child,) = children()
            os.kill(int(child), 9)
            assert await render(made) == "[user]Hi"
        finally:
            await made.close()

    asyncio.run(go())


LOOPING = (
    "{% for m in messages %}{% if m.content is string %}S{{ m.content }}{% else %}"
    "{% for part in m['content'] %}P{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
ASSIGNED = (
    "{% for m in messages %}{% set c = m.get('content') %}"
    "{% if c is string %}S{{ c }}{% else %}{% for p in c %}P{{ p['text'] }}{% endfor %}{% endif %}"
    "{% endfor %}"
)
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("template", "form", "content", "expected"),
    [
        (PLAIN, "auto", PARTS, "[user]a\nb"),
        (PLAIN, "auto", "a", "[user]a"),
        (LOOPING, "auto", PARTS, "PaPb"),
        (LOOPING, "auto", "a", "Sa"),
        (ASSIGNED, "auto", PARTS, "PaPb"),
        (LOOPING, "string", PARTS, "Sa\nb"),
        (LOOPING, "openai", PARTS, "PaPb"),
        (LOOPING, "openai", "a", "Pa"),
        (LOOPING, "auto", None, "S"),
    ],
)
def test_content_formats(template: str, form: str, content: Any, expected: str) -> None:
    made = ChatTemplates({"default": template}, {}, form)
    assert made.render([{"role": "user", "content": content}], **KEYWORDS) == expected


@pytest.mark.parametrize("form", ["string", "openai"])
def test_a_continued_message_in_either_format(form: str) -> None:
    made = ChatTemplates({"default": LOOPING + "<end>"}, {}, form)
    keywords = KEYWORDS | {"continue_final_message": True, "add_generation_prompt": False}
    text = made.render([{"role": "assistant", "content": PARTS}], **keywords)
    assert text == {"string": "Sa\nb", "openai": "PaPb"}[form]


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    message = {"role": "developer", "content": "x"}
    assert ChatTemplates({"default": PLAIN}, {}).render([message], **KEYWORDS) == "[system]x"
    knowing = PLAIN + "{# developer #}"
    assert ChatTemplates({"default": knowing}, {}).render([message], **KEYWORDS) == "[developer]x"
