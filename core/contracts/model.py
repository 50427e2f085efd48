"""Kind `model`: from a model's configuration to a module that computes hidden states and logits.

Runs in the worker. Legend: T tokens of the batch (flat, all rows one after another), R rows that
need logits, E hidden size, V vocabulary, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.core.contracts.provider import Provider, hookspec

if TYPE_CHECKING:
    import torch

    from octavo.core.contracts.quantization import QuantizationMethod


@dataclass(frozen=True)
class AttentionSpec:
    """What one attention layer computes: softmax(scale * q k^T + mask) v.

    head_size is of K; value_head_size of V. window: a query sees this many last positions, itself
    included (None: all). soft_cap: logits become cap * tanh(logits / cap). sinks and alibi: the
    layer adds learned sinks or ALiBi slopes. latent: multi-head latent attention. rope_dim: leading
    dimensions of each head that rotate (0: none).
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_head_size: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    latent: bool = False
    rope_dim: int = 0
    rope_interleaved: bool = False


@dataclass(frozen=True)
class KVSpec:
    """What one layer keeps. kind: `full`, `window`, `latent` or `recurrent`. Layers with one
    `group` share block tables."""

    layer: int
    kind: str
    num_kv_heads: int
    head_size: int
    value_head_size: int
    window: int | None = None
    group: int = 0


AttentionFn = Callable[
    ["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"
]
"""`(q[T, H, D], k[T, K, D], v[T, K, Dv], positions int64[T]) -> [T, H * Dv]`. q and k arrive
unrotated; rope, KV write and attention happen inside."""


@dataclass(frozen=True)
class DecoderLayerSpec:
    """One pre-norm residual layer as `DecoderSpec` describes it. Weights of norms are [E], those of
    q_norm and k_norm (heads normalized before rope, or None) are [D]. qkv, o, gate_up and down are
    layers made by the quantization method; gate_up's two halves are the gate and what it gates."""

    attention_norm: torch.Tensor
    qkv: torch.nn.Module
    o: torch.nn.Module
    mlp_norm: torch.Tensor
    gate_up: torch.nn.Module
    down: torch.nn.Module
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class DecoderSpec:
    """A model that is nothing but Llama's decoder, for a graph runner that computes it whole:

        x = embedding[token_ids]
        x += o(attention(qkv(norm(x))));  x += down(activation(gate) * up)   for each layer
        hidden = norm(x)

    with RMSNorm. embedding: [V, E], or the tied head whose `rows` it is. norm: [E]. activation:
    `silu`, `gelu` or `gelu_tanh`."""

    embedding: torch.Tensor | torch.nn.Module
    layers: tuple[DecoderLayerSpec, ...]
    norm: torch.Tensor
    norm_eps: float
    activation: str


@dataclass(frozen=True)
class ModelContext:
    """config: the model's config.json as a mapping. dtype: `torch.dtype` of activations. device:
    where parameters live. max_model_len: tokens. quantization: makes linear layers.
    attention(layer, spec, cos_sin): registers a layer and returns what its module calls; cos_sin is
    float32[max_model_len, rope_dim], cosines then sines, or None without rope."""

    config: dict[str, Any]
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    quantization: QuantizationMethod
    attention: Callable[[int, AttentionSpec, torch.Tensor | None], AttentionFn]


class CausalLM(ABC):
    """Implemented by a `torch.nn.Module`. `num_layers` and `vocab_size` are set by `__init__`.

    forward_version: raised, in the worker's thread, by whoever changes what a forward pass launches
    once the model is loaded: an adapter that comes, goes or is swapped, a layer that is replaced,
    wrapped or hooked, a parameter that becomes another tensor. The core looks at it before each
    step and lets the graph runner compile, capture and look up anew (`GraphRunner.invalidate`),
    which may take seconds. Weights that are overwritten in place need it only where a runner holds
    them in another form: graphs and compiled code read them where they are, and so do packed layers
    whose packed form is written, but the runner `native` has copies of the norms. Keys and values
    that were computed before stay as they are for sequences that hold them; those that get a slot
    afterwards find none of them in the prefix cache.
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
        """The model's parts when `forward` is exactly what `DecoderSpec` describes, else None (as
        where a layer is split over ranks, wrapped or hooked). Asked for after the weights were
        loaded, and again when `forward_version` was raised."""
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
