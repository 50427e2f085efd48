"""Route plugins."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="server_info",
        factory="octavo.server.routes.server_info:ServerInfo",
        summary="`GET /server_info`: configuration, startup report and the engine's metrics",
    )
]
