from __future__ import annotations

import importlib.util
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from octavo.server.app.app import create_app
from octavo.server.config import ServiceConfig
from octavo.server.openai.answer import AnswerParsers


def sibling(name: str) -> Any:
    """A helper module of this folder, imported once."""
    known = f"octavo_test_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, Path(__file__).parent / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[known])
    return sys.modules[known]


fake_llm = sibling("fake_llm")


def config(**server: Any) -> ServiceConfig:
    return ServiceConfig.model_validate(
        {"model": {"source": "fake/model"}, "server": {"served_model_name": ["fake", "alias"]}}
        | ({"server": {"served_model_name": ["fake", "alias"], **server}} if server else {})
    )


def parsers_of(llm: Any) -> AnswerParsers:
    """Those of a fake; a real engine has none."""
    found: AnswerParsers = getattr(llm, "parsers", AnswerParsers())
    return found


@asynccontextmanager
async def client_for(llm: Any, **server: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app whose lifespan runs and whose engine has started (or failed to)."""
    app = create_app(llm, config(**server), make_parsers=lambda: parsers_of(llm))
    async with app.router.lifespan_context(app):
        if not llm.start_delay:
            await app.state.server.started.wait()
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client


@pytest.fixture
def fake() -> Any:
    return fake_llm.FakeAsyncLLM()


@pytest.fixture
def connect() -> Any:
    """`connect(llm, **server_config)` is an async context manager of an httpx client."""
    return client_for


@pytest.fixture(scope="session")
def fakes() -> Any:
    """The module with the fake."""
    return fake_llm


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One `octavo serve` over a tiny model, for all tests that leave it as it was."""
    server = sibling("real_server").RealServer(tmp_path_factory.mktemp("real"))
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def serve() -> Any:
    """`serve(*arguments)` is a context manager of an `octavo serve` that has started: `.url`,
    `.process`, `.lines`. It ends in good order, unless the test has ended it."""

    @contextmanager
    def serve(*arguments: str) -> Iterator[Any]:
        server = sibling("real_server").ServeProcess(*arguments)
        try:
            yield server
        finally:
            status = server.stop()
        assert status == 0, server.lines

    return serve


@contextmanager
def live_server(llm: Any, **server: Any) -> Iterator[Any]:
    """A real HTTP server over a fake engine: `.url`, `.llm`."""
    sock = socket.create_server(("127.0.0.1", 0))
    settings = uvicorn.Config(
        create_app(llm, config(**server), make_parsers=lambda: parsers_of(llm)),
        log_config=None,
        lifespan="on",
        timeout_graceful_shutdown=5,
    )
    http = uvicorn.Server(settings)
    thread = threading.Thread(target=http.run, kwargs={"sockets": [sock]})
    thread.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        deadline = time.monotonic() + 60
        while not http.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        yield SimpleNamespace(url=url, llm=llm)
    finally:
        http.should_exit = True
        thread.join(60)
        sock.close()
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def live_over() -> Any:
    """`live_over(llm, **server_config)` is a context manager of a real server."""
    return live_server


@pytest.fixture(scope="module")
def live() -> Iterator[Any]:
    """A real HTTP server over a fake engine: `.url`, `.llm`."""
    with live_server(fake_llm.FakeAsyncLLM(max_model_len=4096)) as found:
        yield found
