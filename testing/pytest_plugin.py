"""pytest fixtures for packages that offer implementations; pytest finds them by entry point.

Each is prefixed `octavo_`, and imports what it needs when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore
    from octavo.testing.fake_worker import FakeExecutor
    from octavo.testing.step_log import StepLog

MakeEngine = Callable[..., "EngineCore"]


@pytest.fixture(scope="session")
def octavo_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random two-layer Llama with a byte tokenizer and a chat template."""
    from octavo.testing.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("octavo") / "tiny-model")


@pytest.fixture
def octavo_engine(octavo_tiny_model: Path) -> Iterator[MakeEngine]:
    """`octavo_engine(config={...}, plugins=[...])` makes an engine of the tiny model.

    config: nested mapping as in YAML. plugins: classes, instances, modules or (kind, Provider)
    pairs, registered for this engine alone. Engines are closed at the end of the test.
    """
    from octavo.testing.tiny_model import make_engine

    engines: list[EngineCore] = []

    def make(config: Mapping[str, Any] | None = None, plugins: Sequence[Any] = ()) -> EngineCore:
        engine = make_engine(octavo_tiny_model, config, plugins)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def octavo_fake_engine() -> Iterator[MakeEngine]:
    """`octavo_fake_engine(policy=..., manager=..., ...)` makes an engine without a model, whose
    worker checks every read of its KV cache; parts are names or objects."""
    from octavo.testing.fake_engine import make_fake_engine

    engines: list[EngineCore] = []

    def make(**parts: Any) -> EngineCore:
        engine = make_fake_engine(**parts)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def octavo_fake_executor() -> FakeExecutor:
    """An executor around a worker without a model (`.worker`), which checks every plan; for two
    plans in flight."""
    from octavo.testing.fake_worker import FakeExecutor, FakeWorker

    return FakeExecutor(FakeWorker(), 2)


@pytest.fixture
def octavo_step_log() -> StepLog:
    """An observer that keeps every step and request: hand it to `octavo_engine` among `plugins`
    (with `observers: [step_log]` in its config), or to `octavo_fake_engine` as
    `observers=[("log", octavo_step_log)]`."""
    from octavo.testing.step_log import StepLog

    return StepLog()
