"""Chat templates: Jinja in a sandbox, with what Hugging Face's templates expect to find there."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.core.errors import RequestError, nearest
from octavo.models.tokenizers.files import DEFAULT_TEMPLATE

TOOL_TEMPLATE = "tool_use"


class ChatTemplates:
    """Renders messages with a model's templates. Thread-safe.

    templates: by name. special_tokens: variables that every template sees.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.templates, self.special_tokens = dict(templates), dict(special_tokens)
        self._compile = lru_cache(maxsize=32)(_environment().from_string)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template: str | None,
        kwargs: Mapping[str, Any] | None,
    ) -> str:
        """See `Tokenizer.chat`. With `continue_final_message` no generation prompt is added."""
        plain = [_message(index, message) for index, message in enumerate(messages)]
        if not plain:
            raise RequestError("messages must not be empty", param="messages")
        marker = _mark_end(plain[-1]) if continue_final_message else None
        values = {
            **self.special_tokens,
            **(kwargs or {}),
            "messages": plain,
            "tools": [dict(tool) for tool in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        values.setdefault("documents", None)
        try:
            text = self._compile(self._choose(template, bool(tools))).render(values)
        except RequestError:
            raise
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"chat template, line {error.lineno}: {error.message}", param="chat_template"
            ) from error
        except Exception as error:
            # A template is a program, and whatever it raises comes of what it was given.
            reason = str(error) or type(error).__name__
            raise RequestError(f"chat template: {reason}", param="messages") from error
        return text if marker is None else _cut(text, marker)

    def _choose(self, template: str | None, tools: bool) -> str:
        if template is not None:
            if template in self.templates:
                return self.templates[template]
            if "{%" in template or "{{" in template:
                return template
            raise RequestError(
                f"chat template '{template}' is not known: {nearest(template, self.templates)}",
                param="chat_template",
            )
        for name in (TOOL_TEMPLATE, DEFAULT_TEMPLATE) if tools else (DEFAULT_TEMPLATE,):
            if name in self.templates:
                return self.templates[name]
        if self.templates:
            names = ", ".join(sorted(self.templates))
            raise RequestError(
                f"the model has several chat templates and no default, name one of: {names}",
                param="chat_template",
            )
        raise RequestError(
            "the model has no chat template: use completions, or give one with chat_template",
            param="chat_template",
        )


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what an assistant wrote, for training. Here
    the body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a model has never seen."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _message(index: int, message: Any) -> dict[str, Any]:
    """A fresh message with text content, without keys that say nothing, and with the arguments of
    its tool calls as mappings, which templates expect and OpenAI's clients send as JSON."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] must be a mapping with a 'role'", param="messages")
    plain = {key: value for key, value in message.items() if value is not None}
    if "content" in plain:
        plain["content"] = _content(index, plain["content"])
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_tool_call(call) for call in plain["tool_calls"]]
    return plain


def _content(index: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"messages[{index}].content must be a string or a list of parts, got "
            f"{type(content).__name__}",
            param="messages",
        )
    texts = []
    for number, part in enumerate(content):
        text = part if isinstance(part, str) else None
        if isinstance(part, Mapping):
            text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"messages[{index}].content[{number}] must be a text part, got '{kind}'",
                param="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _mark_end(message: dict[str, Any]) -> str:
    """Put a mark after the message's text. The space shows whether the template strips texts."""
    if not isinstance(message.get("content"), str):
        raise RequestError(
            "continue_final_message needs a final message with text content", param="messages"
        )
    marker = f"octavo{secrets.token_hex(16)}end "
    message["content"] += marker
    return marker


def _cut(text: str, marker: str) -> str:
    """What comes before the mark; the template strips texts when the mark lost its space."""
    end = text.rfind(marker)
    if end >= 0:
        return text[:end]
    end = text.rfind(marker.strip())
    if end < 0:
        raise RequestError(
            "continue_final_message: the chat template leaves out the final message's text",
            param="messages",
        )
    return text[:end].rstrip()
