"""A server whose executor answers at once, for the load generators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.server_process import ServerProcess
from octavo.testing.model_folder import write_model_folder


@pytest.fixture(scope="session")
def instant_config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An engine without a model: every token is the letter a, a step takes 2 ms."""
    folder = write_model_folder(tmp_path_factory.mktemp("instant") / "model")
    return {
        "model": {"source": str(folder), "weight_source": "dummy"},
        "plugins": {"load": ["octavo.testing.instant_executor"]},
        "executor": {"kind": {"name": "instant", "step_s": 0.002}, "device": "cpu"},
        "kv_cache": {"num_blocks": 512},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 256},
        "server": {"served_model_name": "instant"},
    }


@pytest.fixture(scope="session")
def instant_yaml(instant_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a file."""
    import yaml

    file = tmp_path_factory.mktemp("instant") / "instant.yaml"
    file.write_text(yaml.safe_dump(instant_config))
    return file


@pytest.fixture(scope="session")
def instant_server(instant_config: dict[str, Any]) -> Iterator[ServerProcess]:
    server = ServerProcess(instant_config)
    yield server
    server.stop()
