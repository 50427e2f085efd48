"""The decoder against transformers, on tiny random models of each family and rope variant."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from octavo.core.contracts import ProbeContext
from octavo.core.errors import ModelError, UnsupportedModel, WeightError
from octavo.models.families.config import decoder_config, probe

TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
TOKENS = [(7 * i * i + 3 * i) % 99 for i in range(60)]

CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama_tied": (LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama_biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_no_gqa_head_dim": (LlamaConfig, {"num_key_value_heads": 4, "head_dim": 12}),
    "mistral_window": (MistralConfig, {"sliding_window": 7}),
    "mistral_no_window": (MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "qwen2": (Qwen2Config, {}),
    "qwen2_max_window_layers": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2_layer_types": (
        Qwen2Config,
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3_bias_tied": (
        Qwen3Config,
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_options": {**YARN, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False},
    "yarn_attention_factor": {**YARN, "attention_factor": 1.3},
    "yarn_mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1},
}


def reference(config_class: type, **overrides: Any) -> tuple[Any, dict[str, Any]]:
    """A random model of transformers, and its config.json as written to a folder."""
    config = config_class(**{**TINY, **overrides})
    torch.manual_seed(0)
    name = config_class.__name__.replace("Config", "ForCausalLM")
    model = getattr(transformers, name)._from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():  # norms and biases too, which start as constants
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    mapping = json.loads(config.to_json_string())
    return model, {**mapping, "architectures": [name]}


def expected(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def weights(model: Any) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return state


def assert_same(doubles: Any, model: Any, config: dict[str, Any], max_model_len: int = 64) -> None:
    ours, _ = doubles.build(config, max_model_len)
    ours.load_weights(weights(model).items())
    want = expected(model, TOKENS)
    got = doubles.logits(ours, TOKENS)
    assert got.dtype == torch.float32
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_family_matches_transformers(doubles: Any, case: str) -> None:
    config_class, overrides = CASES[case]
    model, config = reference(config_class, **overrides)
    assert_same(doubles, model, config)


@pytest.mark.parametrize("rope", ROPES)
def test_rope_matches_transformers(doubles: Any, rope: str) -> None:
    parameters = {"rope_theta": 500.0, **ROPES[rope]}
    model, config = reference(LlamaConfig, rope_parameters=parameters, head_dim=16)
    assert config["rope_parameters"]["rope_theta"] == 500.0
    assert_same(doubles, model, config)
    # The spelling of transformers 4: type, and theta beside it.
    old = {key: item for key, item in parameters.items() if key not in ("rope_theta", "rope_type")}
    old_config = {key: item for key, item in config.items() if key != "rope_parameters"}
    old_config |= {"rope_theta": 500.0, "rope_scaling": {"type": parameters["rope_type"], **old}}
    assert_same(doubles, model, old_config)


def test_rope_kinds_differ() -> None:
    """So that a variant that fell back to another would be seen."""
    from octavo.models.layers.rope import rope_table

    tables = {}
    for name, parameters in ROPES.items():
        if name != "dynamic":
            config = {**TINY, "architectures": ["LlamaForCausalLM"], "head_dim": 16}
            config["rope_parameters"] = {"rope_theta": 500.0, **parameters}
            tables[name] = rope_table(decoder_config(config).rope, 64, torch.device("cpu"))
    for (name, a), (other, b) in itertools.combinations(tables.items(), 2):
        assert not torch.allclose(a, b, atol=1e-3), (name, other)


# The name of the cache argument changes between the versions of transformers that we support.
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_dynamic_rope_beyond_the_limit_is_that_of_cached_decoding(doubles: Any) -> None:
    parameters = {"rope_theta": 500.0, "rope_type": "dynamic", "factor": 2.0}
    model, config = reference(LlamaConfig, rope_parameters=parameters, max_position_embeddings=16)
    ours, _ = doubles.build(config, 64)
    ours.load_weights(weights(model).items())
    got = doubles.logits(ours, TOKENS[:40])
    with torch.inference_mode():
        out = model(torch.tensor([TOKENS[:12]]), use_cache=True)
        rows, cache = [out.logits[0]], out.past_key_values
        for token in TOKENS[12:40]:
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            rows.append(out.logits[0])
    torch.testing.assert_close(got, torch.cat(rows), atol=1e-4, rtol=0)


def test_specs_and_kv_specs(doubles: Any) -> None:
    _, config = reference(
        Qwen2Config, use_sliding_window=True, sliding_window=5, max_window_layers=2
    )
    model, attention = doubles.build(config, 64)
    assert [spec.window for spec in attention.specs.values()] == [None, None, 5]
    assert [(s.layer, s.kind, s.window) for s in model.kv_specs()] == [
        (0, "full", None),
        (1, "full", None),
        (2, "window", 5),
    ]
    spec = attention.specs[0]
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.rope_dim) == (4, 2, 8, 8)
    assert (model.num_layers, model.vocab_size) == (3, 99)
    # A window that no sequence can exceed is none.
    _, attention = doubles.build(config, 5)
    assert {spec.window for spec in attention.specs.values()} == {None}


@pytest.mark.parametrize("qk_norm", [False, True])
def test_operators_of_a_layer(doubles: Any, qk_norm: bool) -> None:
    """Dispatch is what a decode step costs on a CPU: no operator creeps in unseen."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    config_class = Qwen3Config if qk_norm else LlamaConfig
    model, config = reference(config_class, **({"head_dim": 8} if qk_norm else {}))
    ours, _ = doubles.build(config, 64)
    ours.load_weights(weights(model).items())
    layer = ours.layers[0]

    def linear(size: int) -> Any:
        return lambda x: torch.ones(len(x), size)

    layer.attention.qkv.forward = linear(64)
    layer.attention.o.forward = linear(32)
    layer.mlp.gate_up.forward = linear(96)
    layer.mlp.down.forward = linear(32)
    layer.attention.attend = lambda q, k, v, positions: torch.ones(len(q), 32)
    x, positions = torch.ones(2, 32), torch.arange(2)
    with torch.inference_mode(), Count() as count:
        layer(x, positions)
    names = [name for name in count.names if "aten.ones" not in name]
    views = [name for name in names if "view" in name or "split" in name]
    # Twice RMSNorm (4 operators), twice the residual, SiLU, mul.
    assert len(names) - len(views) == 12 + (4 if qk_norm else 0), names
    assert len(views) == 3 + (1 if qk_norm else 0), views


def test_weight_errors_name_the_tensor(doubles: Any) -> None:
    model, config = reference(LlamaConfig)
    state = weights(model)

    def load(tensors: dict[str, torch.Tensor]) -> None:
        doubles.build(config, 64)[0].load_weights(tensors.items())

    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(WeightError, match=rf"lacks 1 of the 30 tensors.*{name}"):
        load({key: item for key, item in state.items() if key != name})
    with pytest.raises(WeightError, match=r"lacks 30 of the 30 tensors.*and 27 more"):
        load({})
    with pytest.raises(WeightError, match=r"does not: model\.extra\.weight \[2\]"):
        load({**state, "model.extra.weight": torch.ones(2)})
    with pytest.raises(WeightError, match=rf"{name}: expected shape \[16, 32\], got \[32, 16\]"):
        load({**state, name: state[name].T})
    norm = "model.layers.2.input_layernorm.weight"
    with pytest.raises(WeightError, match=rf"{norm}: expected shape \[32\], got \[1\]"):
        load({**state, norm: torch.ones(1)})
    with pytest.raises(WeightError, match=r"model.embed_tokens.weight: expected shape \[99, 32\]"):
        load({**state, "model.embed_tokens.weight": torch.ones(98, 32)})
    with pytest.raises(WeightError, match=r"lacks 1 .*lm_head\.weight"):
        load({key: item for key, item in state.items() if key != "lm_head.weight"})
    load({**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})


def test_tied_head_in_the_checkpoint_is_ignored(doubles: Any) -> None:
    model, config = reference(LlamaConfig, tie_word_embeddings=True)
    ours, _ = doubles.build(config, 64)
    ours.load_weights({**weights(model), "lm_head.weight": torch.zeros(99, 32)}.items())
    torch.testing.assert_close(
        doubles.logits(ours, TOKENS), expected(model, TOKENS), atol=1e-4, rtol=0
    )


def test_bfloat16_uses_the_other_norm() -> None:
    from octavo.models.layers.norm import RMSNorm

    x = torch.randn(5, 6, 8)
    weight = torch.rand(8)
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        norm = RMSNorm(8, 1e-5, dtype=dtype, device=torch.device("cpu"), groups=(4, 2))
        norm.load("weight", weight, 0)
        norm.load("weight", weight + 1, 1)
        outputs.append(norm(x.to(dtype)).float())
    torch.testing.assert_close(outputs[0], outputs[1], atol=0.05, rtol=0.02)
    want = x[:, 4:] / (x[:, 4:].pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight + 1)
    torch.testing.assert_close(outputs[0][:, 4:], want)


BAD_CONFIGS = [
    ({"architectures": ["MambaForCausalLM"]}, UnsupportedModel, "'MambaForCausalLM'"),
    ({"architectures": []}, UnsupportedModel, r"\(none\)"),
    ({"hidden_act": "relu2"}, UnsupportedModel, "hidden_act 'relu2'"),
    ({"hidden_size": None}, ModelError, "hidden_size must be a positive integer, got None"),
    ({"num_key_value_heads": 3}, ModelError, "multiple of num_key_value_heads"),
    ({"rope_scaling": {"type": "longrope"}}, UnsupportedModel, "'longrope'"),
    ({"rope_scaling": {"type": "linaer"}}, UnsupportedModel, "did you mean 'linear'"),
    ({"partial_rotary_factor": 0.5}, UnsupportedModel, "partial_rotary_factor 0.5"),
    ({"head_dim": 7}, ModelError, "head_dim must be even"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_CONFIGS)
def test_what_is_not_served(change: dict[str, Any], error: type[Exception], message: str) -> None:
    config = {**TINY, "architectures": ["LlamaForCausalLM"], **change}
    with pytest.raises(error, match=message):
        decoder_config(config)
    facts = {"architecture": (config["architectures"] or [None])[0], "config": config}
    assert not probe(ProbeContext(facts=facts))


def test_missing_rope_number_is_named(doubles: Any) -> None:
    config = {**TINY, "architectures": ["LlamaForCausalLM"], "rope_scaling": {"type": "linear"}}
    with pytest.raises(ModelError, match="'linear' needs the number 'factor'"):
        doubles.build(config, 64)


def test_probe_knows_the_families() -> None:
    assert probe(ProbeContext())
    assert probe(ProbeContext(facts={"architecture": "Qwen3ForCausalLM"}))
    config = {**TINY, "architectures": ["LlamaForCausalLM"]}
    assert probe(ProbeContext(facts={"architecture": "LlamaForCausalLM", "config": config}))
    refused = probe(ProbeContext(facts={"architecture": "GPT2LMHeadModel"}))
    assert not refused
    assert "not GPT2LMHeadModel" in refused.reason
