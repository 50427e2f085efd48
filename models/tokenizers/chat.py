"""Chat templates: Jinja in a sandbox, with what Hugging Face's templates expect to find there."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
RESERVED = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
)
"""Variables that a caller's keywords may not set."""


class ChatTemplates:
    """Renders messages with a model's templates. Thread-safe.

    templates: by name. special_tokens: variables that every template sees. content_format: see
    `TokenizerContext`.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        content_format: str = "auto",
    ) -> None:
        self.templates, self.special_tokens = dict(templates), dict(special_tokens)
        self._format = content_format
        self._compile = lru_cache(maxsize=32)(compile_template)

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
        if not messages:
            raise RequestError("messages must not be empty", param="messages")
        _refuse_reserved(kwargs or {})
        try:
            compiled = self._compile(self._choose(template, bool(tools)))
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"chat template, line {error.lineno}: {error.message}", param="chat_template"
            ) from error
        except RecursionError as error:
            raise RequestError(
                "chat template: it is nested too deep", param="chat_template"
            ) from error
        plain = [self._message(compiled, index, each) for index, each in enumerate(messages)]
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
            text = compiled.template.render(values)
        except Exception as error:
            # A template is a program, and whatever it raises comes of what it was given.
            reason = str(error) or type(error).__name__
            raise RequestError(f"chat template: {reason}", param="messages") from error
        return text if marker is None else _cut(text, marker)

    def _message(self, compiled: Compiled, index: int, message: Any) -> dict[str, Any]:
        """A fresh message without keys that say nothing. Content is text or text parts, as the
        template takes it; none is empty text. Arguments of tool calls are mappings, which templates
        expect and OpenAI's clients send as JSON. The role `developer` is `system` to a template
        that does not know it."""
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"messages[{index}] must be a mapping with a 'role'", param="messages"
            )
        plain = {key: value for key, value in message.items() if value is not None}
        if "content" in message:
            parts = self._format == "openai" or (
                self._format == "auto" and compiled.takes_parts and not _is_text(plain)
            )
            plain["content"] = _content(index, plain.get("content", ""), parts)
        if isinstance(plain.get("tool_calls"), list):
            plain["tool_calls"] = [_tool_call(call) for call in plain["tool_calls"]]
        if plain["role"] == "developer" and not compiled.knows_developer:
            plain["role"] = "system"
        return plain

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


@dataclass(frozen=True)
class Compiled:
    """takes_parts: whether it goes through the parts of a message's content. knows_developer:
    whether it has a word for the role `developer`."""

    template: jinja2.Template
    takes_parts: bool
    knows_developer: bool


def compile_template(source: str) -> Compiled:
    """Raises `jinja2.TemplateSyntaxError`."""
    environment = _environment()
    takes_parts = _takes_parts(environment.parse(source))
    return Compiled(environment.from_string(source), takes_parts, "developer" in source)


def _takes_parts(tree: jinja2.nodes.Template) -> bool:
    """Whether there is a loop over some `content`, or over a name that was set to one."""
    names = {
        assigned.target.name
        for assigned in tree.find_all(jinja2.nodes.Assign)
        if isinstance(assigned.target, jinja2.nodes.Name) and _is_content(assigned.node)
    }
    for loop in tree.find_all(jinja2.nodes.For):
        over = loop.iter
        while isinstance(over, jinja2.nodes.Filter) and over.node is not None:
            over = over.node
        if _is_content(over) or (isinstance(over, jinja2.nodes.Name) and over.name in names):
            return True
    return False


def _is_content(node: jinja2.nodes.Node) -> bool:
    match node:
        case jinja2.nodes.Getattr(attr="content"):
            return True
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
            return True
        case jinja2.nodes.Call(
            node=jinja2.nodes.Getattr(attr="get"), args=[jinja2.nodes.Const(value="content"), *_]
        ):
            return True
    return False


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


def _is_text(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("content", ""), str)


def _content(index: int, content: Any, as_parts: bool) -> str | list[dict[str, str]]:
    """Text parts, as a list or joined by line breaks."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if as_parts else content
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
    return [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)


def _refuse_reserved(kwargs: Mapping[str, Any]) -> None:
    for name in RESERVED:
        if name in kwargs:
            raise RequestError(
                f"chat_template_kwargs cannot set '{name}': it has a parameter of its own",
                param="chat_template_kwargs",
            )


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
    marker = f"octavo{secrets.token_hex(16)}end "
    content = message.get("content")
    if isinstance(content, list) and content:
        message["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + marker}]
    elif isinstance(content, str):
        message["content"] = content + marker
    else:
        raise RequestError(
            "continue_final_message needs a final message with text content", param="messages"
        )
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
