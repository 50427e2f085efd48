from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.core.config.models import EngineConfig
from octavo.server.app import create_app

_PATH = Path(__file__).parent / "fake_llm.py"
_SPEC = importlib.util.spec_from_file_location("octavo_test_fake_llm", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
fake_llm = importlib.util.module_from_spec(_SPEC)
sys.modules["octavo_test_fake_llm"] = fake_llm
_SPEC.loader.exec_module(fake_llm)


def config(**server: Any) -> EngineConfig:
    return EngineConfig.model_validate(
        {"model": {"source": "fake/model"}, "server": {"served_model_name": ["fake", "alias"]}}
        | ({"server": {"served_model_name": ["fake", "alias"], **server}} if server else {})
    )


@asynccontextmanager
async def client_for(llm: Any, **server: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app whose lifespan runs and whose engine has started (or failed to)."""
    app = create_app(llm, config(**server))
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


@pytest.fixture
def fakes() -> Any:
    """The module with the fake."""
    return fake_llm
