from __future__ import annotations

import asyncio
import textwrap

import httpx
import pytest
from starlette.routing import Route

from octavo.core.config.models import plain
from octavo.core.errors import ConfigError
from octavo.core.registry import Registry
from octavo.server.app.app import create_app
from octavo.server.app.plugin_routes import plugin_routes
from octavo.server.config import ServerConfig, ServiceConfig
from octavo.server.http.security import OPEN_PATHS, load_keys

KEYS = {"anna": "key-of-anna", "ben": "key-of-ben"}


def run(coroutine):
    return asyncio.run(coroutine)


async def with_app(llm, work, **server):
    config = ServiceConfig.model_validate({"server": {"api_keys": KEYS, **server}})
    app = create_app(llm, config, api_keys=load_keys(config.server))
    async with app.router.lifespan_context(app):
        await app.state.server.started.wait()
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await work(app, client)


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def test_every_route_but_health_wants_a_key(fake):
    async def work(app, client):
        seen = set()
        for route in app.routes:
            assert isinstance(route, Route), "a route of another kind needs its own check"
            path = route.path.replace("{model:path}", "fake")
            for method in route.methods - {"HEAD"}:
                for headers in ({}, bearer("wrong"), bearer(""), {"authorization": "key-of-anna"}):
                    response = await client.request(method, path, headers=headers)
                    if route.path in OPEN_PATHS:
                        assert response.status_code == 200, path
                        continue
                    assert response.status_code == 401, path
                    assert response.json()["error"]["code"] == "invalid_api_key"
                    assert response.headers["www-authenticate"] == "Bearer"
            seen.add(path)
        assert {"/v1/completions", "/v1/models", "/tokenize", "/load"} <= seen
        for path in ("/nope", "/health/", "//health", "/ping/../v1/models"):
            assert (await client.get(path)).status_code == 401, path

    run(with_app(fake, work))
    assert fake.calls == []


PLUGIN = """
    from starlette.responses import PlainTextResponse
    from starlette.routing import Mount, Route

    from octavo.server.contracts.route import RoutePlugin

    async def secret(request):
        return PlainTextResponse("secret")

    class Mine(RoutePlugin):
        def routes(self):
            inside = [Route("/health", secret), Route("/{name}", secret)]
            return [
                Route("/mine", secret, methods=["GET", "POST", "DELETE"]),
                Route("/mine/{name}", secret),
                Mount("/below", routes=inside),
            ]
"""


def test_routes_of_plugins_want_a_key_too(fake, tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(PLUGIN))
    config = ServiceConfig.model_validate(
        {"routes": ["mine", "server_info"], "server": {"api_keys": {"anna": "key-of-anna"}}}
    )
    registry = Registry.discover(load=[str(tmp_path / "mine.py")])
    more = plugin_routes(config, registry, fake)
    app = create_app(fake, config, api_keys=load_keys(config.server), more_routes=more)

    async def work():
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            paths = [("/mine", m) for m in ("GET", "POST", "DELETE", "PUT", "OPTIONS")]
            paths += [(p, "GET") for p in ("/mine/x", "/below/health", "/below/x", "/server_info")]
            for path, method in paths:
                for headers in ({}, bearer("wrong"), bearer("")):
                    response = await client.request(method, path, headers=headers)
                    assert response.status_code == 401, path
                    assert "secret" not in response.text
            for path, _ in [*paths[:3], *paths[5:8]]:
                response = await client.get(path, headers=bearer("key-of-anna"))
                assert (response.status_code, response.text) == (200, "secret"), path

    asyncio.run(work())


def test_each_key_opens(fake):
    async def work(app, client):
        for key in KEYS.values():
            assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
            body = {"prompt": "say:x"}
            answer = await client.post("/v1/completions", json=body, headers=bearer(key))
            assert answer.json()["choices"][0]["text"] == "x"

    run(with_app(fake, work))


def test_the_key_is_the_user_where_the_body_names_none(fake):
    async def work(app, client):
        for user in (None, "carl"):
            body = {"prompt": "x", "max_tokens": 1, **({"user": user} if user else {})}
            answer = await client.post("/v1/completions", json=body, headers=bearer("key-of-ben"))
            assert answer.status_code == 200

    run(with_app(fake, work))
    assert [call.user for call in fake.calls] == ["ben", "carl"]


def test_without_keys_everything_is_open(connect, fake):
    async def go():
        async with connect(fake) as client:
            assert (await client.get("/v1/models")).status_code == 200

    run(go())


def test_keys_never_show(fake, caplog):
    config = ServiceConfig.model_validate({"server": {"api_keys": KEYS}})
    for text in (repr(config), str(config), config.model_dump_json(), repr(plain(config))):
        assert "key-of-anna" not in text

    async def work(app, client):
        await client.get("/v1/models", headers=bearer("canary"))
        await client.post("/v1/completions", content=b"{", headers=bearer("key-of-anna"))

    run(with_app(fake, work))
    assert "canary" not in caplog.text
    assert "key-of-anna" not in caplog.text


def test_prompts_are_not_logged(connect, fake, caplog):
    caplog.set_level(0)

    async def go():
        async with connect(fake) as client:
            for prompt in ("fail:1\n", "canary say:x\nfail:1"):
                response = await client.post("/v1/completions", json={"prompt": prompt})
                assert response.status_code == 500
            await client.post("/v1/completions", json={"prompt": ["canary", 5]})
            await client.post("/v1/chat/completions", json={"messages": [{"canary": "canary"}]})

    run(go())
    assert "canary" not in caplog.text


def test_keys_from_file_and_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# clients\ncarl: key-of-carl\n\n  dora :key:of:dora \n")
    monkeypatch.setenv("OCTAVO_API_KEYS", "plain, eve:key-of-eve")
    config = ServerConfig.model_validate({"api_keys": KEYS, "api_keys_file": str(file)})
    assert load_keys(config) == {
        **KEYS,
        "carl": "key-of-carl",
        "dora": "key:of:dora",
        "env1": "plain",
        "eve": "key-of-eve",
    }


@pytest.mark.parametrize(
    ("keys", "lines", "words"),
    [
        ({"a": ""}, None, "named 'a'"),
        ({"a": "**********"}, None, "masked"),
        ({"a": "two words"}, None, "without spaces"),
        ({"a": "hushhush"}, "a: hushhush2", "two keys"),
        ({}, "hushhush", "name: key"),
    ],
    ids=["empty", "masked", "spaces", "twice", "nameless"],
)
def test_bad_keys(tmp_path, keys, lines, words):
    server = {"api_keys": keys}
    if lines is not None:
        (tmp_path / "keys").write_text(lines)
        server["api_keys_file"] = str(tmp_path / "keys")
    with pytest.raises(ConfigError, match=words) as error:
        load_keys(ServerConfig.model_validate(server))
    assert "hushhush" not in str(error.value)


def test_missing_key_file():
    config = ServerConfig(api_keys_file="/nowhere/keys")
    with pytest.raises(ConfigError, match="'/nowhere/keys'"):
        load_keys(config)


def test_cross_origin_requests(fake):
    async def work(app, client):
        asked = {
            "origin": "https://page.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        answer = await client.options("/v1/completions", headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        origin = {"origin": "https://page.example"}
        refused = await client.get("/v1/models", headers=origin)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://page.example"
        other = await client.options(
            "/v1/completions", headers={**asked, "origin": "https://other.example"}
        )
        assert other.status_code == 400

    run(with_app(fake, work, allowed_origins=["https://page.example"]))
