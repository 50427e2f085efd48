"""A model made on the spot: a random Llama of two layers with a byte tokenizer; its engines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from octavo.core.messages import EngineRequest
from octavo.core.sampling_params import SamplingParams
from octavo.testing.fake_engine import Collector, assert_clean
from octavo.testing.model_folder import write_model_folder

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore

MAX_MODEL_LEN = 256


def write_tiny_model(folder: Path, seed: int = 0, num_layers: int = 2) -> Path:
    """Configuration, tokenizer and weights, spread enough that greedy choices are never close."""
    import torch
    from safetensors.torch import save_file

    write_model_folder(folder, MAX_MODEL_LEN)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape)
        if "norm" in name
        else torch.empty(shape).normal_(std=0.3, generator=generator)
        for name, shape in _shapes(config).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of a Llama checkpoint."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.self_attn.q_proj.weight": (q, hidden),
            f"{at}.self_attn.k_proj.weight": (kv, hidden),
            f"{at}.self_attn.v_proj.weight": (kv, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, q),
            f"{at}.mlp.gate_proj.weight": (inner, hidden),
            f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def make_engine(
    source: Path | str, config: Mapping[str, Any] | None = None, objects: Iterable[Any] = ()
) -> EngineCore:
    """An engine of a model on the CPU, small unless `config` says otherwise.

    config: nested mapping as in YAML. objects: plugins, as `LLM(plugins=...)` takes them. The
    caller closes it.
    """
    from octavo.core.registry import Registry
    from octavo.engine.builder import build_engine
    from octavo.engine.resolve import resolve
    from octavo.frontend.config import load_config

    mapping: dict[str, Any] = {
        "model": {"source": str(source)},
        "kv_cache": {"num_blocks": 60},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
    }
    for section, values in (config or {}).items():
        if isinstance(values, Mapping):
            mapping.setdefault(section, {}).update(values)
        else:
            mapping[section] = values
    registry = Registry.discover(objects=list(objects))
    return build_engine(resolve(load_config(mapping=mapping), registry), registry)


def make_requests(
    count: int = 6, params: Sequence[SamplingParams] = (SamplingParams(),)
) -> list[EngineRequest]:
    """Prompts of mixed lengths with shared prefixes; odd ones are sampled with seeds, the others
    greedy. params: what else the requests ask for, in turn."""
    random = np.random.default_rng(3)
    base = random.integers(10, 250, 60)
    made = []
    for handle in range(1, count + 1):
        shared = int(random.integers(0, 50))
        tokens = np.concatenate([base[:shared], random.integers(10, 250, handle)])
        made.append(
            EngineRequest(
                handle=handle,
                request_id=f"r{handle}",
                token_ids=tokens.astype(np.int32),
                sampling=msgspec.structs.replace(
                    params[handle % len(params)],
                    temperature=0.8 * (handle % 2),
                    ignore_eos=True,
                    max_tokens=10,
                    seed=handle,
                ),
                seed=handle,
                max_tokens=10,
            )
        )
    return made


def generate(engine: EngineCore, requests: Sequence[EngineRequest]) -> list[list[int]]:
    """Tokens of each request, all run together; nothing may be left behind."""
    collector = Collector(engine)
    for item in requests:
        engine.add(item)
    collector.run()
    failed = {handle: text for handle, text in collector.errors.items() if text}
    assert not failed, f"requests failed: {failed}"
    assert_clean(engine)
    return [collector.tokens.get(item.handle, []) for item in requests]
