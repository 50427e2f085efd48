"""Configuration files in vLLM's form: flag names with their values."""

from __future__ import annotations

import textwrap

import pytest
from pydantic import SecretStr

from octavo.core.config.models import ImplementationConfig
from octavo.core.errors import ConfigError
from octavo.frontend.config import load_config
from octavo.frontend.vllm.keywords import KEYWORDS
from octavo.server.command_line import main as cli


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(text, **more):
        (tmp_path / "vllm.yaml").write_text(textwrap.dedent(text))
        return load_config("vllm.yaml", **more)

    return load


def test_a_whole_file(load):
    config = load(
        """
        model: org/name
        served-model-name: [small, alias]
        max_model_len: 4k            # as on the command line
        gpu-memory-utilization: 0.5
        no-enable-prefix-caching: true
        enable-chunked-prefill: false
        trust-remote-code: false
        enforce-eager: true
        tensor-parallel-size: 1
        enable-lora: false
        hf-overrides: {a: {b: 1}}
        allowed-origins: ["*"]
        api-key: secret
        api-workers: 2
        swap-space:
        seed: 7
        """
    )
    assert config.model.source == "org/name"
    assert config.server.served_model_name == ["small", "alias"]
    assert config.model.max_model_len == 4000
    assert config.kv_cache.memory_utilization == 0.5
    assert config.kv_cache.prefix_caching is False
    assert config.scheduler.chunked_prefill is False
    assert config.model.trust_remote_code is False
    assert config.graph.runner == ImplementationConfig(name="eager")
    assert config.model.hf_overrides == {"a": {"b": 1}}
    assert config.server.allowed_origins == ["*"]
    assert config.server.api_keys == {"key1": SecretStr("secret")}
    assert config.server.api_workers == 2
    assert config.preemption.swap_space is None
    assert config.model.seed == 7


@pytest.mark.parametrize("written", ['{"a": 1}', "{a: 1}"])
def test_mappings_are_json_or_yaml(load, written):
    assert load(f"hf_overrides: '{written}'" if '"' in written else f"hf_overrides: {written}")


def test_flags_win_over_the_file(load):
    config = load("max-num-seqs: 4\nseed: 1\n", flags={"scheduler.max_num_seqs": 8})
    assert (config.scheduler.max_num_seqs, config.model.seed) == (8, 1)


def test_sections_stay_sections(load):
    assert load("model: {source: a}\nobservers: []\n").model.source == "a"
    assert load("model: a\n").model.source == "a"
    assert load("").model.source == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: m\nmax-modle-len: 5\n",
            "vllm.yaml:2: unknown flag 'max-modle-len'; did you mean 'max-model-len'?",
        ),
        (
            "max-modle-len: 5\n",
            "vllm.yaml:1: unknown flag 'max-modle-len'; did you mean 'max-model-len'?",
        ),
        ("model: m\nfrobnicate: 5\n", "vllm.yaml:2: unknown flag 'frobnicate'"),
        (
            "scheduler: {max_num_seqs: 4}\nmax-model-len: 5\n",
            "vllm.yaml:2: max-model-len: flag next to section 'scheduler': use only flags or only "
            "sections; did you mean 'model.max_model_len'?",
        ),
        (
            "seed: 1\ntensor-parallel-size: 2\n",
            "vllm.yaml:2: tensor_parallel_size: tensor parallelism is not supported yet (got 2)",
        ),
        (
            "seed: 1\nspeculative-config: {method: ngram}\n",
            "vllm.yaml:2: speculative_config: speculative decoding is not supported yet (got "
            "{'method': 'ngram'})",
        ),
        (
            "enable-prefix-caching: 1\n",
            "vllm.yaml:1: enable-prefix-caching: expected true or false, got 1",
        ),
        ("hf-overrides: text\n", "vllm.yaml:1: hf-overrides: expected a mapping, got 'text'"),
        (
            "seed: 1\nmax-num-seqs: many\n",
            "vllm.yaml:2: scheduler.max_num_seqs: expected an integer, got 'many'",
        ),
        (
            "graph: {runner: eager}\nblock_size: 3\n",
            "vllm.yaml:2: block_size: flag next to section 'graph': use only flags or only "
            "sections; did you mean 'kv_cache.block_size'?",
        ),
        ("schedular: {policy: fcfs}\n", "vllm.yaml:1: schedular: unknown key; did you mean "),
    ],
)
def test_mistakes(load, text, message):
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert str(caught.value).startswith(message)


def test_values_in_quotes_are_read_as_on_the_command_line(load):
    config = load("max-num-seqs: '4k'\ngpu-memory-utilization: '0.5'\n")
    assert config.scheduler.max_num_seqs == 4000
    assert config.kv_cache.memory_utilization == 0.5


def test_every_error_of_a_file(load):
    errors = []
    config = load("a-b: 1\nmax-num-seqs: many\nseed: 3\nwhatever: 2\n", errors=errors)
    assert [str(error) for error in errors] == [
        "vllm.yaml:1: unknown flag 'a-b'",
        "vllm.yaml:4: unknown flag 'whatever'",
        "vllm.yaml:2: scheduler.max_num_seqs: expected an integer, got 'many'",
    ]
    assert config.model.seed == 3


@pytest.mark.parametrize("name", [n for n, k in KEYWORDS.items() if k.form == "bool" and k.path])
@pytest.mark.parametrize("value", ["true", "false"])
def test_true_or_false_flags(load, name, value):
    negated = "false" if value == "true" else "true"
    plain = load(f"{name}: {value}")
    dashed = load(f"no-{name.replace('_', '-')}: {negated}")
    assert plain == dashed


def test_the_command_line_takes_it(load, capsys, tmp_path):
    load("model: org/name\nmax-num-seqs: 4\n")
    assert cli.main(["config", "show", "--given", "--config", "vllm.yaml", "--seed", "1"]) == 0
    assert capsys.readouterr().out == (
        "model:\n  source: org/name\n  seed: 1\nscheduler:\n  max_num_seqs: 4\n"
    )
