"""vLLM's names: one table for `LLM(...)` and the command line."""

from __future__ import annotations

import argparse
import logging

import pytest
from pydantic import SecretStr

from octavo.core.config import config_model
from octavo.core.config.models import ImplementationConfig
from octavo.core.config.validation import all_keys
from octavo.core.errors import ConfigError
from octavo.engine.config import EngineConfig
from octavo.frontend.config import load_config
from octavo.frontend.vllm.keywords import KEYWORDS, from_keywords, integer
from octavo.server.command_line.config import add_config_arguments, config_from_args

VALUES = {
    "model": ("m", "m"),
    "tokenizer": ("t", "t"),
    "revision": ("main", "main"),
    "download_dir": ("/d", "/d"),
    "dtype": ("half", "float16"),
    "max_model_len": (4096, 4096),
    "quantization": ("int8", ImplementationConfig(name="int8")),
    "load_format": ("dummy", ImplementationConfig(name="dummy")),
    "trust_remote_code": (True, True),
    "hf_overrides": ({"a": {"b": 1}}, {"a": {"b": 1}}),
    "generation_config": ("vllm", "octavo"),
    "chat_template": ("./t.jinja", "./t.jinja"),
    "seed": (7, 7),
    "max_num_seqs": (8, 8),
    "max_num_batched_tokens": (512, 512),
    "enable_chunked_prefill": (False, False),
    "long_prefill_token_threshold": (64, 64),
    "scheduling_policy": ("priority", ImplementationConfig(name="priority")),
    "block_size": (32, 32),
    "enable_prefix_caching": (False, False),
    "swap_space": (2, 2 << 30),
    "kv_cache_dtype": ("fp8_e4m3", "fp8"),
    "gpu_memory_utilization": (0.5, 0.5),
    "kv_cache_memory_bytes": (1 << 20, 1 << 20),
    "num_gpu_blocks_override": (100, 100),
    "attention_backend": ("TRITON_ATTN", ImplementationConfig(name="triton")),
    "enforce_eager": (True, ImplementationConfig(name="eager")),
    "device": ("cpu", "cpu"),
    "served_model_name": (["a", "b"], ["a", "b"]),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": (0, 0),
    "max_logprobs": (5, 5),
    "uds": ("/s", "/s"),
    "tool_call_parser": ("hermes", ImplementationConfig(name="hermes")),
    "reasoning_parser": ("qwen3", ImplementationConfig(name="qwen3")),
    "chat_template_content_format": ("openai", "openai"),
    "trust_request_chat_template": (True, True),
    "stream_interval": (4, 4),
    "enable_log_requests": (True, True),
    "disable_log_requests": (True, False),
    "disable_log_stats": (True, False),
    "ssl_certfile": ("c.pem", "c.pem"),
    "ssl_keyfile": ("k.pem", "k.pem"),
    "root_path": ("/llm", "/llm"),
    "allowed_origins": (["*"], ["*"]),
    "api_key": (["a", "b"], {"key1": SecretStr("a"), "key2": SecretStr("b")}),
    "shutdown_timeout": (5.0, 5.0),
    "api_server_count": (4, 4),
    "max_num_queued_reqs": (64, 64),
    "max_num_queued_tokens": (4096, 4096),
}


def value_at(config: EngineConfig, path: str):
    section, name = path.split(".")
    return getattr(getattr(config, section), name)


def test_the_table_names_keys_that_exist():
    keys = set(all_keys(config_model(EngineConfig)))
    assert {k.path for k in KEYWORDS.values() if k.path} <= keys
    assert set(VALUES) == {name for name, k in KEYWORDS.items() if k.path}
    assert all(k.doc for k in KEYWORDS.values() if not k.path)


@pytest.mark.parametrize("name", VALUES)
def test_keyword(name):
    given, expected = VALUES[name]
    config = load_config(flags=from_keywords({name: given}))
    assert value_at(config, KEYWORDS[name].path) == expected


@pytest.mark.parametrize("name", VALUES)
def test_flag(name):
    import json

    given, expected = VALUES[name]
    flag = f"--{name.replace('_', '-')}"
    if KEYWORDS[name].form == "bool":
        argv = [flag if given else flag.replace("--", "--no-", 1)]
    elif isinstance(given, list):
        argv = [flag, *given]
    else:
        argv = [flag, json.dumps(given) if isinstance(given, dict) else str(given)]
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    config, _ = config_from_args(parser.parse_args(argv))
    assert value_at(config, KEYWORDS[name].path) == expected


@pytest.mark.parametrize(
    ("keywords", "flags"),
    [
        ({"tensor_parallel_size": 1, "cpu_offload_gb": 0, "tokenizer_mode": "auto"}, {}),
        ({"speculative_config": {}, "enable_lora": False, "max_loras": 1, "lora_modules": []}, {}),
        ({"enable_prompt_tokens_details": True}, {}),
        ({"enforce_eager": False, "long_prefill_token_threshold": 0}, {}),
        ({"model": "m", "tokenizer": None}, {"model.source": "m"}),
        ({"dtype": "float"}, {"model.dtype": "float32"}),
        ({"load_format": "safetensors"}, {"model.weight_source": "auto"}),
        ({"attention_backend": "FLASHINFER"}, {"attention.backend": "flashinfer"}),
    ],
)
def test_translation(keywords, flags):
    assert from_keywords(keywords) == flags


def test_a_torch_dtype_by_its_name():
    class Dtype:
        def __str__(self):
            return "torch.bfloat16"

    assert from_keywords({"dtype": Dtype()}) == {"model.dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"max_model_length": 3},
            "unknown keyword 'max_model_length'; did you mean 'max_model_len",
        ),
        (
            {"tensor_parallel_size": 2},
            "tensor_parallel_size: tensor parallelism is not supported yet (got 2)",
        ),
        (
            {"speculative_config": {"method": "ngram"}},
            "speculative_config: speculative decoding is not supported yet (got "
            "{'method': 'ngram'})",
        ),
        ({"enable_lora": True}, "enable_lora: LoRA is not supported yet (got true)"),
        ({"lora_modules": ["a=b"]}, "lora_modules: LoRA is not supported yet (got ['a=b'])"),
        ({"max_loras": 2}, "max_loras: LoRA is not supported yet (got 2)"),
        (
            {"cpu_offload_gb": 4},
            "cpu_offload_gb: CPU offloading of weights is not supported yet (got 4)",
        ),
        (
            {"distributed_executor_backend": "ray"},
            "distributed_executor_backend: distributed execution is not supported yet (got 'ray')",
        ),
    ],
)
def test_refused(keywords, message):
    with pytest.raises(ConfigError) as caught:
        from_keywords(keywords)
    assert str(caught.value).startswith(message)


def test_flags_are_named_in_messages():
    with pytest.raises(ConfigError) as caught:
        load_config(flags={"kv_cache.memory_utilization": 3})
    assert str(caught.value) == (
        "argument gpu_memory_utilization: kv_cache.memory_utilization: expected a number <= 1.0, "
        "got 3"
    )
    with pytest.raises(ConfigError, match=r"^argument: executor\.num_threads: expected"):
        load_config(flags={"executor.num_threads": "x"})


def test_swap_space_is_given_in_gib():
    assert from_keywords({"swap_space": 1.5}) == {"preemption.swap_space": 3 << 29}
    assert from_keywords({"swap_space": 0}) == {"preemption.swap_space": 0}
    with pytest.raises(ConfigError, match=r"swap_space: expected a size in GiB, at least 0"):
        from_keywords({"swap_space": -1})


def test_without_effect(caplog):
    with caplog.at_level(logging.WARNING, logger="octavo.config"):
        assert from_keywords({"max_seq_len_to_capture": 4}) == {}
    assert [r.getMessage() for r in caplog.records] == [
        "max_seq_len_to_capture has no effect in Octavo: Decided by graph.runner."
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("4k", 4000),
        ("4K", 4096),
        ("1.5k", 1500),
        ("2M", 2 << 20),
        ("1.5", "1.5"),
        ("auto", "auto"),
        ("4x", "4x"),
    ],
)
def test_integers_of_the_command_line(text, value):
    assert integer(text) == value


def test_a_vllm_command_line():
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    argv = [
        "org/name",
        "--max-model-len",
        "4k",
        "-tp",
        "1",
        "--enforce-eager",
        "--served-model-name",
        "x",
        "--seed",
        "1",
    ]
    config, _ = config_from_args(parser.parse_args(argv))
    assert config.model.source == "org/name"
    assert config.model.max_model_len == 4000
    assert config.server.served_model_name == ["x"]
    assert config.graph.runner == ImplementationConfig(name="eager")
    with pytest.raises(ConfigError, match="model given twice: 'a' and --model 'b'"):
        config_from_args(parser.parse_args(["a", "--model", "b"]))
