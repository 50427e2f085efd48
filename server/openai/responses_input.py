"""The input of `/v1/responses` as messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from octavo.server.http.errors import ApiError
from octavo.server.openai.protocol.chat import FunctionCall
from octavo.server.openai.protocol.common import shown, validation_error
from octavo.server.openai.protocol.responses import ResponsesRequest

ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def to_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Messages for a chat template. Raises `ApiError` that names the item."""
    conversation = _Conversation()
    if body.instructions is not None:
        conversation.messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        conversation.messages.append({"role": "user", "content": body.input})
    else:
        for index, item in enumerate(body.input):
            conversation.add(f"input[{index}]", item)
    if not body.input:
        raise ApiError("input must not be empty", param="input", code="invalid_value")
    return conversation.finish()


class _Conversation:
    """Reasoning, text and calls of one turn of the assistant become one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None  # the assistant's message that still grows
        self._reasoning = ""  # of a message that is to come
        self._names: dict[str, str] = {}  # of functions, by the id of their call

    def finish(self) -> list[dict[str, Any]]:
        if self._reasoning:
            self._assistant()
        return self.messages

    def add(self, place: str, item: Any) -> None:
        if not isinstance(item, dict):
            raise _wrong(place, f"expected an object, got {shown(item)}")
        item = {key: value for key, value in item.items() if value is not None}
        match item.get("type", "message"):
            case "message":
                self._message(place, item)
            case "function_call":
                self._call(place, item)
            case "function_call_output":
                self._output(place, item)
            case "reasoning":
                parts = item.get("content") or item.get("summary") or []
                self._reasoning += text_of(f"{place}.content", parts, "\n")
                self._turn = None
            case "item_reference":
                raise _wrong(f"{place}.type", "nothing is stored that could be referred to")
            case other:
                raise _wrong(f"{place}.type", f"items of type {shown(other)} are not supported")

    def _message(self, place: str, item: Mapping[str, Any]) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise _wrong(f"{place}.role", f"expected {', '.join(ROLES)}, got {shown(role)}")
        content = text_of(f"{place}.content", item.get("content", ""), "\n")
        if role == "assistant":
            self._assistant(content)
        else:
            self._end_turn()
            self.messages.append({"role": role, "content": content})

    def _call(self, place: str, item: Mapping[str, Any]) -> None:
        call_id = _string(place, item, "call_id")
        try:
            given = {"name": item.get("name"), "arguments": item.get("arguments")}
            function = FunctionCall.model_validate(given).for_template()
        except ValidationError as error:
            refusal = validation_error(error)
            param = f"{place}.{refusal.param}"
            raise ApiError(f"{place}: {refusal.message}", param=param, code=refusal.code) from None
        self._names[call_id] = function["name"]
        turn = self._turn if self._turn is not None else self._assistant()
        call = {"id": call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)

    def _output(self, place: str, item: Mapping[str, Any]) -> None:
        self._end_turn()
        call_id = _string(place, item, "call_id")
        content = text_of(f"{place}.output", item.get("output", ""), "\n")
        message = {"role": "tool", "tool_call_id": call_id, "content": content}
        if call_id in self._names:
            message["name"] = self._names[call_id]
        self.messages.append(message)

    def _assistant(self, content: str = "") -> dict[str, Any]:
        self._turn = {"role": "assistant", "content": content}
        if self._reasoning:
            self._turn["reasoning_content"] = self._reasoning
            self._reasoning = ""
        self.messages.append(self._turn)
        return self._turn

    def _end_turn(self) -> None:
        if self._reasoning:
            self._assistant()
        self._turn = None


def text_of(place: str, content: Any, joint: str) -> str:
    """Text, or the texts of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(place, f"expected a string or an array of text parts, got {shown(content)}")
    texts = []
    for index, part in enumerate(content):
        where = f"{place}[{index}]"
        if not isinstance(part, dict):
            raise _wrong(where, f"expected a text part, got {shown(part)}")
        kind = part.get("type")
        text = part.get("refusal") if kind == "refusal" else part.get("text")
        if kind != "refusal" and kind not in TEXTS:
            raise _wrong(f"{where}.type", f"parts of type {shown(kind)} are not supported")
        if not isinstance(text, str):
            raise _wrong(f"{where}.text", f"expected a string, got {shown(text)}")
        texts.append(text)
    return joint.join(texts)


def _string(place: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise _wrong(f"{place}.{name}", f"expected a string, got {shown(value)}")
    return value


def _wrong(place: str, message: str) -> ApiError:
    return ApiError(f"{place}: {message}", param=place, code="invalid_value")
