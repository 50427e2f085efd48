"""What `auto` and absent values of the configuration stand for, with reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from octavo.core.contracts import Platform
from octavo.core.errors import ConfigError
from octavo.engine import model_facts
from octavo.engine.config import EngineConfig

NEEDS_MODEL = "needs a model"


class AutoValue(NamedTuple):
    key: str
    """Dotted YAML key."""
    value: Any
    """None: not known without a model."""
    reason: str


def auto_values(
    config: EngineConfig, model_config: Mapping[str, Any], platform: Platform
) -> Iterator[AutoValue]:
    """Values of the keys that `config` leaves open.

    model_config: config.json; empty without a model. Raises `ConfigError` for a length that the
    model or a step's budget does not allow.
    """
    dtype: str | None = config.model.dtype
    if dtype == "auto":
        dtype, reason = _dtype(model_config, platform)
        yield AutoValue("model.dtype", dtype, reason)
    if config.kv_cache.dtype == "auto":
        yield AutoValue("kv_cache.dtype", dtype, "same as model.dtype" if dtype else NEEDS_MODEL)
    if config.kv_cache.block_size == "auto":
        yield AutoValue("kv_cache.block_size", 16, "the default")
    outputs = config.structured_outputs
    if outputs.preload == "auto":
        named = outputs.engine.name not in ("auto", "none")
        reason = f"structured_outputs.engine is {'set' if named else 'not set'}"
        yield AutoValue("structured_outputs.preload", named, reason)
    if model_config:
        yield from _length(config, model_config)
    elif config.model.max_model_len is None:
        yield AutoValue("model.max_model_len", None, NEEDS_MODEL)


def _dtype(model_config: Mapping[str, Any], platform: Platform) -> tuple[str | None, str]:
    if platform.device == "cpu":
        return "float32", "the default on a CPU"
    if not model_config:
        return None, NEEDS_MODEL
    own = model_facts.checkpoint_dtype(model_config)
    reason = "the checkpoint's" if own else "config.json does not specify one"
    own = own or "bfloat16"
    if own == "bfloat16" and platform.capability is not None and platform.capability < (8, 0):
        return "float16", f"this device lacks bfloat16 ({reason})"
    return own, reason


def _length(config: EngineConfig, model_config: Mapping[str, Any]) -> Iterator[AutoValue]:
    key, wanted = "model.max_model_len", config.model.max_model_len
    known = model_facts.model_length(model_config)
    if wanted is None:
        if known is None:
            raise ConfigError("required: config.json does not specify a context length", path=key)
        yield AutoValue(key, known[0], f"the model's {known[1]}")
    elif known is not None and wanted > known[0]:
        file, line = config.origin.where(("model", "max_model_len"))
        raise ConfigError(
            f"expected at most {known[0]}, the model's limit ({known[1]}), got {wanted}; to go "
            "beyond it, override the model's own value with model.hf_overrides",
            path=key,
            file=file,
            line=line,
        )
    budget = config.scheduler.max_num_batched_tokens
    length = wanted or (known[0] if known else 0)
    if not config.scheduler.chunked_prefill and budget != "auto" and budget < length:
        raise ConfigError(
            f"without chunked_prefill a prompt must fit into one step: expected at least {key} = "
            f"{length}, got {budget}",
            path="scheduler.max_num_batched_tokens",
        )


def read_chat_template(given: str | None) -> str | None:
    """`model.chat_template`: a text that is a template, or the path of a file."""
    if given is None or "{" in given or "\n" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"expected a template or a readable file, got '{given}': {exc}",
            path="model.chat_template",
        ) from None
