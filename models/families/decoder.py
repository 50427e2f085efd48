"""The decoder of the Llama-like families: Llama (and SmolLM), Mistral, Qwen2, Qwen3.

Pre-norm residual blocks of self-attention and a gated MLP; what differs between the families is in
`DecoderConfig`. Legend: T tokens, R rows that need logits, E hidden size, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional

from octavo.core.contracts import NoOptions
from octavo.core.contracts.model import CausalLM, KVSpec, ModelContext
from octavo.core.errors import WeightError
from octavo.models.families.config import DecoderConfig, decoder_config
from octavo.models.layers.attention import SelfAttention
from octavo.models.layers.mlp import GatedMLP
from octavo.models.layers.norm import RMSNorm
from octavo.models.layers.rope import rope_table

Loader = Callable[[str, torch.Tensor], None]

# Buffers of old checkpoints, derived from the configuration.
_DERIVED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


class DecoderLayer(nn.Module):
    """Adds attention and MLP to the residual stream [T, E], in place."""

    def __init__(
        self, index: int, config: DecoderConfig, context: ModelContext, cos_sin: torch.Tensor
    ) -> None:
        super().__init__()
        prefix = f"model.layers.{index}"
        spec = config.attention_spec(index, context.max_model_len)
        place = {"dtype": context.dtype, "device": context.device}
        eps = config.rms_norm_eps
        qk_norm = None
        if config.qk_norm:
            groups = (config.num_heads, config.num_kv_heads)
            qk_norm = RMSNorm(config.head_size, eps, groups=groups, **place)  # type: ignore[arg-type]
        self.attention_norm = RMSNorm(config.hidden_size, eps, **place)  # type: ignore[arg-type]
        self.attention = SelfAttention(
            f"{prefix}.self_attn",
            config.hidden_size,
            spec,
            context.attention(index, spec, cos_sin),
            context.quantization,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            qk_norm=qk_norm,
        )
        self.mlp_norm = RMSNorm(config.hidden_size, eps, **place)  # type: ignore[arg-type]
        self.mlp = GatedMLP(
            f"{prefix}.mlp",
            config.hidden_size,
            config.intermediate_size,
            config.mlp_bias,
            context.quantization,
        )

    def forward(self, residual: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        residual.add_(self.attention(self.attention_norm(residual), positions))
        return residual.add_(self.mlp(self.mlp_norm(residual)))


class Decoder(nn.Module, CausalLM):
    """`CausalLM` for the architectures in `octavo.models.families.config.FAMILIES`."""

    def __init__(self, options: NoOptions, context: ModelContext) -> None:
        super().__init__()
        config = decoder_config(context.config)
        self.config = config
        self.num_layers, self.vocab_size = config.num_layers, config.vocab_size
        self.max_model_len = context.max_model_len
        self.embedding = nn.Parameter(
            torch.empty(
                config.vocab_size, config.hidden_size, dtype=context.dtype, device=context.device
            ),
            requires_grad=False,
        )
        cos_sin = rope_table(config.rope, context.max_model_len, context.device)
        self.layers = nn.ModuleList(
            DecoderLayer(index, config, context, cos_sin) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, dtype=context.dtype, device=context.device
        )
        self.head = context.quantization.linear(
            "lm_head", config.hidden_size, (config.vocab_size,), False
        )

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        residual = functional.embedding(token_ids, self.embedding)
        for layer in self.layers:
            residual = layer(residual, positions)
        return self.norm(residual)  # type: ignore[no-any-return]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden).float()  # type: ignore[no-any-return]

    def kv_specs(self) -> list[KVSpec]:
        """All layers are one group: they share block tables, so a windowed layer keeps blocks that
        it no longer reads for as long as a full one needs them."""
        specs = [
            self.config.attention_spec(layer, self.max_model_len)
            for layer in range(self.num_layers)
        ]
        return [
            KVSpec(
                layer=layer,
                kind="full" if spec.window is None else "window",
                num_kv_heads=spec.num_kv_heads,
                head_size=spec.head_size,
                value_head_size=spec.value_head_size,
                window=spec.window,
            )
            for layer, spec in enumerate(specs)
        ]

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        loaders = self._loaders()
        missing = dict.fromkeys(loaders)
        for name, tensor in tensors:
            if name in loaders:
                loaders[name](name, tensor)
                missing.pop(name, None)
            elif not (_DERIVED.search(name) or (self.config.tied and name == "lm_head.weight")):
                raise WeightError(
                    f"the checkpoint has a tensor that {self.config.architecture} with this "
                    f"config.json does not: {name} {list(tensor.shape)}"
                )
        if missing:
            names = list(missing)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise WeightError(
                f"the checkpoint lacks {len(names)} of the {len(loaders)} tensors of "
                f"{self.config.architecture}: {', '.join(names[:3])}{more}"
            )
        if self.config.tied:
            self.head.load(0, "weight", self.embedding.data)  # type: ignore[operator]
        for module in self._linears():
            module.finish()  # type: ignore[operator]

    def _linears(self) -> Iterable[nn.Module]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer), "only decoder layers are made"
            yield from (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down)
        yield self.head

    def _loaders(self) -> dict[str, Loader]:
        """Every tensor of the checkpoint, by its Hugging Face name."""
        config = self.config
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_size
        query, keys = config.num_heads * size, config.num_kv_heads * size
        loaders: dict[str, Loader] = {
            "model.embed_tokens.weight": self._load_embedding,
            "model.norm.weight": self.norm.load,
        }
        if not config.tied:
            loaders |= _linear(self.head, 0, "lm_head", (config.vocab_size, hidden), False)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer), "only decoder layers are made"
            attention, mlp = layer.attention, layer.mlp
            at = f"model.layers.{index}"
            loaders[f"{at}.input_layernorm.weight"] = layer.attention_norm.load
            loaders[f"{at}.post_attention_layernorm.weight"] = layer.mlp_norm.load
            for part, (name, rows) in enumerate({"q": query, "k": keys, "v": keys}.items()):
                prefix = f"{at}.self_attn.{name}_proj"
                loaders |= _linear(attention.qkv, part, prefix, (rows, hidden), config.qkv_bias)
            prefix = f"{at}.self_attn.o_proj"
            loaders |= _linear(attention.o, 0, prefix, (hidden, query), config.output_bias)
            if attention.qk_norm is not None:
                for group, name in enumerate(("q_norm", "k_norm")):
                    loaders[f"{at}.self_attn.{name}.weight"] = _norm_group(attention.qk_norm, group)
            for part, name in enumerate(("gate", "up")):
                prefix = f"{at}.mlp.{name}_proj"
                loaders |= _linear(mlp.gate_up, part, prefix, (inner, hidden), config.mlp_bias)
            loaders |= _linear(mlp.down, 0, f"{at}.mlp.down_proj", (hidden, inner), config.mlp_bias)
        return loaders

    def _load_embedding(self, name: str, tensor: torch.Tensor) -> None:
        _check(name, tensor, tuple(self.embedding.shape))
        self.embedding.data.copy_(tensor)


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise WeightError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")


def _linear(
    module: nn.Module, part: int, prefix: str, shape: tuple[int, int], bias: bool
) -> dict[str, Loader]:
    """Loaders of one matrix [out, in] of a fused layer, and of its bias."""

    def weight(name: str, tensor: torch.Tensor) -> None:
        _check(name, tensor, shape)
        module.load(part, "weight", tensor)  # type: ignore[operator]

    def offset(name: str, tensor: torch.Tensor) -> None:
        _check(name, tensor, shape[:1])
        module.load(part, "bias", tensor)  # type: ignore[operator]

    loaders: dict[str, Loader] = {f"{prefix}.weight": weight}
    if bias:
        loaders[f"{prefix}.bias"] = offset
    return loaders


def _norm_group(norm: RMSNorm, group: int) -> Loader:
    def load(name: str, tensor: torch.Tensor) -> None:
        norm.load(name, tensor, group)

    return load
