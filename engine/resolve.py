"""From a configuration to what it means here: the only place that settles `auto`.

Reads the model's config.json through the chosen weight source; imports no torch on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.core import envvars
from octavo.core.config.models import AUTO, ImplementationConfig
from octavo.core.config.origin import Path as KeyPath
from octavo.core.config.origin import dotted
from octavo.core.contracts import KINDS, Platform, ProbeContext
from octavo.core.contracts.weight_source import WeightSource, WeightSourceContext
from octavo.core.errors import (
    ConfigError,
    ModelNotFound,
    PluginNotFound,
    PluginUnavailable,
    UnsupportedModel,
)
from octavo.core.hf_config import override
from octavo.core.registry import Registry, Selection
from octavo.core.registry.checks import availability
from octavo.engine import model_facts
from octavo.engine.auto_values import NEEDS_MODEL, auto_values, read_chat_template
from octavo.engine.config import PHASES, EngineConfig
from octavo.engine.device import cpu_threads, detect_platform

LISTS = {
    "logits_processor": "logits_processors",
    "observer": "observers",
    "engine_extension": "extensions",
}
_BY_MODEL = ("weight_source", "tokenizer", "model", "quantization")


@dataclass(frozen=True)
class Machine:
    """The facts of a machine that `auto` depends on."""

    platform: Platform
    platform_reason: str
    """Why this platform was chosen, for the startup report."""
    num_threads: int
    """CPU threads that this process may use."""
    num_threads_reason: str

    @classmethod
    def detect(cls, device: str) -> Machine:
        """This machine. Raises `ConfigError` for a `device` (`executor.device`) it lacks."""
        return cls(*detect_platform(device), *cpu_threads())


@dataclass
class Resolved:
    """A configuration with nothing left to decide but budgets that are measured at start.

    config: with concrete device, dtype, KV dtype, block size, max_model_len, num_threads and names.
    selections: by kind, but for kinds that are lists. prefill_attention: the attention backend for
    prefill when it is another than that of `selections`, which then is for decodes. reasons: dotted
    YAML key to why it is so. model_config: config.json with `hf_overrides`. generation_config: the
    model's, empty when it has none; whether its sampling defaults apply says
    `config.model.generation_config`.
    tokenizer_dir: None when there are no tokenizer files. chat_template: the text that replaces the
    model's own. Without a model (see `resolve`) weight_source is None and the mappings are empty.
    """

    config: EngineConfig
    platform: Platform
    selections: dict[str, Selection] = field(default_factory=dict)
    prefill_attention: Selection | None = None
    logits_processors: list[Selection] = field(default_factory=list)
    observers: list[Selection] = field(default_factory=list)
    extensions: list[Selection] = field(default_factory=list)
    model_config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    weight_source: WeightSource | None = None
    tokenizer_dir: Path | None = None
    chat_template: str | None = None
    reasons: dict[str, str] = field(default_factory=dict)


def resolve(
    config: EngineConfig,
    registry: Registry,
    machine: Machine | None = None,
    *,
    need_model: bool = True,
) -> Resolved:
    """Settle every `auto` for a machine (None: this one), with reasons.

    need_model: whether a configuration without `model.source` is an error; if not, what depends on
    the model stays open and its reason is "needs a model". Raises `ConfigError`, `PluginError`, or
    `ModelError` for a model that is not there or not served.
    """
    envvars.check()
    if need_model and not config.model.source:
        raise ConfigError(
            "no model given; expected a folder, hub id, .gguf file or package:NAME",
            path="model.source",
        )
    machine = machine or Machine.detect(config.executor.device)
    return _Resolver(config, registry, machine).run()


class _Resolver:
    """One resolution. `_facts` grows as decisions are made, and is what probes read."""

    def __init__(self, config: EngineConfig, registry: Registry, machine: Machine) -> None:
        self._given, self._registry = config, registry
        self._out = Resolved(config, machine.platform)
        self._facts: dict[str, Any] = {}
        self._settled: dict[str, Any] = {}
        self._settle("executor.device", machine.platform.device, machine.platform_reason)
        if config.executor.num_threads == "auto":
            self._settle("executor.num_threads", machine.num_threads, machine.num_threads_reason)

    def run(self) -> Resolved:
        has_model = bool(self._given.model.source)
        if has_model:
            self._read_model()
        self._settle_values()
        if has_model:
            self._select_tokenizer()
            self._select_model()
        for kind in self._registry.kinds:
            if kind not in (*self._out.selections, *_BY_MODEL) and self._is_wanted(kind):
                self._select(kind)
                if kind == "attention_backend":
                    self._select_phases()
        for kind in LISTS:
            self._select_list(kind)
        if not has_model:
            for kind in _BY_MODEL:
                if self._choice(KINDS[kind].config_path)[0].name == "auto":
                    self._out.reasons[KINDS[kind].config_path] = NEEDS_MODEL
        self._out.config = _updated(self._given, self._settled)
        return self._out

    # ---- the model --------------------------------------------------------------------------

    def _read_model(self) -> None:
        model = self._given.model
        self._facts |= {"source": model.source, "revision": model.revision}
        try:
            selection = self._select("weight_source")
        except PluginUnavailable as exc:
            raise ModelNotFound(f"model.source: cannot read '{model.source}': {exc}") from exc
        source = self._out.weight_source = self._weight_source(model.source, selection)
        self._out.model_config = override(source.config(), model.hf_overrides)
        self._out.generation_config = source.generation_config()
        config = self._out.model_config
        self._facts |= {
            "config": config,
            "architecture": model_facts.architecture(config),
            "attention_specs": model_facts.attention_specs(config),
            "quantization": model_facts.quantization_method(config),
        }
        self._facts = {key: value for key, value in self._facts.items() if value is not None}
        self._out.chat_template = read_chat_template(model.chat_template)

    def _weight_source(self, source: str, selection: Selection) -> WeightSource:
        model = self._given.model
        own = source == model.source
        context = WeightSourceContext(
            source=source,
            revision=model.revision if own else None,
            download_dir=model.download_dir,
            cache_dir=envvars.CACHE_DIR.get(),
            config_overrides=model.hf_overrides if own else {},
        )
        made: WeightSource = self._registry.create(selection, context)
        return made

    def _select_tokenizer(self) -> None:
        source = self._out.weight_source
        assert source is not None, "the model has been read"
        named = self._given.model.tokenizer
        if named is not None:
            source = self._tokenizer_source(named)
        folder = self._out.tokenizer_dir = source.tokenizer_dir()
        path = "model.tokenizer_backend"
        if folder is None and named is not None:
            raise ModelNotFound(f"model.tokenizer: '{named}' has no tokenizer files")
        if folder is None and self._choice(path)[0].name == "auto":
            self._out.reasons[path] = "the model has no tokenizer files"
            return
        if folder is not None:
            self._facts["tokenizer_dir"] = folder
        self._select("tokenizer")

    def _tokenizer_source(self, source: str) -> WeightSource:
        """The source of `model.tokenizer`, read by whatever fits it."""
        ctx = ProbeContext(self._out.platform, {"source": source})
        try:
            selection = self._registry.select("weight_source", AUTO, ctx)
        except PluginUnavailable as exc:
            raise ModelNotFound(f"model.tokenizer: cannot read '{source}': {exc}") from exc
        return self._weight_source(source, selection)

    def _select_model(self) -> None:
        try:
            self._select("model")
        except PluginUnavailable as exc:
            name = self._facts.get("architecture", "none (config.json has no `architectures`)")
            raise UnsupportedModel(f"architecture {name} is not supported: {exc}") from exc
        self._select_quantization()

    def _select_quantization(self) -> None:
        """`auto` is the checkpoint's own method, else the best way to hold its weights as they
        are."""
        path = KINDS["quantization"].config_path
        choice, _ = self._choice(path)
        method = self._facts.get("quantization")
        if choice.name != "auto" or method is None:
            self._select("quantization")
            return
        try:
            selection = self._select(
                "quantization", ImplementationConfig(name=method, options=choice.options)
            )
        except PluginNotFound as exc:
            raise UnsupportedModel(f"the checkpoint is quantized with '{method}': {exc}") from exc
        why = "the checkpoint's quantization_config"
        self._out.selections["quantization"] = replace(selection, reason=why)
        self._out.reasons[path] = why

    # ---- values -----------------------------------------------------------------------------

    def _settle(self, key: str, value: Any, why: str) -> None:
        self._settled[key] = value
        self._out.reasons[key] = why

    def _settle_values(self) -> None:
        for key, value, reason in auto_values(
            self._given, self._out.model_config, self._out.platform
        ):
            self._out.reasons[key] = reason
            if value is not None:
                self._settled[key] = value
        for fact, key in (
            ("dtype", "model.dtype"),
            ("kv_dtype", "kv_cache.dtype"),
            ("block_size", "kv_cache.block_size"),
        ):
            value = self._settled.get(key, _get(self._given, key))
            if value != "auto":
                self._facts[fact] = value

    # ---- plugins ----------------------------------------------------------------------------

    def _choice(self, path: str) -> tuple[Any, bool]:
        """The choice at a key (None where a kind may be left out, and is), and whether the
        configuration gives it."""
        section_name, _, name = path.partition(".")
        section = getattr(self._given, section_name)
        return getattr(section, name), name in section.model_fields_set

    def _is_wanted(self, kind: str) -> bool:
        """Whether one implementation of the kind is to be selected. Lists are not: the core's have
        their own method, and those of others (`routes`) are theirs."""
        path = self._registry.kinds[kind].config_path
        section, _, name = path.partition(".")
        if not name or section not in type(self._given).model_fields:
            return False
        if self._choice(path)[0] is None and not self._registry.preferred(kind):
            self._out.reasons[path] = "not configured"
            return False
        return True

    def _select(self, kind: str, choice: ImplementationConfig | None = None) -> Selection:
        path = self._registry.kinds[kind].config_path
        given, explicit = self._choice(path)
        given, explicit = (AUTO, False) if given is None else (given, explicit)
        selection = self._registry.select(
            kind,
            choice or given,
            ProbeContext(self._out.platform, dict(self._facts)),
            explicit=explicit or choice is not None,
            origin=self._given.origin,
        )
        self._out.selections[kind] = selection
        self._out.reasons[path] = selection.reason
        self._settled[path] = ImplementationConfig(
            name=selection.name, options=(choice or given).options
        )
        self._facts["chosen"] = {**self._facts.get("chosen", {}), kind: selection.name}
        return selection

    def _select_phases(self) -> None:
        """Attention backends of the phases that have one of their own."""
        common = self._out.selections["attention_backend"]
        chosen = dict.fromkeys(PHASES, common)
        for phase in PHASES:
            given: ImplementationConfig | None = getattr(self._given.attention, phase)
            if given is not None:
                path = ("attention", phase)
                selection = chosen[phase] = self._registry.select(
                    "attention_backend",
                    given,
                    ProbeContext(self._out.platform, dict(self._facts)),
                    path=path,
                    origin=self._given.origin,
                )
                settled = ImplementationConfig(name=selection.name, options=given.options)
                self._settle(dotted(path), settled, selection.reason)
        prefill, decode = (chosen[phase] for phase in PHASES)
        self._out.selections["attention_backend"] = decode
        name = decode.name
        if (prefill.name, prefill.options) != (decode.name, decode.options):
            self._out.prefill_attention = prefill
            name = f"{prefill.name} for prefill, {decode.name} for decode"
        self._facts["chosen"] = {**self._facts["chosen"], "attention_backend": name}

    def _standing(self, kind: str, named: set[str]) -> list[ImplementationConfig]:
        """Implementations of a list kind that are in use without being named."""
        ctx = ProbeContext(self._out.platform, self._facts)
        entries = [
            entry
            for name, entry in self._registry.providers(kind).items()
            if entry.provider.rank > 0 and name not in named and availability(entry, ctx)
        ]
        entries.sort(key=lambda entry: (-entry.provider.rank, entry.name))
        return [ImplementationConfig(name=entry.name) for entry in entries]

    def _select_list(self, kind: str) -> None:
        """Those that every engine has (available, rank > 0, highest first), then those that are
        named, in order, then those that the user handed over."""
        key = LISTS[kind]
        given_choices: list[ImplementationConfig] = list(getattr(self._given, key))
        named = {choice.name for choice in given_choices}
        standing = self._standing(kind, named)
        named |= {choice.name for choice in standing}
        handed_over = [e for e in self._registry.preferred(kind) if e.name not in named]
        places: list[tuple[ImplementationConfig, KeyPath]] = [
            (choice, (key,)) for choice in standing
        ]
        places += [(choice, (key, index)) for index, choice in enumerate(given_choices)]
        places += [(ImplementationConfig(name=entry.name), (key,)) for entry in handed_over]
        chosen: list[Selection] = getattr(self._out, key)
        for choice, path in places:
            selection = self._registry.select(
                kind,
                choice,
                ProbeContext(self._out.platform, self._facts),
                path=path,
                origin=self._given.origin,
            )
            why = selection.reason
            if selection.registered.source.preferred:
                why = f"given by the user ({selection.registered.where})"
            elif choice in standing:
                why = "always on"
            self._out.reasons[dotted((key, len(chosen)))] = why
            chosen.append(replace(selection, reason=why))
        choices = [choice for choice, _ in places]
        self._settled[key] = choices


def _get(config: EngineConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _updated(config: EngineConfig, settled: Mapping[str, Any]) -> EngineConfig:
    """A copy with values replaced at dotted keys."""
    sections: dict[str, dict[str, Any]] = {}
    top: dict[str, Any] = {}
    for key, value in settled.items():
        section, dot, name = key.partition(".")
        if dot:
            sections.setdefault(section, {})[name] = value
        else:
            top[key] = value
    for section, values in sections.items():
        top[section] = getattr(config, section).model_copy(update=values)
    return config.model_copy(update=top)
