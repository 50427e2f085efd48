"""Weight source `dummy`: random weights for a real configuration, for tests and benchmarks.

Configuration and tokenizer come from wherever `source` points; no weights are read or downloaded.
Weights have the shapes that `model.hf_overrides` make of the configuration: fewer layers, say.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from octavo.core.contracts import NoOptions, Options
from octavo.core.contracts.weight_source import WeightSource, WeightSourceContext
from octavo.core.hf_config import override
from octavo.models.families.config import decoder_config, tensor_shapes
from octavo.models.weight_sources.folder import Folder
from octavo.models.weight_sources.gguf_file import GGUFFile
from octavo.models.weight_sources.hub import Hub
from octavo.models.weight_sources.package import package_source
from octavo.models.weight_sources.source_forms import form

if TYPE_CHECKING:
    import torch


class DummyOptions(Options):
    """What the random weights look like."""

    seed: int = Field(default=0, ge=0, description="Seed of the weights.")
    std: float = Field(default=0.02, gt=0, description="Standard deviation of matrices and biases.")
    period: int | None = Field(
        default=None,
        gt=0,
        description="Values repeat after so many, which makes large models in no time; not given: "
        "every value is drawn. A prime keeps the rows of a matrix apart.",
    )


class Dummy(WeightSource):
    """Normally distributed matrices, norms of one; the same for the same seed and tensor name."""

    def __init__(self, options: DummyOptions, context: WeightSourceContext) -> None:
        self._options = options
        self._overrides = context.config_overrides
        kinds: dict[str, Any] = {
            "folder": Folder,
            "gguf": GGUFFile,
            "package": package_source,
            "hub": Hub,
        }
        self._inner: WeightSource = kinds[form(context.source)](NoOptions(), context)

    def config(self) -> dict[str, Any]:
        return self._inner.config()

    def generation_config(self) -> dict[str, Any]:
        return self._inner.generation_config()

    def tokenizer_dir(self) -> Path | None:
        return self._inner.tokenizer_dir()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        config = override(self.config(), self._overrides)
        named = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        dtype = getattr(torch, named.removeprefix("torch."))
        period = self._options.period
        repeated = None if period is None else self._draw("", period).to(dtype)
        for name, shape in tensor_shapes(decoder_config(config)).items():
            if "norm" in name:
                yield name, torch.ones(shape, dtype=dtype)
                continue
            if repeated is None:
                yield name, self._draw(name, math.prod(shape)).view(shape).to(dtype)
            else:
                yield name, _cut(repeated, self._seed(name), shape)

    def _seed(self, name: str) -> int:
        # torch's CPU generator looks at 32 bits of its seed only.
        return zlib.crc32(f"{self._options.seed} {name}".encode())

    def _draw(self, name: str, count: int) -> torch.Tensor:
        import torch

        generator = torch.Generator().manual_seed(self._seed(name))
        return torch.empty(count).normal_(std=self._options.std, generator=generator)


def _cut(values: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of `shape` out of the endless repetition of `values`."""
    start %= len(values)
    end = start + math.prod(shape)
    return values.repeat(-(-end // len(values)))[start:end].view(shape)
