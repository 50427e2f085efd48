"""Kind `quantization`: how a linear layer holds and multiplies its weight. Runs in the worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.core.contracts.provider import Provider, hookspec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class QuantizationContext:
    """What a factory gets."""

    config: dict[str, Any]  # `quantization_config` of config.json, or empty
    dtype: torch.dtype  # of activations
    device: torch.device


class QuantizationMethod(ABC):
    """Makes linear layers. A layer is a `torch.nn.Module` called with [T, in_features] and
    returning [T, out_features]; several matrices may be fused along the outputs."""

    @abstractmethod
    def linear(
        self, prefix: str, in_features: int, out_features: tuple[int, ...], bias: bool
    ) -> torch.nn.Module:
        """A layer for `len(out_features)` matrices fused into one product. Its method
        `load(part: int, kind: str, tensor)` takes the `kind` ("weight" or "bias") of one of them
        in the checkpoint's dtype; `finish()` is called when all were loaded and raises
        `WeightError` when one is missing. `prefix` is its name in the checkpoint.

        A tied head (`lm_head`) gets the embedding's own parameter, which a layer may keep instead
        of copying. A layer that cannot, since it holds weights in another form, may have
        `rows(index: int64[T]) -> [T, in_features]`, what it has of those outputs: then the head is
        the embedding too, and the model keeps no other. A layer whose weights are not parameters
        says in an attribute `num_parameters` how many they stand for."""


class Spec:
    @hookspec
    def octavo_quantizations(self) -> list[Provider[QuantizationMethod]]:  # type: ignore[empty-body]
        """Providers of quantization methods.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `QuantizationContext`.
        """
