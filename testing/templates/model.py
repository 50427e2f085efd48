"""Model `example`: a Llama decoder in plain PyTorch, to change into an architecture of your own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from octavo.core.contracts import Availability, Options, ProbeContext
from octavo.core.contracts.model import AttentionSpec, CausalLM, KVSpec, ModelContext
from octavo.core.errors import WeightError

ARCHITECTURE = "LlamaForCausalLM"


class ExampleOptions(Options):
    """Nothing to set yet."""


def probe(context: ProbeContext) -> Availability:
    """Whether this is the architecture of the model that is loaded."""
    found = context.facts.get("architecture")
    if found in (None, ARCHITECTURE):
        return Availability(True, f"reads {ARCHITECTURE}")
    return Availability(False, f"it reads {ARCHITECTURE}, this model is {found}")


class Layer(nn.Module):
    """One decoder layer. Its parameters have the names of the checkpoint's, less the prefix."""

    def __init__(self, index: int, context: ModelContext, cos_sin: torch.Tensor) -> None:
        super().__init__()
        config = context.config
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads") or self.heads
        self.size = config.get("head_dim") or hidden // self.heads
        spec = AttentionSpec(
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_size=self.size,
            value_head_size=self.size,
            scale=self.size**-0.5,
            rope_dim=self.size,
        )
        self.attend = context.attention(index, spec, cos_sin)
        self.eps = config["rms_norm_eps"]
        self.norm1 = nn.Parameter(torch.empty(hidden, dtype=context.dtype), requires_grad=False)
        self.norm2 = nn.Parameter(torch.empty(hidden, dtype=context.dtype), requires_grad=False)
        at = f"model.layers.{index}"
        make = context.quantization.linear
        q, kv = self.heads * self.size, self.kv_heads * self.size
        self.qkv = make(f"{at}.self_attn.qkv_proj", hidden, (q, kv, kv), False)
        self.o = make(f"{at}.self_attn.o_proj", q, (hidden,), False)
        self.gate_up = make(f"{at}.mlp.gate_up_proj", hidden, (inner, inner), False)
        self.down = make(f"{at}.mlp.down_proj", inner, (hidden,), False)

    def targets(self) -> dict[str, tuple[nn.Module | nn.Parameter, int]]:
        """Where each tensor of the checkpoint goes: (layer or parameter, part)."""
        return {
            "input_layernorm": (self.norm1, 0),
            "post_attention_layernorm": (self.norm2, 0),
            "self_attn.q_proj": (self.qkv, 0),
            "self_attn.k_proj": (self.qkv, 1),
            "self_attn.v_proj": (self.qkv, 2),
            "self_attn.o_proj": (self.o, 0),
            "mlp.gate_proj": (self.gate_up, 0),
            "mlp.up_proj": (self.gate_up, 1),
            "mlp.down_proj": (self.down, 0),
        }

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        tokens, size = len(x), self.size
        parts = (self.heads * size, self.kv_heads * size, self.kv_heads * size)
        q, k, v = self.qkv(norm(x, self.norm1, self.eps)).split(parts, dim=-1)
        attended = self.attend(
            q.view(tokens, -1, size), k.view(tokens, -1, size), v.view(tokens, -1, size), positions
        )
        x = x + self.o(attended)
        gate, up = self.gate_up(norm(x, self.norm2, self.eps)).chunk(2, dim=-1)
        after: torch.Tensor = x + self.down(nn.functional.silu(gate) * up)
        return after


class ExampleModel(nn.Module, CausalLM):
    """Embedding, layers, last norm, head."""

    def __init__(self, options: ExampleOptions, context: ModelContext) -> None:
        super().__init__()
        config = context.config
        self.num_layers: int = config["num_hidden_layers"]
        self.vocab_size: int = config["vocab_size"]
        self._eps: float = config["rms_norm_eps"]
        self._tied: bool = config.get("tie_word_embeddings", False)
        shape = (self.vocab_size, config["hidden_size"])
        self.embedding = nn.Parameter(torch.empty(shape, dtype=context.dtype), requires_grad=False)
        self.norm = nn.Parameter(torch.empty(shape[1], dtype=context.dtype), requires_grad=False)
        cos_sin = rope_table(context)
        self.layers = nn.ModuleList(Layer(i, context, cos_sin) for i in range(self.num_layers))
        self.head = context.quantization.linear("lm_head", shape[1], (shape[0],), False)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding[token_ids]
        for layer in self.layers:
            x = layer(x, positions)
        return norm(x, self.norm, self._eps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden)
        return logits.float()

    def kv_specs(self) -> list[KVSpec]:
        layers: list[Any] = list(self.layers)
        return [
            KVSpec(index, "full", layer.kv_heads, layer.size, layer.size)
            for index, layer in enumerate(layers)
        ]

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        targets: dict[str, tuple[Any, int]] = {
            "model.embed_tokens": (self.embedding, 0),
            "model.norm": (self.norm, 0),
            "lm_head": (self.head, 0),
        }
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            targets |= {f"model.layers.{index}.{n}": to for n, to in layer.targets().items()}
        missing = set(targets)
        for name, tensor in tensors:
            short = name.removesuffix(".weight")
            if short not in targets:
                raise WeightError(f"the checkpoint has '{name}', which this model does not know")
            target, part = targets[short]
            if isinstance(target, nn.Parameter):
                if target.shape != tensor.shape:
                    raise WeightError(
                        f"'{name}' has shape {list(tensor.shape)}, expected {list(target.shape)}"
                    )
                target.data.copy_(tensor)
            else:
                target.load(part, "weight", tensor)
            missing.discard(short)
        if self._tied and "lm_head" in missing and "model.embed_tokens" not in missing:
            self.head.load(0, "weight", self.embedding)  # type: ignore[operator]
            missing.discard("lm_head")
        if missing:
            raise WeightError(f"the checkpoint lacks {', '.join(sorted(missing))}")
        for module in {id(to): to for to, _ in targets.values()}.values():
            if not isinstance(module, nn.Parameter):
                module.finish()


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich, 2019), computed in float32."""
    wide = x.float()
    return (wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight


def rope_table(context: ModelContext) -> torch.Tensor:
    """Cosines then sines of every position, float32[max_model_len, head size]."""
    config = context.config
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
    frequency = theta ** (-torch.arange(0, size, 2).float() / size)
    angles = torch.outer(torch.arange(context.max_model_len).float(), frequency)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(context.device)
