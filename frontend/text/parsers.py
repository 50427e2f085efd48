"""The parsers that an engine's answers go through."""

from __future__ import annotations

from typing import NamedTuple

from octavo.server.contracts.reasoning_parser import ReasoningParser
from octavo.server.contracts.tool_parser import ToolParser


class AnswerParsers(NamedTuple):
    """Those that the configuration chose."""

    tool: ToolParser | None = None
    reasoning: ReasoningParser | None = None
