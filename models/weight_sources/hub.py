"""Weight source `hub`: a model of the Hugging Face hub, downloaded once, then read as a folder.

Configuration and tokenizer files come first; weights are downloaded when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.contracts import NoOptions
from octavo.core.contracts.weight_source import WeightSource, WeightSourceContext
from octavo.core.errors import ModelNotFound
from octavo.models.weight_sources.folder import Folder

if TYPE_CHECKING:
    import torch

_TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_WEIGHT_FILES = ["*.safetensors"]
# Subfolders hold other forms of the same model; only templates are wanted from them.
_UNWANTED = ["*/*.json", "*/*.model", "*/*.txt", "*/*.safetensors", "consolidated*"]


class Hub(WeightSource):
    """`source` is `owner/name`; `revision` a branch, tag or commit."""

    def __init__(self, options: NoOptions, context: WeightSourceContext) -> None:
        self._context = context

    def config(self) -> dict[str, Any]:
        return self._texts.config()

    def generation_config(self) -> dict[str, Any]:
        return self._texts.generation_config()

    def tokenizer_dir(self) -> Path | None:
        return self._texts.tokenizer_dir()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._folder(_TEXT_FILES + _WEIGHT_FILES).tensors()

    @cached_property
    def _texts(self) -> Folder:
        return self._folder(_TEXT_FILES)

    def _folder(self, patterns: list[str]) -> Folder:
        path = self._download(patterns)
        context = WeightSourceContext(
            source=path,
            revision=None,
            download_dir=None,
            cache_dir=self._context.cache_dir,
            show_progress=self._context.show_progress,
        )
        return Folder(NoOptions(), context)

    def _download(self, patterns: list[str]) -> str:
        import httpx
        import huggingface_hub
        from huggingface_hub import errors

        name, revision = self._context.source, self._context.revision
        at = f" at revision '{revision}'" if revision else ""
        try:
            return str(
                huggingface_hub.snapshot_download(
                    name,
                    revision=revision,
                    cache_dir=self._context.download_dir,
                    allow_patterns=patterns,
                    ignore_patterns=_UNWANTED,
                )
            )
        except errors.GatedRepoError as error:
            raise ModelNotFound(
                f"model '{name}' is gated: accept its licence on the hub, then log in there or set "
                "HF_TOKEN"
            ) from error
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
            raise ModelNotFound(
                f"model '{name}'{at} is not on the hub (or is private), and there is no folder of "
                "that name here"
            ) from error
        except errors.HFValidationError as error:
            raise ModelNotFound(f"'{name}' is neither a folder nor a hub id: {error}") from error
        except (errors.LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
            raise ModelNotFound(
                f"model '{name}'{at} is not in the download folder, and the hub cannot be reached: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from error
