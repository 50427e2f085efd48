"""Configurations without a model, real or simulated, for comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from octavo.testing.model_folder import write_model_folder

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SLOW_POLICY = """
import time

from octavo.plugins.scheduler_policies.fcfs import FcfsPolicy


class Slow(FcfsPolicy):
    name = "slow"

    def on_step(self, view, scheduled):
        time.sleep(0.012)
"""


@pytest.fixture(scope="session")
def write_yaml(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A file with a configuration; its path."""

    def write(name: str, config: dict[str, Any]) -> str:
        file = tmp_path_factory.mktemp("compare") / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config))
        return str(file)

    return write


@pytest.fixture(scope="session")
def simulated_yaml(write_yaml: Callable[..., str]) -> str:
    """An accelerator that is simulated, on a virtual clock."""
    kind = {"name": "simulated", "accelerator": "h100", "model": MODEL}
    return write_yaml(
        "sim",
        {
            "executor": {"kind": kind},
            "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 4096},
            "kv_cache": {"num_blocks": 2000},
        },
    )


@pytest.fixture(scope="session")
def quick_yaml(write_yaml: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """An engine without a model whose steps take 2 ms of real time."""
    folder = write_model_folder(tmp_path_factory.mktemp("quick") / "model")
    return write_yaml(
        "quick",
        {
            "model": {"source": str(folder), "weight_source": "dummy"},
            "plugins": {"load": ["octavo.testing.instant_executor"]},
            "executor": {"kind": {"name": "instant", "step_s": 0.002}, "device": "cpu"},
            "kv_cache": {"num_blocks": 512},
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 256},
        },
    )


@pytest.fixture(scope="session")
def tiny_yaml(write_yaml: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real engine with a tiny model of random weights."""
    folder = write_model_folder(tmp_path_factory.mktemp("tiny") / "model")
    return write_yaml(
        "tiny",
        {
            "model": {"source": str(folder), "weight_source": "dummy", "max_model_len": 512},
            "executor": {"device": "cpu", "num_threads": 1},
            "attention": {"backend": "torch"},
            "kv_cache": {"num_blocks": 256},
            "scheduler": {"max_num_seqs": 64, "max_num_batched_tokens": 256},
        },
    )


@pytest.fixture(scope="session")
def slow_policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A policy plugin that costs time."""
    file = tmp_path_factory.mktemp("policy") / "slow_policy.py"
    file.write_text(SLOW_POLICY)
    return str(file)
