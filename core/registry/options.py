"""Options of an implementation: their model, and validation with the YAML key and line."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from octavo.core.config.origin import Origin, Path, dotted
from octavo.core.config.validation import problems
from octavo.core.contracts import Options
from octavo.core.errors import ConfigError, ContractError, PluginOptionsError
from octavo.core.registry.sources import Registered, import_string


def options_model(entry: Registered) -> type[BaseModel]:
    """The options model of an implementation. Raises `PluginImportError`, or `ContractError` when
    it is no model."""
    model = entry.provider.options
    if isinstance(model, str):
        model = import_string(model, "options model", entry.import_error)
    if not isinstance(model, type) or not issubclass(model, BaseModel):
        raise entry.error(
            ContractError,
            f"{entry}: its options model is {model!r}, expected a subclass of "
            f"{Options.__module__}.Options",
        )
    return model


def validate_options(
    entry: Registered, values: dict[str, Any], path: Path, origin: Origin | None
) -> BaseModel:
    """An instance of the options model. Raises `PluginOptionsError` with the key's path and line,
    what was expected, what came, and the nearest option for an unknown one."""
    model = options_model(entry)
    try:
        return model.model_validate(values)
    except ValidationError as exc:
        found = problems(exc, model, values, thing="option")
        first = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise entry.error(
            PluginOptionsError,
            f"{place((*path, *first.path), origin)}{first.message}{more} "
            f"[options of {entry.kind} '{entry.name}']",
        ) from None


def place(path: Path, origin: Origin | None) -> str:
    """`file.yaml:12: scheduler.policy.weights: `, as `ConfigError` writes it."""
    file, line = origin.where(path) if origin is not None else (None, None)
    return f"{ConfigError('', path=dotted(path), file=file, line=line)}: "
