"""The HTTP server. It declares its own kinds, and registers its implementations of them through the
hooks that third parties use."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Kind, Provider, hookimpl


@hookimpl
def octavo_kinds() -> list[Kind]:
    from octavo.server.contracts import KINDS

    return KINDS


@hookimpl
def octavo_routes() -> list[Provider[Any]]:
    from octavo.server.routes import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_tool_parsers() -> list[Provider[Any]]:
    from octavo.server.tool_parsers import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_reasoning_parsers() -> list[Provider[Any]]:
    from octavo.server.reasoning_parsers import PROVIDERS

    return PROVIDERS
