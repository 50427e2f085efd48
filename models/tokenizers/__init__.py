"""Built-in tokenizers. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

_HERE = "octavo.models.tokenizers"

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="fast",
        factory=f"{_HERE}.fast:FastTokenizer",
        probe=f"{_HERE}.files:probe_fast",
        rank=100,
        summary="tokenizer.json and the model's chat template, without torch",
    ),
    Provider(
        name="transformers",
        factory=f"{_HERE}.transformers_tokenizer:TransformersTokenizer",
        probe=f"{_HERE}.files:probe_transformers",
        rank=10,
        summary="AutoTokenizer of transformers, for models without tokenizer.json (imports torch)",
    ),
]
