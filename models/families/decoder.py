"""The decoder of the Llama-like families: Llama (and SmolLM), Mistral, Qwen2, Qwen3.

Pre-norm residual blocks of self-attention and a gated MLP; what differs between the families is in
`DecoderConfig`. Legend: T tokens, R rows that need logits, E hidden size, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from octavo.core.contracts import NoOptions
from octavo.core.contracts.model import (
    CausalLM,
    DecoderLayerSpec,
    DecoderSpec,
    KVSpec,
    ModelContext,
)
from octavo.core.errors import WeightError
from octavo.kernels import is_plain
from octavo.models.families.config import DecoderConfig, decoder_config, tensor_shapes
from octavo.models.layers.attention import SelfAttention
from octavo.models.layers.mlp import GatedMLP
from octavo.models.layers.norm import RMSNorm
from octavo.models.layers.rope import rope_table

Loader = Callable[[str, torch.Tensor], Any]

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
        place: dict[str, Any] = {"dtype": context.dtype, "device": context.device}
        eps = config.rms_norm_eps
        qk_norm = None
        if config.qk_norm:
            groups = (config.num_heads, config.num_kv_heads)
            qk_norm = RMSNorm(config.head_size, eps, groups=groups, **place)
        self.attention_norm = RMSNorm(config.hidden_size, eps, **place)
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
        self.mlp_norm = RMSNorm(config.hidden_size, eps, **place)
        self.mlp = GatedMLP(
            f"{prefix}.mlp",
            config.hidden_size,
            config.intermediate_size,
            config.mlp_bias,
            context.quantization,
        )

    def is_plain(self) -> bool:
        """Whether nothing was put in the place of its parts, or around them. Linear layers may be
        any."""
        norms = [self.attention_norm, self.mlp_norm]
        if self.attention.qk_norm is not None:
            norms.append(self.attention.qk_norm)
        return (
            is_plain(self, DecoderLayer)
            and is_plain(self.attention, SelfAttention)
            and is_plain(self.mlp, GatedMLP)
            and all(is_plain(norm, RMSNorm) for norm in norms)
        )

    def spec(self) -> DecoderLayerSpec:
        """The layer's parts."""
        norm, heads = self.attention.qk_norm, self.attention.parts[0]
        return DecoderLayerSpec(
            attention_norm=self.attention_norm.weight,
            qkv=self.attention.qkv,
            o=self.attention.o,
            mlp_norm=self.mlp_norm.weight,
            gate_up=self.mlp.gate_up,
            down=self.mlp.down,
            q_norm=None if norm is None else norm.weight[0],
            k_norm=None if norm is None else norm.weight[heads],
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
        self.head: Any = context.quantization.linear(
            "lm_head", config.hidden_size, (config.vocab_size,), False
        )
        # A tied head that gives its rows is the embedding too.
        self.embedding: nn.Parameter | None = None
        if not (config.tied and hasattr(self.head, "rows")):
            shape = (config.vocab_size, config.hidden_size)
            table = torch.empty(shape, dtype=context.dtype, device=context.device)
            self.embedding = nn.Parameter(table, requires_grad=False)
        cos_sin = rope_table(config.rope, context.max_model_len, context.device)
        self.layers: Any = nn.ModuleList(
            DecoderLayer(index, config, context, cos_sin) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, dtype=context.dtype, device=context.device
        )

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.embedding is None:
            residual = self.head.rows(token_ids)
        else:
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

    def decoder_spec(self) -> DecoderSpec | None:
        layers = list(self.layers)
        if not (
            is_plain(self, Decoder)
            and is_plain(self.norm, RMSNorm)
            and all(isinstance(layer, DecoderLayer) and layer.is_plain() for layer in layers)
        ):
            return None
        return DecoderSpec(
            embedding=self.head if self.embedding is None else self.embedding,
            layers=tuple(layer.spec() for layer in layers),
            norm=self.norm.weight,
            norm_eps=self.config.rms_norm_eps,
            activation="silu",
        )

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        shapes, loaders = tensor_shapes(self.config), self._loaders()
        missing = dict.fromkeys(shapes)
        for name, tensor in tensors:
            if name in shapes:
                if tuple(tensor.shape) != shapes[name]:
                    want, came = list(shapes[name]), list(tensor.shape)
                    raise WeightError(f"{name}: expected shape {want}, got {came}")
                prefix, _, kind = name.rpartition(".")
                loaders[prefix](kind, tensor)
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
                f"the checkpoint lacks {len(names)} of the {len(shapes)} tensors of "
                f"{self.config.architecture}: {', '.join(names[:3])}{more}"
            )
        if self.config.tied and self.embedding is not None:
            self.head.load(0, "weight", self.embedding)
        for linear in self._linears():
            linear.finish()

    def _load_embedding(self, kind: str, tensor: torch.Tensor) -> None:
        if self.embedding is None:
            self.head.load(0, kind, tensor)
        else:
            self.embedding.data.copy_(tensor)

    def _linears(self) -> Iterable[Any]:
        for layer in self.layers:
            yield from (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down)
        yield self.head

    def _loaders(self) -> dict[str, Loader]:
        """What takes the tensors under a name without its `.weight` or `.bias`."""
        loaders: dict[str, Loader] = {
            "model.embed_tokens": self._load_embedding,
            "model.norm": self.norm.load,
            "lm_head": partial(self.head.load, 0),
        }
        for index, layer in enumerate(self.layers):
            attention, mlp = layer.attention, layer.mlp
            own: dict[str, Loader] = {
                "input_layernorm": layer.attention_norm.load,
                "post_attention_layernorm": layer.mlp_norm.load,
                "self_attn.q_proj": partial(attention.qkv.load, 0),
                "self_attn.k_proj": partial(attention.qkv.load, 1),
                "self_attn.v_proj": partial(attention.qkv.load, 2),
                "self_attn.o_proj": partial(attention.o.load, 0),
                "mlp.gate_proj": partial(mlp.gate_up.load, 0),
                "mlp.up_proj": partial(mlp.gate_up.load, 1),
                "mlp.down_proj": partial(mlp.down.load, 0),
            }
            if attention.qk_norm is not None:
                own["self_attn.q_norm"] = partial(attention.qk_norm.load, group=0)
                own["self_attn.k_norm"] = partial(attention.qk_norm.load, group=1)
            loaders |= {f"model.layers.{index}.{name}": load for name, load in own.items()}
        return loaders
