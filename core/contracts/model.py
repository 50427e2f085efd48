"""Kind `model`: from a model's configuration to a module that computes hidden states and logits.

Runs in the worker. Legend: T tokens of the batch (flat, all rows one after another), R rows that
need logits, E hidden size, V vocabulary, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.core.contracts.kind import Kind
from octavo.core.contracts.provider import Provider, hookspec

if TYPE_CHECKING:
    import torch

    from octavo.core.contracts.quantization import QuantizationMethod


@dataclass(frozen=True)
class AttentionSpec:
    """What one attention layer computes: softmax(scale * q k^T + mask) v."""

    num_heads: int
    num_kv_heads: int
    head_size: int  # of K
    value_head_size: int
    scale: float
    window: int | None = None  # last positions a query sees, itself included; None: all
    soft_cap: float | None = None  # logits become cap * tanh(logits / cap)
    sinks: bool = False  # adds learned sinks
    alibi: bool = False  # adds ALiBi slopes
    latent: bool = False  # multi-head latent attention
    rope_dim: int = 0  # leading dimensions of each head that rotate; 0: none
    rope_interleaved: bool = False


@dataclass(frozen=True)
class KVSpec:
    """What one layer keeps."""

    layer: int
    kind: str  # `full`, `window`, `latent` or `recurrent`
    num_kv_heads: int
    head_size: int
    value_head_size: int
    window: int | None = None
    group: int = 0  # layers of one group share block tables


AttentionFn = Callable[
    ["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"
]
"""`(q[T, H, D], k[T, K, D], v[T, K, Dv], positions int64[T]) -> [T, H * Dv]`. q and k arrive
unrotated; rope, KV write and attention happen inside."""


@dataclass(frozen=True)
class DecoderLayerSpec:
    """One pre-norm residual layer of a `DecoderSpec`. Modules are layers of the quantization
    method."""

    attention_norm: torch.Tensor  # [E]
    qkv: torch.nn.Module
    o: torch.nn.Module
    mlp_norm: torch.Tensor  # [E]
    gate_up: torch.nn.Module  # the gate, then what it gates
    down: torch.nn.Module
    q_norm: torch.Tensor | None = None  # [D], heads normalized before rope
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class DecoderSpec:
    """A model that is nothing but Llama's decoder, for a graph runner that computes it whole:

        x = embedding[token_ids]
        x += o(attention(qkv(norm(x))));  x += down(activation(gate) * up)   for each layer
        hidden = norm(x)

    with RMSNorm."""

    embedding: torch.Tensor | torch.nn.Module  # [V, E], or the tied head, by its `rows`
    layers: tuple[DecoderLayerSpec, ...]
    norm: torch.Tensor  # [E]
    norm_eps: float
    activation: str  # `silu`, `gelu` or `gelu_tanh`


@dataclass(frozen=True)
class ModelContext:
    """What a factory gets."""

    config: dict[str, Any]  # config.json
    dtype: torch.dtype  # of activations
    device: torch.device  # of parameters
    max_model_len: int  # tokens
    quantization: QuantizationMethod  # creates linear layers
    # (layer, spec, cos_sin) -> what the layer's module calls. cos_sin: float32[max_model_len,
    # rope_dim], cosines then sines; None without rope.
    attention: Callable[[int, AttentionSpec, torch.Tensor | None], AttentionFn]


class CausalLM(ABC):
    """Implemented by a `torch.nn.Module`. `num_layers` and `vocab_size` are set by `__init__`.

    `forward_version` is incremented, on the worker's thread, by whoever changes what a forward pass
    launches after loading: an adapter added, removed or swapped, a layer replaced, wrapped or
    hooked, a parameter that becomes another tensor. The core reads it before each step and lets the
    graph runner compile and capture again (`GraphRunner.invalidate`), which may take seconds.
    Weights overwritten in place need it only where a runner holds them in another form (`native`
    has copies of the norms). Sequences keep KV computed before; those that get a slot afterwards
    find none of it in the prefix cache.
    """

    num_layers: int
    vocab_size: int
    forward_version: int = 0

    @abstractmethod
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states after the last norm, [T, E], of flat int64[T] token ids and positions."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits float32[R, V] of hidden states [R, E]."""

    @abstractmethod
    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill parameters from tensors under the names of the architecture's Hugging Face
        checkpoint. Raises `WeightError` naming what is missing, unknown or of the wrong shape."""

    @abstractmethod
    def kv_specs(self) -> list[KVSpec]:
        """One a layer, in layer order."""

    def decoder_spec(self) -> DecoderSpec | None:
        """The layers when `forward` is exactly what `DecoderSpec` describes, else None (a layer is
        split over ranks, wrapped or hooked). Called once the weights are loaded, and again when
        `forward_version` changed."""
        return None


def decoder_of(model: object) -> DecoderSpec | None:
    """The parts of a module, where it is a plain decoder."""
    return model.decoder_spec() if isinstance(model, CausalLM) else None


class Spec:
    @hookspec
    def octavo_models(self) -> list[Provider[CausalLM]]:  # type: ignore[empty-body]
        """Providers of model implementations. A probe reads the facts `architecture` (the first of
        `architectures` in config.json) and `config`.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `ModelContext`.
        """


KIND = Kind("model", Spec, CausalLM, ModelContext, "model.implementation", "1.1")
