"""What `auto` becomes, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.backends.cpu import build
from octavo.core.config import ImplementationConfig
from octavo.core.contracts import Availability, Platform, Provider
from octavo.core.contracts.observer import Observer
from octavo.core.contracts.quantization import QuantizationMethod
from octavo.core.contracts.weight_source import WeightSource
from octavo.core.errors import (
    ConfigError,
    ModelNotFound,
    PluginNotFound,
    PluginOptionsError,
    PluginUnavailable,
    UnsupportedModel,
)
from octavo.core.registry import Registry
from octavo.engine import model_facts
from octavo.engine.choices import check_choices
from octavo.engine.resolve import Machine, resolve
from octavo.frontend.config import load_config
from octavo.server.command_line.config_yaml import config_yaml

CPU = Machine(Platform("cpu"), "a test", 2, "a test")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}


class Models(WeightSource):
    """Configurations by source name, instead of files."""

    known: dict[str, dict] = {}
    folders: dict[str, Path] = {}

    def __init__(self, context):
        self.source = context.source
        self.overrides = context.config_overrides

    def config(self):
        return self.known[self.source]

    def generation_config(self):
        return {"temperature": 0.5}

    def tokenizer_dir(self):
        return self.folders.get(self.source)

    def tensors(self):
        return iter(())


def settle(config=LLAMA, *, objects=(), overrides=(), folders=None, platform=None, **flags):
    """Resolve a configuration for a model whose config.json is `config`."""
    source = type(
        "Source", (Models,), {"known": {"m": config, "other": {}}, "folders": folders or {}}
    )
    provider = Provider(
        name="test_source",
        factory=lambda options, context: source(context),
        probe=lambda ctx: Availability(ctx.facts.get("source") in ("m", "other"), ""),
    )
    registry = Registry.discover(objects=[("weight_source", provider), *objects])
    flags = {"model.source": "m", **{key.replace("__", "."): v for key, v in flags.items()}}
    machine = CPU if platform is None else replace(CPU, platform=platform)
    return resolve(load_config(overrides=overrides, flags=flags), registry, machine)


# ---- numbers ------------------------------------------------------------------------------------


def test_on_a_cpu():
    resolved = settle(executor__device="cpu")
    config = resolved.config
    assert (config.executor.device, resolved.platform) == ("cpu", Platform("cpu"))
    assert (config.model.dtype, config.kv_cache.dtype) == ("float32", "float32")
    assert config.kv_cache.block_size == 16
    assert config.model.max_model_len == 512
    assert config.executor.num_threads == CPU.num_threads
    assert config.scheduler.max_num_batched_tokens == "auto"
    assert resolved.reasons["model.dtype"] == "the default on a CPU"
    assert resolved.reasons["model.max_model_len"] == "the model's max_position_embeddings"
    assert resolved.generation_config == {"temperature": 0.5}
    assert isinstance(resolved.weight_source, Models)
    assert resolved.weight_source.overrides == {}


def test_a_weight_source_gets_the_overrides_of_the_configuration():
    resolved = settle(executor__device="cpu", model__hf_overrides={"num_hidden_layers": 1})
    assert resolved.model_config["num_hidden_layers"] == 1
    assert isinstance(resolved.weight_source, Models)
    assert resolved.weight_source.overrides == {"num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("own", "capability", "dtype", "why"),
    [
        ("bfloat16", (9, 0), "bfloat16", "the checkpoint's"),
        ("bfloat16", (7, 5), "float16", "this device lacks bfloat16 (the checkpoint's)"),
        ("float32", (9, 0), "float32", "the checkpoint's"),
        (None, (9, 0), "bfloat16", "config.json does not specify one"),
    ],
)
def test_dtype_on_a_gpu(own, capability, dtype, why):
    resolved = settle({**LLAMA, "dtype": own}, platform=Platform("cuda", capability))
    assert resolved.config.model.dtype == dtype
    assert resolved.config.kv_cache.dtype == dtype
    assert resolved.reasons["model.dtype"] == why


def test_what_is_given_stays():
    resolved = settle(
        model__dtype="float16",
        model__max_model_len=100,
        kv_cache__block_size=8,
        executor__num_threads=3,
    )
    config = resolved.config
    assert (config.model.dtype, config.kv_cache.dtype) == ("float16", "float16")
    assert (config.model.max_model_len, config.kv_cache.block_size) == (100, 8)
    assert config.executor.num_threads == 3
    assert "model.dtype" not in resolved.reasons


def test_longer_than_the_model():
    with pytest.raises(ConfigError) as caught:
        settle(model__max_model_len=513)
    assert str(caught.value) == (
        "argument max_model_len: model.max_model_len: expected at most 512, the model's limit "
        "(max_position_embeddings), got 513; to go beyond it, override the model's own value with "
        "model.hf_overrides"
    )
    overrides = ["model.hf_overrides={max_position_embeddings: 1024}"]
    resolved = settle(model__max_model_len=1000, overrides=overrides)
    assert resolved.config.model.max_model_len == 1000
    assert resolved.model_config["max_position_embeddings"] == 1024


def test_length_that_nobody_knows():
    short = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    with pytest.raises(ConfigError, match=r"model\.max_model_len: required: config.json does not"):
        settle(short)
    assert settle(short, model__max_model_len=64).config.model.max_model_len == 64


@pytest.mark.parametrize(
    ("extra", "length"),
    [
        ({}, 512),
        ({"rope_scaling": None}, 512),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 1024),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 512),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, 512),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                }
            },
            2048,
        ),
        (
            {
                "max_position_embeddings": 4096,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": 512,
                },
            },
            4096,
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 2},
                    "sliding_attention": {"rope_type": "default"},
                }
            },
            1024,
        ),
        ({"n_positions": 100}, 100),
        ({"text_config": {"max_position_embeddings": 64}}, 64),
    ],
)
def test_model_length(extra, length):
    assert model_facts.model_length({**LLAMA, **extra})[0] == length


def test_a_prompt_must_fit_without_chunks():
    with pytest.raises(ConfigError) as caught:
        settle(scheduler__chunked_prefill=False, scheduler__max_num_batched_tokens=256)
    assert str(caught.value) == (
        "scheduler.max_num_batched_tokens: without chunked_prefill a prompt must fit into one "
        "step: expected at least model.max_model_len = 512, got 256"
    )


# ---- facts --------------------------------------------------------------------------------------


def test_attention_specs():
    (spec,) = model_facts.attention_specs(LLAMA)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.window) == (4, 2, 16, None)
    assert spec.scale == 16**-0.5
    windowed = {**LLAMA, "sliding_window": 8, "attn_logit_softcapping": 50.0, "head_dim": 32}
    (spec,) = model_facts.attention_specs(windowed)
    assert (spec.window, spec.soft_cap, spec.head_size) == (8, 50.0, 32)
    mixed = {**windowed, "layer_types": ["full_attention", "sliding_attention"] * 2}
    assert [s.window for s in model_facts.attention_specs(mixed)] == [None, 8]
    (spec,) = model_facts.attention_specs({**windowed, "use_sliding_window": False})
    assert spec.window is None
    assert model_facts.attention_specs({**LLAMA, "kv_lora_rank": 512}) is None
    assert model_facts.attention_specs({}) is None


def test_probes_get_the_facts():
    seen = {}

    def probe(ctx):
        seen.update(ctx.facts)
        return Availability(False, "only looking")

    pair = ("sampler", Provider(name="spy", factory="x:Y", probe=probe, rank=99))
    settle(objects=[pair], kv_cache__block_size=32)
    assert seen["source"] == "m"
    assert seen["architecture"] == "LlamaForCausalLM"
    assert (seen["dtype"], seen["kv_dtype"], seen["block_size"]) == ("float32", "float32", 32)
    assert seen["config"]["hidden_size"] == 64
    assert seen["attention_specs"][0].head_size == 16
    assert "quantization" not in seen
    assert None not in seen.values()


# ---- the model ----------------------------------------------------------------------------------


def test_no_model():
    config, registry = load_config(), Registry.discover()
    with pytest.raises(ConfigError, match=r"^model\.source: no model given; expected a folder"):
        resolve(config, registry, CPU)
    resolved = resolve(config, registry, CPU, need_model=False)
    assert resolved.reasons["model.max_model_len"] == "needs a model"
    assert resolved.reasons["model.implementation"] == "needs a model"
    assert resolved.weight_source is None
    assert resolved.config.model.dtype == "float32"
    assert "model" not in resolved.selections
    assert resolved.selections["scheduler_policy"].name == "fcfs"


def test_a_source_that_nothing_reads(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no[_ ]such"):
        settle(model__source=str(tmp_path / "no_such"))


def test_an_architecture_that_nothing_serves():
    with pytest.raises(
        UnsupportedModel, match=r"^architecture NovelForCausalLM is not supported: model\.implement"
    ):
        settle({**LLAMA, "architectures": ["NovelForCausalLM"]})
    with pytest.raises(UnsupportedModel, match=r"^architecture none \(config\.json has no `arch"):
        settle({key: value for key, value in LLAMA.items() if key != "architectures"})


def test_quantization_of_the_checkpoint(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    build.toolchain.cache_clear()
    resolved = settle()
    build.toolchain.cache_clear()
    assert resolved.selections["quantization"].name == "none"
    assert "the checkpoint is not quantized" in resolved.reasons["model.quantization"]
    assert (
        "`no-such-compiler` is not in PATH"
        in dict(resolved.selections["quantization"].rejected)["packed"]
    )
    config = {**LLAMA, "quantization_config": {"quant_method": "new-way"}}
    with pytest.raises(UnsupportedModel, match=r"the checkpoint is quantized with 'new_way': .*"):
        settle(config)

    class NewWay(QuantizationMethod):
        def linear(self, prefix, in_features, out_features, bias):
            raise RuntimeError("not made in this test")

    resolved = settle(config, objects=[NewWay])
    assert resolved.selections["quantization"].name == "new_way"
    assert resolved.reasons["model.quantization"] == "the checkpoint's quantization_config"
    with pytest.raises(PluginUnavailable, match="quantization 'none' cannot be used here"):
        settle(config, model__quantization="none")


def test_tokenizer_of_its_own(tmp_path):
    resolved = settle()
    assert resolved.tokenizer_dir is None
    assert "tokenizer" not in resolved.selections
    assert resolved.reasons["model.tokenizer_backend"] == ("the model has no tokenizer files")
    (tmp_path / "tokenizer.json").write_text("{}")
    folders = {"other": tmp_path}
    resolved = settle(folders=folders, model__tokenizer="other")
    assert resolved.tokenizer_dir == tmp_path
    assert resolved.selections["tokenizer"].name == "fast"
    assert resolved.weight_source.source == "m"
    with pytest.raises(ModelNotFound, match=r"^model\.tokenizer: 'other' has no tokenizer files"):
        settle(model__tokenizer="other")
    with pytest.raises(ModelNotFound, match="nothing_there"):
        settle(model__tokenizer=str(tmp_path / "nothing_there"))


def test_chat_template(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    assert settle(model__chat_template=str(file)).chat_template == "{{ messages }}"
    assert settle(model__chat_template="{{ x }}").chat_template == "{{ x }}"
    assert settle().chat_template is None
    with pytest.raises(
        ConfigError, match=r"model\.chat_template: expected a template or a readabl"
    ):
        settle(model__chat_template=str(tmp_path / "none.jinja"))


# ---- plugins ------------------------------------------------------------------------------------


class Watcher(Observer):
    """Sees nothing."""

    def __init__(self, options, context):
        pass


def test_lists_end_with_what_the_user_handed_over():
    named = ("observer", Provider(name="log", factory=lambda o, c: Observer()))
    resolved = settle(objects=[Watcher, named], overrides=["observers=[log]"])
    assert [s.name for s in resolved.observers] == ["log", "watcher"]
    assert resolved.config.observers == [
        ImplementationConfig(name="log"),
        ImplementationConfig(name="watcher"),
    ]
    assert resolved.reasons["observers[1]"].startswith("given by the user (class ")
    assert settle().observers == []


def test_a_list_item_that_is_unknown():
    with pytest.raises(PluginNotFound, match=r"^--set: observers\[1\]: there is no observer 'lgo'"):
        settle(objects=[Watcher], overrides=["observers=[watcher, lgo]"])


def test_an_object_goes_before_a_default_but_not_before_a_name():
    from octavo.plugins.scheduler_policies.fcfs import FcfsPolicy

    class Mine(FcfsPolicy):
        """Another order."""

    resolved = settle(objects=[Mine])
    assert resolved.selections["scheduler_policy"].name == "mine"
    assert resolved.config.scheduler.policy == ImplementationConfig(name="mine")
    resolved = settle(objects=[Mine], scheduler__policy="fcfs")
    assert resolved.selections["scheduler_policy"].name == "fcfs"


def test_check_choices(tmp_path):
    registry = Registry.discover()
    check_choices(load_config(), registry)
    check_choices(load_config(overrides=["attention.backend=torch", "model.source=x"]), registry)
    with pytest.raises(PluginNotFound, match=r"attention\.backend: there is no attention_backend"):
        check_choices(load_config(overrides=["attention.backend=torhc"]), registry)
    file = tmp_path / "engine.yaml"
    file.write_text("scheduler:\n  policy:\n    name: fcfs\n    weights: {gold: 3}\n")
    with pytest.raises(PluginOptionsError) as caught:
        check_choices(load_config(file), registry)
    assert str(caught.value) == (
        f"{file}:4: scheduler.policy.weights: unknown option; there are none "
        "[options of scheduler_policy 'fcfs']"
    )
    for value, message in (("true", "a number, got true"), ("'3'", "a number, got '3'")):
        config = load_config(overrides=[f"scheduler.policy={{name: priority, ageing_s: {value}}}"])
        with pytest.raises(PluginOptionsError, match=f"ageing_s: expected {message}"):
            check_choices(config, registry)


def test_a_policy_without_classes_stands_last(tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text("scheduler:\n  max_num_seqs: 3\n  policy: [priority, sjf, fcfs]\n")
    with pytest.raises(ConfigError, match=r"engine\.yaml:3: scheduler\.policy: 'sjf' orders") as e:
        resolve(load_config(file), Registry.discover(), CPU, need_model=False)
    assert e.value.line == 3
    file.write_text("scheduler: {policy: [priority, fair, fcfs]}\n")
    check_choices(load_config(file), Registry.discover())


# ---- shown --------------------------------------------------------------------------------------


def test_shown_yaml_loads_to_the_same(tmp_path):
    resolved = settle(overrides=["model.hf_overrides={a: {b: [1, 2]}}", "server.host='::'"])
    text = config_yaml(resolved)
    (tmp_path / "shown.yaml").write_text(text)
    assert load_config(tmp_path / "shown.yaml") == resolved.config
    assert "  dtype: float32  # the default on a CPU\n" in text
    assert "  max_model_len: 512  # the model's max_position_embeddings\n" in text
    assert "  policy: fcfs  # the default\n" in text
    assert "  # not dummy: only when named\n" in text
