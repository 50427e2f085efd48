"""The implementation under test inside a real engine around a tiny model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.core.contracts import Provider
from octavo.core.messages import EngineRequest
from octavo.testing.conformance.base import ConformanceSuite
from octavo.testing.tiny_model import (
    generate,
    make_engine,
    make_requests,
    write_tiny_model,
)

Config = Mapping[str, Any]

TIGHT: Config = {
    "kv_cache": {"num_blocks": 14, "block_size": 8},
    "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_chunk_tokens": 7},
}
"""So little of everything that requests are chunked and preempted."""


class _Folder:
    """One tiny model a process, removed at its end."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __call__(self) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="octavo-conformance-")
            write_tiny_model(Path(self._folder.name))
        return Path(self._folder.name)


tiny_model = _Folder()


def under_test(suite: ConformanceSuite) -> tuple[str, Provider[Any]]:
    """What `LLM(plugins=[...])` would take to use the suite's implementation."""
    if suite.entry is not None:
        return suite.kind, suite.entry.provider
    if suite.provider is not None:
        return suite.kind, suite.provider
    made = Provider[Any](name="under_test", factory=lambda options, context: suite.make(context))
    return suite.kind, made


def merged(*configs: Config) -> dict[str, Any]:
    """Nested mappings, later ones winning."""
    result: dict[str, Any] = {}
    for config in configs:
        for section, values in config.items():
            if isinstance(values, Mapping):
                result.setdefault(section, {}).update(values)
            else:
                result[section] = values
    return result


def choosing(suite: ConformanceSuite) -> Config:
    """The configuration that names the implementation under test with its options."""
    section, _, key = suite.registered().declared.config_path.partition(".")
    _, provider = under_test(suite)
    choice = {"name": provider.name, **suite.options}
    return {section: {key: choice}} if key else {section: [choice]}


def tokens_of(
    suite: ConformanceSuite | None, *configs: Config, requests: list[EngineRequest] | None = None
) -> list[list[int]]:
    """Tokens of some requests by an engine with the implementation under test, or without."""
    chosen: list[Config] = [choosing(suite)] if suite is not None else []
    objects = [under_test(suite)] if suite is not None else []
    engine = make_engine(tiny_model(), merged(*configs, *chosen), objects)
    try:
        return generate(engine, requests or make_requests())
    finally:
        engine.close()


def compare_engines(suite: ConformanceSuite, common: Config, reference: Config) -> None:
    """An engine with the implementation under test gives the tokens of one with `reference`, with
    room for everything and with hardly any."""
    for name, where in (("room for all", {}), ("chunks and preemption", TIGHT)):
        got = tokens_of(suite, common, where)
        wanted = tokens_of(None, common, where, reference)
        for number, (mine, other) in enumerate(zip(got, wanted, strict=True)):
            assert mine == other, (
                f"{name}: request {number} got {mine}, the reference parts give {other}"
            )
