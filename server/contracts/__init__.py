"""The contracts of the server's own kinds, one module a kind. They run in the API process."""

from octavo.core.contracts import Kind
from octavo.server.contracts import reasoning_parser, route, tool_parser

KINDS: list[Kind] = [tool_parser.KIND, reasoning_parser.KIND, route.KIND]

__all__ = ["KINDS"]
