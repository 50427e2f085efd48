"""A small simulated engine, and the folder of the traces."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.simulate.setup import SimulatedEngine, simulated_engine
from octavo.core.registry import Registry
from octavo.frontend.config import load_config

TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

MakeEngine = Callable[..., SimulatedEngine]


@pytest.fixture(scope="session")
def registry() -> Registry:
    return Registry.discover()


@pytest.fixture
def make_engine(registry: Registry) -> MakeEngine:
    """A simulated engine; keywords are dotted keys with `__` for the dots."""

    def make(**settings: Any) -> SimulatedEngine:
        mapping: dict[str, Any] = {
            "executor": {
                "kind": {"name": "simulated", "accelerator": "h100", "model": dict(TINY_MODEL)}
            },
            "scheduler": {"max_num_seqs": 32, "max_num_batched_tokens": 2048},
            "kv_cache": {"num_blocks": 4000},
        }
        for key, value in settings.items():
            section, _, name = key.partition("__")
            mapping.setdefault(section, {})[name] = value
        return simulated_engine(load_config(mapping=mapping), registry)

    return make


@pytest.fixture(scope="session")
def traces(repository: Path) -> Path:
    """The folder of the traces; tests that need it are skipped where it is absent."""
    default = repository.parent / "shared" / "traces"
    folder = Path(os.environ.get("OCTAVO_TRACES") or default)
    if not folder.is_dir():
        pytest.skip(f"no traces: the folder {folder} is absent (OCTAVO_TRACES names another)")
    return folder


@pytest.fixture(scope="session")
def mooncake(traces: Path) -> Path:
    """One hour of chat, 12,031 requests with the ids of their blocks."""
    file = traces / "mooncake_conversation.jsonl"
    if not file.is_file():
        pytest.skip(f"no trace: {file} is absent")
    return file


@pytest.fixture(scope="session")
def azure(traces: Path) -> Path:
    """Chat requests with their lengths."""
    file = traces / "azure_llm_2023_conv.csv"
    if not file.is_file():
        pytest.skip(f"no trace: {file} is absent")
    return file
