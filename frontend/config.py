"""Reads a user's configuration: YAML in sections, or anything under vLLM's names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.core import config as core
from octavo.core.config.yaml_source import read_yaml
from octavo.core.errors import ConfigError
from octavo.engine.config import EngineConfig
from octavo.frontend.vllm.flag_files import with_sections
from octavo.frontend.vllm.keywords import KEYWORDS

_FLAG_NAMES = {known.path: name for name, known in reversed(KEYWORDS.items()) if known.path}


def load_config(
    file: str | os.PathLike[str] | None = None,
    mapping: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    errors: list[ConfigError] | None = None,
) -> EngineConfig:
    """As `octavo.core.config.load_config`; the file may hold vLLM's flags in place of sections, and
    errors call flags by vLLM's names."""
    contents = None
    if file is not None:
        sections = core.config_model(EngineConfig).model_fields
        contents = with_sections(read_yaml(Path(file)), sections, errors)
    return core.load_config(
        EngineConfig,
        contents,
        mapping=mapping,
        overrides=overrides,
        flags=flags,
        errors=errors,
        flag_names=_FLAG_NAMES,
    )
