"""vLLM's names for settings, and the YAML keys that they set: one table for `LLM(...)` and the
command line.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.core.config.validation import show
from octavo.core.errors import ConfigError, nearest
from octavo.frontend.vllm.differences import check_setting

log = logging.getLogger("octavo.config")

Form = Literal["text", "int", "float", "bool", "mapping", "list"]


@dataclass(frozen=True)
class Keyword:
    """One of vLLM's names."""

    path: str = ""
    """Dotted YAML key; empty where there is none."""
    form: Form = "text"
    """On the command line. `bool` gives `--x` and `--no-x`."""
    convert: Callable[[str, Any], Any] | None = None
    """From (name, vLLM's value) to Octavo's, or to `SKIP`. Raises `ConfigError`."""
    doc: str = ""
    """Help for a name without a key."""
    aliases: tuple[str, ...] = ()
    """Further command-line flags."""


SKIP = object()
"""The key keeps its default."""


# ---- conversions --------------------------------------------------------------------------------


def _dtype(name: str, value: Any) -> Any:
    text = str(value).removeprefix("torch.")
    return {"half": "float16", "float": "float32"}.get(text, text)


def _kv_dtype(name: str, value: Any) -> Any:
    text = str(value).removeprefix("torch.")
    return "fp8" if text == "fp8_e4m3" else text


def _load_format(name: str, value: Any) -> Any:
    return "auto" if value in ("hf", "safetensors") else value


_BACKENDS = {
    "triton_attn": "triton",
    "flex_attention": "flex",
    "torch_sdpa": "torch",
    "cpu_attn": "cpu",
}


def _attention_backend(name: str, value: Any) -> Any:
    text = str(value).lower()
    return _BACKENDS.get(text, text) if isinstance(value, str) else value


def _eager(name: str, value: Any) -> Any:
    return "eager" if value else SKIP


def _generation_config(name: str, value: Any) -> Any:
    return "octavo" if value == "vllm" else value


def _chunk(name: str, value: Any) -> Any:
    return SKIP if value == 0 else value


def _gib(name: str, value: Any) -> Any:
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{name}: expected a size in GiB, at least 0, got {show(value)}")
    return int(value * 2**30)


def _unsupported(name: str, value: Any) -> Any:
    check_setting(name, value)
    return SKIP


def _accepted(name: str, value: Any) -> Any:
    """Octavo always does this; only turning it off deserves a warning."""
    if not value:
        log.warning("%s has no effect in Octavo: %s", name, KEYWORDS[name].doc)
    return SKIP


def _inverted(name: str, value: Any) -> Any:
    return not value


def _api_keys(name: str, value: Any) -> Any:
    keys = [value] if isinstance(value, str) else value
    return {f"key{number}": key for number, key in enumerate(keys, 1)}


def _origins(name: str, value: Any) -> Any:
    """Names, or vLLM's form: one JSON list."""
    items = [value] if isinstance(value, str) else list(value)
    if len(items) == 1 and items[0].lstrip().startswith("["):
        try:
            return json.loads(items[0])
        except ValueError as exc:
            raise ConfigError(f"{name}: expected JSON, got {show(items[0])}: {exc}") from None
    return items


def _ignored(name: str, value: Any) -> Any:
    log.warning("%s has no effect in Octavo: %s", name, KEYWORDS[name].doc)
    return SKIP


def _missing(form: Form, doc: str, *aliases: str) -> Keyword:
    """A setting of `octavo.frontend.vllm.differences`: only "off" is accepted."""
    return Keyword("", form, _unsupported, f"{doc}; not supported.", aliases)


# ---- the table ----------------------------------------------------------------------------------

KEYWORDS: dict[str, Keyword] = {
    "model": Keyword("model.source"),
    "tokenizer": Keyword("model.tokenizer"),
    "revision": Keyword("model.revision"),
    "download_dir": Keyword("model.download_dir"),
    "dtype": Keyword("model.dtype", convert=_dtype),
    "max_model_len": Keyword("model.max_model_len", "int"),
    "quantization": Keyword("model.quantization", aliases=("-q",)),
    "load_format": Keyword("model.weight_source", convert=_load_format),
    "trust_remote_code": Keyword("model.trust_remote_code", "bool"),
    "hf_overrides": Keyword("model.hf_overrides", "mapping"),
    "generation_config": Keyword("model.generation_config", convert=_generation_config),
    "chat_template": Keyword("model.chat_template"),
    "seed": Keyword("model.seed", "int"),
    "max_num_seqs": Keyword("scheduler.max_num_seqs", "int"),
    "max_num_batched_tokens": Keyword("scheduler.max_num_batched_tokens", "int"),
    "enable_chunked_prefill": Keyword("scheduler.chunked_prefill", "bool"),
    "long_prefill_token_threshold": Keyword("scheduler.max_chunk_tokens", "int", _chunk),
    "scheduling_policy": Keyword("scheduler.policy"),
    "block_size": Keyword("kv_cache.block_size", "int"),
    "enable_prefix_caching": Keyword("kv_cache.prefix_caching", "bool"),
    "swap_space": Keyword("preemption.swap_space", "float", _gib),
    "kv_cache_dtype": Keyword("kv_cache.dtype", convert=_kv_dtype),
    "gpu_memory_utilization": Keyword("kv_cache.memory_utilization", "float"),
    "kv_cache_memory_bytes": Keyword("kv_cache.memory_bytes", "int"),
    "num_gpu_blocks_override": Keyword("kv_cache.num_blocks", "int"),
    "attention_backend": Keyword("attention.backend", convert=_attention_backend),
    "enforce_eager": Keyword("graph.runner", "bool", _eager, "No CUDA graphs, no compilation."),
    "device": Keyword("executor.device"),
    "served_model_name": Keyword("server.served_model_name", "list"),
    "host": Keyword("server.host"),
    "port": Keyword("server.port", "int"),
    "uds": Keyword("server.uds"),
    "ssl_certfile": Keyword("server.ssl_certfile"),
    "ssl_keyfile": Keyword("server.ssl_keyfile"),
    "root_path": Keyword("server.root_path"),
    "allowed_origins": Keyword("server.allowed_origins", "list", _origins),
    "api_key": Keyword("server.api_keys", "list", _api_keys),
    "shutdown_timeout": Keyword("server.shutdown_timeout_s", "float"),
    "api_server_count": Keyword("server.api_workers", "int", aliases=("--api-workers", "-asc")),
    "max_num_queued_reqs": Keyword("server.max_queued_requests", "int"),
    "max_num_queued_tokens": Keyword("server.max_queued_tokens", "int"),
    "max_logprobs": Keyword("server.max_logprobs", "int"),
    "stream_interval": Keyword("server.stream_interval", "int"),
    "enable_log_requests": Keyword("observability.log_requests", "bool"),
    "disable_log_requests": Keyword(
        "observability.log_requests", "bool", _inverted, "The opposite of enable_log_requests."
    ),
    "enable_prompt_tokens_details": Keyword(
        "", "bool", _accepted, "Usage always reports cached prompt tokens."
    ),
    "tool_call_parser": Keyword("server.tool_parser"),
    "chat_template_content_format": Keyword("model.chat_template_content_format"),
    "trust_request_chat_template": Keyword("server.trust_request_chat_template", "bool"),
    "reasoning_parser": Keyword("server.reasoning_parser"),
    "enable_auto_tool_choice": Keyword("", "bool", _accepted, "Enabled by server.tool_parser."),
    "tensor_parallel_size": _missing("int", "Devices that share the model", "-tp"),
    "pipeline_parallel_size": _missing("int", "Pipeline stages", "-pp"),
    "data_parallel_size": _missing("int", "Replicas of the model", "-dp"),
    "distributed_executor_backend": _missing("text", "How workers are started"),
    "speculative_config": _missing("mapping", "Speculative decoding"),
    "enable_lora": _missing("bool", "LoRA adapters"),
    "lora_modules": _missing("list", "LoRA adapters"),
    "max_loras": _missing("int", "LoRA adapters per step"),
    "tokenizer_mode": _missing("text", "Tokenizer mode"),
    "cpu_offload_gb": _missing("float", "GiB of weights kept in host memory"),
    "max_seq_len_to_capture": Keyword("", "int", _ignored, "Decided by graph.runner."),
    "disable_log_stats": Keyword("observability.log_stats", "bool", _inverted),
    "disable_custom_all_reduce": Keyword("", "bool", _ignored, "Octavo uses one device."),
}


def from_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Flags for `load_config` (dotted key to value) from vLLM's keyword names. None: not given.

    Raises `ConfigError` for an unknown keyword, and for a feature that is not supported.
    """
    flags: dict[str, Any] = {}
    for name, value in keywords.items():
        if name not in KEYWORDS:
            raise ConfigError(f"unknown keyword '{name}'; {nearest(name, KEYWORDS)}")
        if value is None:
            continue
        keyword = KEYWORDS[name]
        if keyword.convert is not None:
            value = keyword.convert(name, value)
        if value is not SKIP:
            flags[keyword.path] = value
    return flags


_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def integer(text: str) -> int | str:
    """An integer of the command line, with vLLM's suffixes: `4k` is 4000, `4K` 4096. Other text
    (`auto`) is returned as it is, for the configuration to validate."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    if not match:
        return text
    number = float(match[1]) * _SIZES[match[2]]
    return int(number) if number == int(number) else text
