"""The configuration: one pydantic model, read from YAML, `--set` and flags. Imports no torch."""

from octavo.core.config.models import Choice, EngineConfig

__all__ = ["Choice", "EngineConfig"]
