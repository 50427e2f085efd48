"""A model's config.json as a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model, where config.json nests it."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def override(config: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`hf_overrides` laid over config.json, mapping by mapping."""
    result = dict(config)
    for key, value in extra.items():
        old = result.get(key)
        nested = isinstance(value, Mapping) and isinstance(old, Mapping)
        result[key] = override(old, value) if nested else value  # type: ignore[arg-type]
    return result
