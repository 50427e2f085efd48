"""The configuration: one pydantic model, read from YAML, `--set` and flags. Imports no torch."""

from octavo.core.config.loading import load_config
from octavo.core.config.models import EngineConfig, ImplementationConfig
from octavo.core.config.origin import Origin

__all__ = ["EngineConfig", "ImplementationConfig", "Origin", "load_config"]
