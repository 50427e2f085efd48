"""Kind `weight_source`: where configuration, tensors and tokenizer files of a model come from.

`config`, `generation_config` and `tokenizer_dir` are used in the API process and must not import
torch; `tensors` runs in the worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.contracts.provider import Provider, hookspec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class WeightSourceContext:
    """What a factory gets."""

    source: str  # as the user wrote it: `./folder`, `owner/name`, `file.gguf`, `package:name`
    revision: str | None  # for the hub
    download_dir: str | None
    cache_dir: Path  # for converted files
    show_progress: bool = True  # a progress bar on stderr is allowed
    # Laid over `config()` (`model.hf_overrides`); a source of random tensors makes them fit.
    config_overrides: Mapping[str, Any] = field(default_factory=dict)


class WeightSource(ABC):
    """Raises `ModelNotFound` when nothing is there, `WeightError` when a file is damaged."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """config.json as a mapping, with `architectures`."""

    @abstractmethod
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, or empty."""

    @abstractmethod
    def tokenizer_dir(self) -> Path | None:
        """A folder with tokenizer.json, tokenizer_config.json and perhaps chat_template.jinja."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor under its Hugging Face name, on the CPU, in the checkpoint's dtype, one at a
        time so that memory peaks at the model plus one tensor."""


class Spec:
    @hookspec
    def octavo_weight_sources(self) -> list[Provider[WeightSource]]:  # type: ignore[empty-body]
        """Providers of weight sources. A probe reads the fact `source`.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `WeightSourceContext`.
        """
