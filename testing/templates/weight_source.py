"""Weight source `example`: `example:FOLDER`, a folder with config.json and *.safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.contracts import Availability, Options, ProbeContext
from octavo.core.contracts.weight_source import WeightSource, WeightSourceContext
from octavo.core.errors import ModelNotFound, WeightError

if TYPE_CHECKING:
    import torch

PREFIX = "example:"


class ExampleOptions(Options):
    """Nothing to set yet."""


def probe(context: ProbeContext) -> Availability:
    """Whether a source is written in this form."""
    source = context.facts.get("source")
    if source is None or str(source).startswith(PREFIX):
        return Availability(True, f"sources that begin with {PREFIX}")
    return Availability(False, f"'{source}' does not begin with '{PREFIX}'")


class ExampleSource(WeightSource):
    """Reads the files when they are asked for."""

    def __init__(self, options: ExampleOptions, context: WeightSourceContext) -> None:
        self._folder = Path(context.source.removeprefix(PREFIX))
        if not (self._folder / "config.json").is_file():
            raise ModelNotFound(f"'{context.source}': there is no config.json in {self._folder}")

    def config(self) -> dict[str, Any]:
        return self._read("config.json")

    def generation_config(self) -> dict[str, Any]:
        return self._read("generation_config.json")

    def _read(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        if not path.is_file():
            return {}
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except ValueError as error:
            raise WeightError(f"{path} is no JSON: {error}") from error
        return found

    def tokenizer_dir(self) -> Path | None:
        return self._folder if (self._folder / "tokenizer.json").is_file() else None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors import safe_open

        for path in sorted(self._folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    yield name, file.get_tensor(name)
