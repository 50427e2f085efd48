"""Routes that plugins bring (kind `route`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from starlette.routing import BaseRoute, Mount, Route

from octavo.core.config.models import ImplementationConfig, plain
from octavo.core.contracts import Platform, ProbeContext
from octavo.core.errors import PluginError
from octavo.core.registry import Registry
from octavo.server.app.routes import OPERATIONS
from octavo.server.config import ServiceConfig
from octavo.server.contracts.route import RouteContext, RoutePlugin


def plugin_routes(
    config: ServiceConfig, registry: Registry, engine: Any, model_names: Sequence[str] = ()
) -> list[BaseRoute]:
    """The routes of every plugin that the configuration names, or hands over as a file.

    Raises `ConfigError` or `PluginError`: unknown, unavailable, or with a path that is taken.
    """
    names = {choice.name for choice in config.routes}
    handed_over = [e.name for e in registry.preferred("route") if e.name not in names]
    choices = [*config.routes, *(ImplementationConfig(name=name) for name in handed_over)]
    hidden: dict[str, Any] = plain(config)
    context = RouteContext(engine, hidden, tuple(model_names))
    taken = {operation.path: "the server" for operation in OPERATIONS}
    found: list[BaseRoute] = []
    for index, choice in enumerate(choices):
        selection = registry.select(
            "route",
            choice,
            ProbeContext(Platform(), {}),
            path=("routes", index),
            origin=config.origin,
        )
        plugin: RoutePlugin = registry.create(selection, context)
        for route in plugin.routes():
            _claim(route, choice.name, taken)
            found.append(route)
    return found


def _claim(route: BaseRoute, name: str, taken: dict[str, str]) -> None:
    """Note whose path it is."""
    if not isinstance(route, Route | Mount):
        raise PluginError(
            f"route plugin '{name}' offers {type(route).__name__}, expected Route or Mount of "
            "starlette.routing",
            kind="route",
            name=name,
        )
    if not route.path:
        raise PluginError(
            f"route plugin '{name}' mounts something at the root, expected a path",
            kind="route",
            name=name,
        )
    owner = taken.setdefault(route.path, f"route plugin '{name}'")
    if owner != f"route plugin '{name}'":
        raise PluginError(
            f"route plugin '{name}' offers the path '{route.path}', which {owner} has",
            kind="route",
            name=name,
        )


def described(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Path, method and description of each, for the OpenAPI document."""
    for route in routes:
        if not isinstance(route, Route):
            continue
        text = (getattr(route.endpoint, "__doc__", None) or route.name).strip()
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
        for method in sorted((route.methods or {"GET"}) - {"HEAD"}):
            item: dict[str, Any] = {
                "summary": text.splitlines()[0],
                "operationId": f"{method.lower()}{route.path_format}".replace("/", "_"),
                "responses": {"default": {"description": "See the plugin's documentation."}},
            }
            if parameters:
                item["parameters"] = parameters
            yield route.path_format, method.lower(), item
