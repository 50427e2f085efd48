"""Slow, obvious doubles of what the runner gives a model: linear layers and attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from octavo.core.contracts.model import AttentionFn, AttentionSpec, CausalLM, ModelContext
from octavo.core.contracts.quantization import QuantizationMethod
from octavo.core.errors import WeightError


class PlainLinear(nn.Module):
    def __init__(self, prefix: str, in_features: int, out: tuple[int, ...], bias: bool) -> None:
        super().__init__()
        self.prefix, self.out = prefix, out
        self.weights: dict[int, torch.Tensor] = {}
        self.biases: dict[int, torch.Tensor] = {}
        self.has_bias, self.in_features, self.finished = bias, in_features, False

    def load(self, part: int, kind: str, tensor: torch.Tensor) -> None:
        {"weight": self.weights, "bias": self.biases}[kind][part] = tensor

    def finish(self) -> None:
        if len(self.weights) != len(self.out) or len(self.biases) != len(self.out) * self.has_bias:
            raise WeightError(f"{self.prefix}: incomplete")
        self.finished = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.finished
        parts = []
        for part, size in enumerate(self.out):
            assert self.weights[part].shape == (size, self.in_features)
            parts.append(nn.functional.linear(x, self.weights[part], self.biases.get(part)))
        return torch.cat(parts, dim=-1)


class PlainQuantization(QuantizationMethod):
    def linear(
        self, prefix: str, in_features: int, out_features: tuple[int, ...], bias: bool
    ) -> nn.Module:
        return PlainLinear(prefix, in_features, out_features, bias)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    cos, sin = cos_sin[positions][:, None, :].chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class SequenceAttention:
    """Attention over one whole sequence, which must be the batch. Remembers the specs."""

    def __init__(self) -> None:
        self.specs: dict[int, AttentionSpec] = {}

    def __call__(
        self, layer: int, spec: AttentionSpec, cos_sin: torch.Tensor | None
    ) -> AttentionFn:
        assert cos_sin is not None
        self.specs[layer] = spec

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
        ) -> torch.Tensor:
            assert q.shape[1:] == (spec.num_heads, spec.head_size)
            assert k.shape[1:] == (spec.num_kv_heads, spec.head_size)
            q, k = rotate(q, cos_sin, positions), rotate(k, cos_sin, positions)
            repeat = spec.num_heads // spec.num_kv_heads
            k, v = (t.repeat_interleave(repeat, dim=1).transpose(0, 1) for t in (k, v))
            scores = spec.scale * q.transpose(0, 1) @ k.transpose(1, 2)
            distance = positions[:, None] - positions[None, :]
            hidden = distance < 0
            if spec.window is not None:
                hidden |= distance >= spec.window
            scores = scores.masked_fill(hidden, float("-inf"))
            return (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(positions), -1)

        return attend


class Doubles:
    """What tests need to run a model: `build` and `logits`."""

    @staticmethod
    def build(
        config: dict[str, Any], max_model_len: int, factory: Any = None
    ) -> tuple[Any, SequenceAttention]:
        from octavo.core.contracts import NoOptions
        from octavo.models.families.decoder import Decoder

        attention = SequenceAttention()
        context = ModelContext(
            config=config,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=max_model_len,
            quantization=PlainQuantization(),
            attention=attention,
        )
        return (factory or Decoder)(NoOptions(), context), attention

    @staticmethod
    def logits(model: CausalLM, token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            positions = torch.arange(len(token_ids))
            return model.compute_logits(model.forward(torch.tensor(token_ids), positions))


@pytest.fixture(scope="session")
def doubles() -> Doubles:
    torch.set_num_threads(1)
    return Doubles()
