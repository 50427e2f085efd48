"""Kind `route`: what plugins add to the server."""

from __future__ import annotations

import asyncio
import textwrap

import httpx
import pytest

from octavo.core.errors import OctavoError
from octavo.core.registry import Registry
from octavo.frontend.config import load_config
from octavo.server.app.app import create_app
from octavo.server.app.plugin_routes import plugin_routes
from octavo.server.config import ServiceConfig

PLUGIN = """
    from starlette.responses import JSONResponse, PlainTextResponse
    from starlette.routing import Mount, Route, WebSocketRoute

    from octavo.core.contracts import Options
    from octavo.server.contracts.route import RoutePlugin
    from octavo.core.errors import EngineDeadError, RequestError

    class CountOptions(Options):
        path: str = "/count"
        root: bool = False
        socket: bool = False

    class Count(RoutePlugin):
        Options = CountOptions

        def __init__(self, options, context):
            self.options, self.context = options, context

        def routes(self):
            if self.options.root:
                return [Mount("", routes=[])]
            if self.options.socket:
                return [WebSocketRoute("/socket", self.count)]
            return [
                Route(self.options.path, self.count, methods=["GET", "POST"]),
                Route("/break/{how}", self.broken),
            ]

        async def count(self, request):
            '''How many tokens a text has.

            More about it.
            '''
            engine = self.context.engine
            return JSONResponse({
                "tokens": len(engine.inputs.encode(request.query_params["text"])),
                "names": self.context.model_names,
                "max_n": self.context.config["server"]["max_n"],
                "keys": self.context.config["server"]["api_keys"],
            })

        async def broken(self, request):
            errors = {
                "request": RequestError("that is wrong", param="text"),
                "engine": EngineDeadError("it is dead"),
                "other": RuntimeError("inner matters"),
            }
            raise errors[request.path_params["how"]]
"""


@pytest.fixture
def registry(tmp_path):
    (tmp_path / "count.py").write_text(textwrap.dedent(PLUGIN))
    return Registry.discover(load=[str(tmp_path / "count.py")])


def ask(llm, registry, work, **mapping):
    config = load_config(mapping=mapping)
    more = plugin_routes(config, registry, llm, ["fake"])
    app = create_app(llm, config, more_routes=more)

    async def main():
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            await app.state.server.started.wait()
            return await work(client)

    return asyncio.run(main())


def test_a_file_with_a_plugin_is_enough(fake, registry):
    async def work(client):
        answer = (await client.get("/count", params={"text": "abc"})).json()
        assert answer == {"tokens": 4, "names": ["fake"], "max_n": 7, "keys": {"a": "**********"}}
        assert (await client.put("/count")).status_code == 405
        document = (await client.get("/openapi.json")).json()["paths"]
        assert document["/count"]["get"]["summary"] == "How many tokens a text has."
        assert set(document["/count"]) == {"get", "post"}
        assert document["/break/{how}"]["get"]["parameters"][0]["name"] == "how"

    ask(fake, registry, work, server={"max_n": 7, "api_keys": {"a": "secret"}})


def test_options_and_names(fake, registry):
    async def work(client):
        assert (await client.get("/words", params={"text": "a"})).json()["tokens"] == 2
        assert (await client.get("/count")).status_code == 404

    ask(fake, registry, work, routes=[{"name": "count", "path": "/words"}])


def test_what_handlers_raise_becomes_an_error_object(fake, registry, caplog):
    async def work(client):
        answers = {how: await client.get(f"/break/{how}") for how in ("request", "engine", "other")}
        assert [answer.status_code for answer in answers.values()] == [400, 503, 500]
        errors = {how: answer.json()["error"] for how, answer in answers.items()}
        assert (errors["request"]["message"], errors["request"]["param"]) == (
            "that is wrong",
            "text",
        )
        assert "inner matters" not in answers["other"].text
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200

    ask(fake, registry, work)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("cuont", "there is no route 'cuont'; did you mean 'count'?"),
        ({"name": "count", "way": 1}, "routes[0].way: unknown option"),
        (
            {"name": "count", "path": "/v1/models"},
            "route plugin 'count' offers the path '/v1/models', which the server has",
        ),
        ({"name": "count", "root": True}, "route plugin 'count' mounts something at the root"),
        ({"name": "count", "socket": True}, "route plugin 'count' offers WebSocketRoute, expected"),
    ],
)
def test_mistakes_stop_the_start(fake, registry, choice, message):
    config = ServiceConfig.model_validate({"routes": [choice]})
    with pytest.raises(OctavoError) as caught:
        plugin_routes(config, registry, fake)
    assert message in str(caught.value)


def test_two_plugins_cannot_have_one_path(fake, registry):
    config = ServiceConfig.model_validate(
        {"routes": ["server_info", {"name": "count", "path": "/server_info"}]}
    )
    with pytest.raises(OctavoError, match="which route plugin 'server_info' has"):
        plugin_routes(config, registry, fake)


def test_server_info(fake, registry, monkeypatch):
    class Report:
        def as_dict(self):
            return {"num_blocks": 7}

    async def nothing():
        return None

    async def metrics():
        return {"num_running": 0}

    for name, value in (("report", Report()), ("metrics", metrics), ("check_health", nothing)):
        monkeypatch.setattr(fake, name, value, raising=False)

    async def work(client):
        answer = (await client.get("/server_info")).json()
        assert answer["models"] == ["fake"]
        assert answer["report"] == {"num_blocks": 7}
        assert answer["metrics"] == {"num_running": 0}
        assert answer["config"]["server"]["api_keys"] == {"a": "**********"}

    keys = {"api_keys": {"a": "secret"}}
    ask(fake, registry, work, routes=["server_info"], server=keys)
