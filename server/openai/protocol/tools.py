"""Tools and the choice among them, in OpenAI's form for chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field

from octavo.server.http.errors import ApiError
from octavo.server.openai.protocol.common import Part, shown

NAME = r"^[A-Za-z0-9_.:-]+$"

CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        },
    ]
}


class Function(Part):
    name: str = Field(max_length=128, pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        default=None, description="JSON schema of the arguments."
    )
    strict: bool | None = Field(
        default=None, description="Accepted: what a forced call's arguments are is always held to."
    )


class Tool(Part):
    type: Literal["function"] = "function"
    function: Function

    def for_template(self) -> dict[str, Any]:
        """What a chat template and a tool parser see."""
        return {"type": self.type, "function": self.function.model_dump(exclude_unset=True)}


class ToolChoice(NamedTuple):
    """mode: `none`, `auto`, `required` or `named` (then with the tool's name)."""

    mode: str
    name: str | None = None

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.mode in ("required", "named")


NO_CHOICE = ToolChoice("none")


def read_choice(given: Any, tools: Sequence[Tool]) -> ToolChoice:
    """The choice that a request makes. Raises `ApiError`."""
    if given is None:
        return ToolChoice("auto" if tools else "none")
    name = None
    if isinstance(given, dict):
        if given.get("type") != "function":
            raise _error(
                f"tool_choice of type {shown(given.get('type'))} is not supported; expected "
                "'none', 'auto', 'required' or a function",
                "unsupported_parameter",
            )
        function = given.get("function")
        name = function.get("name") if isinstance(function, dict) else given.get("name")
        if not isinstance(name, str):
            raise _error("tool_choice must name a function")
        names = [tool.function.name for tool in tools]
        if name not in names:
            raise _error(f"tool_choice names {shown(name)}, which is not among the tools")
        return ToolChoice("named", name)
    if given not in ("none", "auto", "required"):
        raise _error(
            f"tool_choice must be 'none', 'auto', 'required' or a function, got {shown(given)}"
        )
    if given == "required" and not tools:
        raise _error("tool_choice 'required' needs tools")
    return ToolChoice(given if tools else "none")


def _error(message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(message, param="tool_choice", code=code)


def check_names(tools: Sequence[Tool], place: str = "function.name") -> None:
    """Refuse two tools of one name. place: where a tool has it."""
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        if name in seen:
            raise ApiError(
                f"tools has two functions named {shown(name)}",
                param=f"tools[{index}].{place}",
                code="invalid_value",
            )
        seen.add(name)
