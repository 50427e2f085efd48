"""Weight source `folder`: config.json and safetensors, in one file or in shards with an index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.contracts import NoOptions
from octavo.core.contracts.weight_source import WeightSource, WeightSourceContext
from octavo.core.errors import ModelNotFound, WeightError
from octavo.models.json_files import read_json
from octavo.models.weight_sources.safetensors_files import header, read_tensors

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Folder(WeightSource):
    """Reads the files that `save_pretrained` of transformers writes."""

    def __init__(self, options: NoOptions, context: WeightSourceContext) -> None:
        self._show_progress = context.show_progress
        self.path = Path(context.source).expanduser()
        if not self.path.exists():
            raise ModelNotFound(f"no such model: '{context.source}' is neither a folder nor a file")
        if not self.path.is_dir():
            raise ModelNotFound(f"'{context.source}' is a file; expected a folder or a .gguf file")
        if not (self.path / "config.json").is_file():
            raise ModelNotFound(f"folder '{self.path}' has no config.json{_hint(self.path)}")

    def config(self) -> dict[str, Any]:
        return read_json(self.path / "config.json")

    def generation_config(self) -> dict[str, Any]:
        file = self.path / "generation_config.json"
        return read_json(file) if file.is_file() else {}

    def tokenizer_dir(self) -> Path | None:
        present = any((self.path / name).is_file() for name in TOKENIZER_FILES)
        return self.path if present else None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return read_tensors(weight_files(self.path), self._show_progress)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Raises `WeightError` when some or all are missing."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _shards(folder, folder / INDEX)
    # Mistral's repositories hold the same weights once more under other names.
    files = sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith("consolidated"))
    if files:
        return files
    pickled = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
    found = f"; {pickled[0].name} is a pickle, which is not loaded" if pickled else ""
    raise WeightError(f"folder '{folder}' has no {SINGLE} and no {INDEX}{found}")


def _shards(folder: Path, index: Path) -> list[Path]:
    """Files that an index names, after a check that they hold what it promises."""
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise WeightError(f"{index}: expected a mapping 'weight_map', got {mapping!r}")
    shards: dict[str, set[str]] = {}
    for tensor, name in mapping.items():
        shards.setdefault(str(name), set()).add(tensor)
    for name, wanted in sorted(shards.items()):
        file = folder / name
        if Path(name).name != name:
            raise WeightError(f"{index}: '{name}' is not the name of a file in this folder")
        if not file.is_file():
            raise WeightError(f"{file}: missing; {INDEX} wants {len(wanted)} tensors from it")
        absent = wanted - header(file).keys()
        if absent:
            raise WeightError(f"{file}: lacks tensor {min(absent)}, which {INDEX} promises")
    return [folder / name for name in sorted(shards)]


def _hint(folder: Path) -> str:
    files = sorted(folder.glob("*.gguf"))
    return f"; it holds {files[0].name}: give that file's path" if files else ""
