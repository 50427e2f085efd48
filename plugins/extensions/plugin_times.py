"""Engine extension `plugin_times`: what implementations cost, among the engine's metrics."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts.engine_extension import EngineExtension, EngineExtensionContext
from octavo.core.contracts.provider import Options


class PluginTimesReport(EngineExtension):
    """The metric `plugin_times` (`observability.plugin_times`)."""

    def __init__(self, options: Options, context: EngineExtensionContext) -> None:
        self._times = context.plugin_times

    def metrics(self) -> dict[str, Any]:
        return {"plugin_times": self._times()}
