"""What every route plugin promises."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from octavo.core.config import config_model
from octavo.core.config.models import plain
from octavo.core.contracts.route import RouteContext, RoutePlugin
from octavo.core.errors import EngineDeadError, RequestError
from octavo.engine.config import EngineConfig
from octavo.testing.conformance.base import ConformanceSuite

SERVERS_OWN = ("/health", "/ping", "/metrics", "/dashboard", "/docs", "/openapi.json", "/v1/")


class NoEngine:
    """An engine that has not started: whatever is asked of it fails, and is noted."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        raise EngineDeadError(f"the engine has not started ('{name}' was used)")


class RouteSuite(ConformanceSuite):
    """Subclass it with `provider`, or override `make` (a `RoutePlugin` for the context).

    parameters: values for path parameters of its routes, by name; "x" where none is given.
    """

    kind = "route"
    parameters: ClassVar[Mapping[str, str]] = {}

    def plugin(self, engine: Any = None) -> RoutePlugin:
        """The plugin under test, with an engine that has not started."""
        config: dict[str, Any] = plain(config_model(EngineConfig)())
        asked: Any = engine or NoEngine()
        made = self.make(RouteContext(asked, config, ("tiny",)))
        assert isinstance(made, RoutePlugin), f"make returned {type(made).__name__}"
        return made

    def test_the_engine_is_left_alone_at_first(self) -> None:
        """Factory and routes() use nothing of the engine, which has not started yet."""
        engine = NoEngine()
        self.plugin(engine).routes()
        assert not engine.asked, f"it used {', '.join(engine.asked)} before the engine started"

    def test_routes_are_routes(self) -> None:
        """routes() gives Route and Mount objects of Starlette with a path of their own."""
        from starlette.routing import Mount, Route

        routes = self.plugin().routes()
        assert routes, "it offers no route"
        for route in routes:
            assert isinstance(route, Route | Mount), f"{type(route).__name__} is no Route or Mount"
            assert route.path.startswith("/"), f"the path {route.path!r} does not begin with /"
            assert len(route.path) > 1, "the root is the server's"

    def test_paths_are_its_own(self) -> None:
        """No path is the server's, and none is offered twice for one method."""
        seen = set()
        for route in self.plugin().routes():
            path = getattr(route, "path", "")
            taken = [own for own in SERVERS_OWN if path == own or (own[-1] == "/" and own in path)]
            assert not taken, f"'{path}' is a path of the server"
            for method in getattr(route, "methods", None) or ("any",):
                assert (method, path) not in seen, f"{method} {path} is offered twice"
                seen.add((method, path))

    def test_handlers_are_described(self) -> None:
        """Every handler has a docstring, which /openapi.json shows."""
        from starlette.routing import Route

        for route in self.plugin().routes():
            if isinstance(route, Route):
                text = inspect.getdoc(route.endpoint)
                assert text, f"the handler of '{route.path}' has no docstring"

    def test_bare_requests_are_answered(self) -> None:
        """A request without query or body gets an answer, or raises an error that is the caller's
        or says that the engine is not there; nothing else."""
        from starlette.routing import Route

        for route in self.plugin().routes():
            if not isinstance(route, Route):
                continue
            for method in sorted(route.methods or ("GET",)):
                status = asyncio.run(self._call(route, method))
                assert status is None or status < 500, f"{method} {route.path}: {status}"

    def test_two_processes_may_each_have_one(self) -> None:
        """Two of them exist side by side, with the same paths."""
        first, second = self.plugin(), self.plugin()
        paths = [[getattr(r, "path", "") for r in plugin.routes()] for plugin in (first, second)]
        assert paths[0] == paths[1], f"paths differ: {paths}"

    async def _call(self, route: Any, method: str) -> int | None:
        """Status of an answer; None when an error was raised that the server turns into one."""
        path = route.path
        names = {name: self.parameters.get(name, "x") for name in route.param_convertors}
        for name, value in names.items():
            path = path.replace("{" + name + "}", value)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"test")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "path_params": {
                name: route.param_convertors[name].convert(value) if value != "x" else value
                for name, value in names.items()
            },
        }
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        from starlette.exceptions import HTTPException

        try:
            await asyncio.wait_for(route.app(scope, receive, send), 10)
        except (RequestError, EngineDeadError):
            return None
        except HTTPException as error:
            return error.status_code
        assert statuses, f"{method} {path} sent no answer"
        return statuses[0]
