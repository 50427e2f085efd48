"""From what a caller gives `LLM` or `AsyncLLM` to the parts that they are made of.

Everything heavy is imported inside the functions: the text side must not import torch.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from octavo.core.contracts.tokenizer import Tokenizer
from octavo.core.errors import ConfigError, PluginError
from octavo.frontend.text.inputs import InputProcessor

if TYPE_CHECKING:
    from octavo.core.registry import Registry
    from octavo.engine.config import EngineConfig
    from octavo.engine.core import EngineCore
    from octavo.engine.resolve import Resolved

ConfigSource = str | os.PathLike[str] | Mapping[str, Any]


def configure(
    model: str | None = None,
    *,
    config: ConfigSource | EngineConfig | None = None,
    plugins: Iterable[Any] = (),
    tokenizer: str | None = None,
    keywords: Mapping[str, Any] | None = None,
) -> tuple[EngineConfig, Registry]:
    """Configuration and plugins. keywords: under vLLM's names, they win over `config`."""
    from octavo.core.registry import Registry
    from octavo.engine.config import EngineConfig
    from octavo.frontend.config import load_config
    from octavo.frontend.vllm.keywords import from_keywords

    if isinstance(plugins, str) or not isinstance(plugins, Iterable):
        raise PluginError(
            f"plugins must be a list of classes, instances, modules or paths, got {plugins!r:.80}"
        )
    if not isinstance(config, str | os.PathLike | Mapping | EngineConfig | None):
        raise ConfigError(
            "config must be the path of a YAML file, a mapping or an EngineConfig, got "
            f"{type(config).__name__}"
        )
    flags = from_keywords(keywords or {})
    if model is not None:
        flags["model.source"] = model
    if tokenizer is not None:
        flags["model.tokenizer"] = tokenizer
    if isinstance(config, EngineConfig):
        config = config.model_dump(exclude_unset=True)
    if isinstance(config, Mapping):
        settings = load_config(mapping=config, flags=flags)
    else:
        settings = load_config(config, flags=flags)
    known = settings.plugins
    registry = Registry.discover(
        load=known.load, disable=known.disable, only=known.only, objects=plugins
    )
    return settings, registry


def make_inputs(resolved: Resolved, tokenizer: Tokenizer) -> InputProcessor:
    """The input processor for a resolved model."""
    from octavo.core.hf_config import text_config

    settings = resolved.config.model
    assert settings.max_model_len is not None, "resolve settles max_model_len"
    use_defaults = settings.generation_config == "auto"
    return InputProcessor(
        tokenizer,
        max_model_len=settings.max_model_len,
        vocab_size=text_config(resolved.model_config).get("vocab_size"),
        seed_source=seed_source(settings.seed),
        generation_config=resolved.generation_config if use_defaults else None,
    )


def build(
    resolved: Resolved,
    registry: Registry,
    progress: Callable[[str], None] | None = None,
    tokenizer: Tokenizer | None = None,
) -> EngineCore:
    """The engine. Imports torch. tokenizer: when it is not the configured one."""
    from octavo.engine.builder import build_engine

    return build_engine(resolved, registry, progress, tokenizer=tokenizer)


def seed_source(seed: int | None) -> Callable[[], int] | None:
    """Seeds for requests that give none: by order of arrival from the engine's seed, or None for
    random ones."""
    if seed is None:
        return None
    from octavo.kernels.random import derive_seed

    arrivals = itertools.count()
    return lambda: derive_seed(seed, next(arrivals))
