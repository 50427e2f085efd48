"""Built-in families. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="decoder",
        factory="octavo.models.families.decoder:Decoder",
        probe="octavo.models.families.config:probe",
        rank=100,
        summary="Llama, SmolLM, Mistral, Qwen2 and Qwen3, natively",
    ),
]
