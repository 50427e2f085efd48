"""From a configuration to what it means here: the only place that settles `auto`.

Reads the model's config.json through the chosen weight source; imports no torch on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.core import envvars
from octavo.core.availability import availability
from octavo.core.config import model_facts
from octavo.core.config.models import AUTO, PHASES, Choice, EngineConfig
from octavo.core.config.origin import Path as KeyPath
from octavo.core.config.origin import dotted
from octavo.core.contracts import KINDS, Platform, ProbeContext
from octavo.core.contracts.weight_source import WeightSource, WeightSourceContext
from octavo.core.errors import (
    ConfigError,
    ModelNotFound,
    OctavoError,
    PluginError,
    PluginNotFound,
    PluginUnavailable,
    UnsupportedModel,
)
from octavo.core.registry import Registry, Selection
from octavo.engine.device import cpu_threads, detect_platform

NEEDS_MODEL = "needs a model"
LISTS = {
    "logits_processor": "logits_processors",
    "observer": "observers",
    "engine_extension": "extensions",
}
FRONT_END = ("route",)
"""Kinds of parts that the front end makes for itself."""
_BY_MODEL = ("weight_source", "tokenizer", "model", "quantization")


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


def resolve(config: EngineConfig, registry: Registry, *, need_model: bool = True) -> Resolved:
    """Settle every `auto`, with reasons.

    need_model: whether a configuration without `model.source` is an error; if not, what depends on
    the model stays open and its reason is "needs a model". Raises `ConfigError`, `PluginError`, or
    `ModelError` for a model that is not there or not served.
    """
    envvars.check()
    if need_model and not config.model.source:
        raise ConfigError(
            "no model is given; expected a folder, hub id, .gguf file or package:NAME",
            path="model.source",
        )
    return _Resolver(config, registry).run()


def check_choices(config: EngineConfig, registry: Registry) -> None:
    """Raise for an implementation that is named and unknown, or whose options do not validate.
    Whether it can be used here is not asked."""
    for error in choice_errors(config, registry):
        raise error


def choice_errors(config: EngineConfig, registry: Registry) -> Iterator[OctavoError]:
    """Every choice that `check_choices` raises for."""
    for kind in KINDS.values():
        section, _, name = kind.config_path.partition(".")
        value = getattr(config, section)
        choices: list[tuple[KeyPath, Choice]] = []
        if not name:
            choices = [((section, index), choice) for index, choice in enumerate(value)]
        elif name in value.model_fields_set and getattr(value, name) is not None:
            choices = [((section, name), getattr(value, name))]
        if section == "attention":
            phases = ((("attention", phase), getattr(value, phase)) for phase in PHASES)
            choices += [(path, choice) for path, choice in phases if choice is not None]
        for path, choice in choices:
            try:
                registry.check(kind.name, choice, path=path, origin=config.origin)
            except (ConfigError, PluginError) as error:
                yield error


class _Resolver:
    """One resolution. `_facts` grows as decisions are made, and is what probes read."""

    def __init__(self, config: EngineConfig, registry: Registry) -> None:
        self._given, self._registry = config, registry
        platform, why = detect_platform(config.executor.device)
        self._out = Resolved(config, platform, reasons={"executor.device": why})
        self._facts: dict[str, Any] = {}
        self._settled: dict[str, Any] = {"executor.device": platform.device}

    def run(self) -> Resolved:
        self._settle_threads()
        has_model = bool(self._given.model.source)
        if has_model:
            self._read_model()
        self._settle_numbers()
        if has_model:
            self._select_tokenizer()
            self._select_model()
        for kind in KINDS:
            if kind in self._out.selections or kind in (*LISTS, *FRONT_END, *_BY_MODEL):
                continue
            if not self._is_left_out(kind):
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
            raise ModelNotFound(f"model.source: nothing can read '{model.source}': {exc}") from exc
        source = self._out.weight_source = self._weight_source(model.source, selection)
        self._out.model_config = model_facts.override(source.config(), model.hf_overrides)
        self._out.generation_config = source.generation_config()
        config = self._out.model_config
        self._facts |= {
            "config": config,
            "architecture": model_facts.architecture(config),
            "attention_specs": model_facts.attention_specs(config),
            "quantization": model_facts.quantization_method(config),
        }
        self._facts = {key: value for key, value in self._facts.items() if value is not None}
        self._out.chat_template = _chat_template(model.chat_template)

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
            self._out.reasons[path] = "the model comes without tokenizer files"
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
            raise ModelNotFound(f"model.tokenizer: nothing can read '{source}': {exc}") from exc
        return self._weight_source(source, selection)

    def _select_model(self) -> None:
        try:
            self._select("model")
        except PluginUnavailable as exc:
            name = self._facts.get("architecture", "none (config.json has no `architectures`)")
            raise UnsupportedModel(f"architecture {name} is not served: {exc}") from exc
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
            selection = self._select("quantization", Choice(name=method, options=choice.options))
        except PluginNotFound as exc:
            raise UnsupportedModel(f"the checkpoint is quantized with '{method}': {exc}") from exc
        why = "the checkpoint's quantization_config"
        self._out.selections["quantization"] = replace(selection, reason=why)
        self._out.reasons[path] = why

    # ---- numbers ----------------------------------------------------------------------------

    def _settle(self, key: str, value: Any, why: str) -> None:
        self._settled[key] = value
        self._out.reasons[key] = why

    def _settle_threads(self) -> None:
        if self._given.executor.num_threads == "auto":
            self._settle("executor.num_threads", *cpu_threads())

    def _settle_numbers(self) -> None:
        config, kv = self._given, self._given.kv_cache
        dtype: str = config.model.dtype
        if dtype == "auto":
            settled = self._auto_dtype()
            if settled is None:
                self._out.reasons["model.dtype"] = NEEDS_MODEL
            else:
                dtype = settled[0]
                self._settle("model.dtype", *settled)
        if kv.dtype == "auto":
            if dtype == "auto":
                self._out.reasons["kv_cache.dtype"] = NEEDS_MODEL
            else:
                self._settle("kv_cache.dtype", dtype, "as model.dtype")
        if kv.block_size == "auto":
            self._settle("kv_cache.block_size", 16, "the default")
        self._settle_preload()
        self._settle_length()
        for fact, key in (
            ("dtype", "model.dtype"),
            ("kv_dtype", "kv_cache.dtype"),
            ("block_size", "kv_cache.block_size"),
        ):
            value = self._settled.get(key, _get(config, key))
            if value != "auto":
                self._facts[fact] = value

    def _settle_preload(self) -> None:
        outputs = self._given.structured_outputs
        if outputs.preload == "auto":
            named = outputs.engine.name not in ("auto", "none")
            why = "structured_outputs.engine names one" if named else "no grammar engine is named"
            self._settle("structured_outputs.preload", named, why)

    def _auto_dtype(self) -> tuple[str, str] | None:
        platform = self._out.platform
        if platform.device == "cpu":
            return "float32", "on a CPU"
        if not self._out.model_config:
            return None
        own = model_facts.checkpoint_dtype(self._out.model_config)
        if own is None:
            own, why = "bfloat16", "config.json does not say"
        else:
            why = "the checkpoint's own"
        if own == "bfloat16" and platform.capability is not None and platform.capability < (8, 0):
            return "float16", f"{why} (bfloat16), which this device lacks"
        return own, why

    def _settle_length(self) -> None:
        key, wanted = "model.max_model_len", self._given.model.max_model_len
        if not self._out.model_config:
            if wanted is None:
                self._out.reasons[key] = NEEDS_MODEL
            return
        known = model_facts.model_length(self._out.model_config)
        file, line = self._given.origin.where(("model", "max_model_len"))
        if known is None and wanted is None:
            raise ConfigError("give it: the model's config.json does not say", path=key)
        if wanted is None:
            assert known is not None, "checked above"
            self._settle(key, known[0], f"the model's {known[1]}")
        elif known is not None and wanted > known[0]:
            raise ConfigError(
                f"expected at most {known[0]}, which is what the model is made for ({known[1]}), "
                f"got {wanted}; to go beyond, change config.json's value by model.hf_overrides",
                path=key,
                file=file,
                line=line,
            )
        budget = self._given.scheduler.max_num_batched_tokens
        length = wanted or (known[0] if known else 0)
        if not self._given.scheduler.chunked_prefill and budget != "auto" and budget < length:
            raise ConfigError(
                f"without chunked_prefill a whole prompt must fit into a step: expected at least "
                f"{key} = {length}, got {budget}",
                path="scheduler.max_num_batched_tokens",
            )

    # ---- plugins ----------------------------------------------------------------------------

    def _choice(self, path: str) -> tuple[Any, bool]:
        """The choice at a key (None where a kind may be left out, and is), and whether the
        configuration gives it."""
        section_name, _, name = path.partition(".")
        section = getattr(self._given, section_name)
        return getattr(section, name), name in section.model_fields_set

    def _is_left_out(self, kind: str) -> bool:
        """Whether no implementation is wanted: none is named, and the user handed over none."""
        path = KINDS[kind].config_path
        left_out = self._choice(path)[0] is None and not self._registry.preferred(kind)
        if left_out:
            self._out.reasons[path] = "none is wanted"
        return left_out

    def _select(self, kind: str, choice: Choice | None = None) -> Selection:
        path = KINDS[kind].config_path
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
        self._settled[path] = Choice(name=selection.name, options=(choice or given).options)
        self._facts["chosen"] = {**self._facts.get("chosen", {}), kind: selection.name}
        return selection

    def _select_phases(self) -> None:
        """Attention backends of the phases that have one of their own."""
        common = self._out.selections["attention_backend"]
        chosen = dict.fromkeys(PHASES, common)
        for phase in PHASES:
            given: Choice | None = getattr(self._given.attention, phase)
            if given is not None:
                path = ("attention", phase)
                selection = chosen[phase] = self._registry.select(
                    "attention_backend",
                    given,
                    ProbeContext(self._out.platform, dict(self._facts)),
                    path=path,
                    origin=self._given.origin,
                )
                settled = Choice(name=selection.name, options=given.options)
                self._settle(dotted(path), settled, selection.reason)
        prefill, decode = (chosen[phase] for phase in PHASES)
        self._out.selections["attention_backend"] = decode
        name = decode.name
        if (prefill.name, prefill.options) != (decode.name, decode.options):
            self._out.prefill_attention = prefill
            name = f"{prefill.name} for prefill, {decode.name} for decode"
        self._facts["chosen"] = {**self._facts["chosen"], "attention_backend": name}

    def _standing(self, kind: str, named: set[str]) -> list[Choice]:
        """Implementations of a list kind that are in use without being named."""
        ctx = ProbeContext(self._out.platform, self._facts)
        entries = [
            entry
            for name, entry in self._registry.providers(kind).items()
            if entry.provider.rank > 0 and name not in named and availability(entry, ctx)
        ]
        entries.sort(key=lambda entry: (-entry.provider.rank, entry.name))
        return [Choice(name=entry.name) for entry in entries]

    def _select_list(self, kind: str) -> None:
        """Those that every engine has (available, rank > 0, highest first), then those that are
        named, in order, then those that the user handed over."""
        key = LISTS[kind]
        given_choices: list[Choice] = list(getattr(self._given, key))
        named = {choice.name for choice in given_choices}
        standing = self._standing(kind, named)
        named |= {choice.name for choice in standing}
        handed_over = [e for e in self._registry.preferred(kind) if e.name not in named]
        places: list[tuple[Choice, KeyPath]] = [(choice, (key,)) for choice in standing]
        places += [(choice, (key, index)) for index, choice in enumerate(given_choices)]
        places += [(Choice(name=entry.name), (key,)) for entry in handed_over]
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
                why = "part of every engine"
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


def _chat_template(given: str | None) -> str | None:
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
