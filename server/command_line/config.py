"""Configuration flags, for every command that takes them: MODEL, `--config`, `--set`, and vLLM's
names. Help texts come from the fields' descriptions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from octavo.core.config.models import ImplementationConfig
from octavo.core.config.validation import model_at
from octavo.core.errors import ConfigError
from octavo.core.registry import Registry
from octavo.engine.config import EngineConfig
from octavo.frontend.config import load_config
from octavo.frontend.vllm.keywords import KEYWORDS, Keyword, from_keywords, integer
from octavo.server.config import ServiceConfig, service_config


def add_config_arguments(
    parser: argparse.ArgumentParser, *, source: tuple[str, str] | None = None
) -> None:
    """Add a positional argument, `--config`, `--set` and a flag for each of vLLM's names.

    source: name and help of the positional argument; None: MODEL. Values are stored in the
    namespace under vLLM's names, None where a flag is not given.
    """
    metavar, text = source or ("MODEL", description("model.source"))
    parser.add_argument("model_source", nargs="?", metavar=metavar, help=text)
    add_config_sources(parser)
    parser.add_argument(
        "--trace-steps",
        metavar="FILE",
        help="write a timeline of the engine's steps as a Chrome trace, for Perfetto "
        "[observers: step_trace]",
    )
    group = parser.add_argument_group("model, engine and server (vLLM's names)")
    for name, keyword in KEYWORDS.items():
        _add(group, name, keyword)


def add_config_sources(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and `--set` alone."""
    parser.add_argument("--config", metavar="FILE", help="configuration file (YAML)")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help="set one configuration key; VALUE is YAML, as in --set scheduler.policy=fcfs "
        "(repeatable)",
    )


def config_from_args(
    args: argparse.Namespace,
    plugins: Sequence[Any] = (),
    errors: list[ConfigError] | None = None,
) -> tuple[ServiceConfig, Registry]:
    """The configuration that the flags describe, and the plugins that it loads.

    plugins: objects, as for `LLM`. errors: as for `load_config`. Raises `ConfigError` or
    `PluginError`.
    """
    keywords = {name: getattr(args, name, None) for name in KEYWORDS}
    source = getattr(args, "model_source", None)
    if source is not None:
        if keywords["model"] is not None:
            raise ConfigError(f"model given twice: '{source}' and --model '{keywords['model']}'")
        keywords["model"] = source
    flags = from_keywords(keywords)
    config = service_config(
        load_config(args.config, overrides=args.overrides, flags=flags, errors=errors)
    )
    trace = getattr(args, "trace_steps", None)
    if trace is not None:
        observer = ImplementationConfig(name="step_trace", options={"path": trace})
        config = config.model_copy(update={"observers": [*config.observers, observer]})
    return config, registry_from_config(config, plugins)


def registry_from_config(config: EngineConfig, plugins: Sequence[Any] = ()) -> Registry:
    """The plugins that a configuration loads."""
    known = config.plugins
    return Registry.discover(
        load=known.load, disable=known.disable, only=known.only, objects=plugins
    )


def description(path: str) -> str:
    """The description of the field at a dotted key."""
    section, _, name = path.rpartition(".")
    model = model_at(ServiceConfig, section.split("."))
    assert model is not None, f"no section {section}"
    return model.model_fields[name].description or ""


def _add(group: argparse._ArgumentGroup, name: str, keyword: Keyword) -> None:
    text = keyword.doc or description(keyword.path)
    if keyword.path:
        text = f"{text} [{keyword.path}]"
    names = [f"--{name.replace('_', '-')}", *keyword.aliases]
    options: dict[str, Any] = {"dest": name, "default": None, "help": text.replace("%", "%%")}
    if keyword.form == "bool":
        options |= {"action": argparse.BooleanOptionalAction}
    else:
        options |= {"type": _TYPES[keyword.form], "metavar": _METAVARS[keyword.form]}
        if keyword.form == "list":
            options |= {"nargs": "+"}
    group.add_argument(*names, **options)


def _mapping(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise argparse.ArgumentTypeError(f"expected JSON, got {text!r}: {exc}") from None


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


_TYPES = {"text": str, "int": integer, "float": _number, "mapping": _mapping, "list": str}
_METAVARS = {"text": "X", "int": "N", "float": "X", "mapping": "JSON", "list": "NAME"}
