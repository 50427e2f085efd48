"""The configuration: one pydantic model, read from YAML, `--set` and flags. Imports no torch."""

from octavo.core.config.loading import load_config
from octavo.core.config.models import Choice, EngineConfig
from octavo.core.config.origin import Origin

__all__ = ["Choice", "EngineConfig", "Origin", "load_config"]
