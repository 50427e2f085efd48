"""A simulated accelerator to sweep over."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml


@pytest.fixture(scope="session")
def sim_yaml(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The example with few layers, so that a replay is quick."""
    config = yaml.safe_load((repository / "docs" / "examples" / "simulate.yaml").read_text())
    config["executor"]["kind"]["model"] |= {"num_hidden_layers": 8, "hidden_size": 1024}
    config["kv_cache"] = {"num_blocks": 4000, "block_size": 16}
    config["scheduler"] = {"max_num_seqs": 4, "max_num_batched_tokens": 2048}
    file = tmp_path_factory.mktemp("sweep") / "sim.yaml"
    file.write_text(yaml.safe_dump(config))
    return str(file)
