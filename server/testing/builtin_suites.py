"""The suites of the server's implementations, for our tests and `octavo plugins check octavo`."""

from __future__ import annotations

from octavo.core.registry import Registered
from octavo.server.testing.reasoning_parser import ReasoningParserSuite
from octavo.server.testing.route import RouteSuite
from octavo.server.testing.tool_parser import ToolParserSuite
from octavo.testing.conformance.base import registry


def known(kind: str, name: str) -> Registered:
    """What the registry knows under a name."""
    return registry().providers(kind)[name]


class TestServerInfo(RouteSuite):
    entry = known("route", "server_info")


class TestHermes(ToolParserSuite):
    entry = known("tool_parser", "hermes")
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
    bare = '<tool_call>{"name": "get_time"}</tool_call>'


class TestLlama3Json(ToolParserSuite):
    entry = known("tool_parser", "llama3_json")
    call = '\n{"name": "get_weather", "parameters": {"city": "Paris"}}\n'
    bare = '{"name": "get_time", "parameters": {}}'


class TestMistral(ToolParserSuite):
    entry = known("tool_parser", "mistral")
    call = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]'
    bare = "[TOOL_CALLS]get_time[ARGS]{}"


class TestPythonic(ToolParserSuite):
    entry = known("tool_parser", "pythonic")
    call = "\n[get_weather(city='Paris')]\n"
    bare = "[get_time()]"


class TestDeepSeekR1(ReasoningParserSuite):
    entry = known("reasoning_parser", "deepseek_r1")
    answer = "Hm.\n</think>\n\nYes."


class TestQwen3(ReasoningParserSuite):
    entry = known("reasoning_parser", "qwen3")
    answer = "<think>\nHm.\n</think>\n\nYes."
