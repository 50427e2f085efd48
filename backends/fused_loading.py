"""What is still to be loaded into a linear layer of several fused matrices."""

from __future__ import annotations

import torch

from octavo.core.errors import WeightError


class FusedLoading:
    """Checks what a checkpoint brings for each matrix; `prefix` is the layer's name in it."""

    def __init__(
        self, prefix: str, in_features: int, out_features: tuple[int, ...], bias: bool
    ) -> None:
        self._prefix, self._in_features, self._out_features = prefix, in_features, out_features
        self._kinds = ("weight", "bias") if bias else ("weight",)
        self._missing = {(part, kind) for part in range(len(out_features)) for kind in self._kinds}

    def take(self, part: int, kind: str, tensor: torch.Tensor) -> int:
        """The first output row of matrix `part`. Raises `WeightError` if `tensor` does not fit."""
        if kind not in self._kinds:
            raise WeightError(f"{self._prefix} has no {kind}, the checkpoint brings one")
        size = self._out_features[part]
        wanted = [size, self._in_features] if kind == "weight" else [size]
        if list(tensor.shape) != wanted:
            raise WeightError(
                f"{self._prefix} part {part}: {kind} has shape {list(tensor.shape)}, expected "
                f"{wanted}"
            )
        self._missing.discard((part, kind))
        return sum(self._out_features[:part])

    def finish(self) -> None:
        """Raises `WeightError` if something is missing."""
        if self._missing:
            missing = ", ".join(f"{kind} of part {part}" for part, kind in sorted(self._missing))
            raise WeightError(f"{self._prefix}: the checkpoint lacks {missing}")
