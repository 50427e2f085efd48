"""Every exception that Octavo raises on purpose.

    OctavoError
    ├── ConfigError            invalid YAML file, flag or mapping (carries path and line)
    ├── PluginError            something about a plugin (carries kind, name, distribution)
    │   ├── PluginNotFound     no such name; suggests the nearest one
    │   ├── PluginConflict     two plugins register the same name
    │   ├── PluginUnavailable  registered, but it cannot run here (carries the reason)
    │   ├── PluginImportError  its module or factory cannot be imported
    │   ├── PluginOptionsError its options do not validate
    │   └── ContractError      wrong contract version or signature
    ├── ModelError             a model cannot be found, read or built
    │   ├── ModelNotFound      wrong path, unknown hub id, no such package
    │   ├── UnsupportedModel   no implementation of the architecture
    │   └── WeightError        truncated file, missing tensor or wrong shape
    ├── CapacityError          not enough memory
    ├── RequestError           invalid request: the caller's mistake (carries param)
    │   ├── RequestTooLong     it can never fit
    │   ├── RequestFault       it failed through no fault of the caller (a plugin raised, NaN)
    │   └── GenerationError    some requests of a batch failed (carries all outputs)
    └── EngineDeadError        the engine stopped; the reason is the message

Messages name the thing, what was expected and what was given. `assert` is for invariants.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

INTERNAL_ERROR = "internal_error"
"""Code of errors that are not the caller's fault."""


class OctavoError(Exception):
    """Base class."""


class ConfigError(OctavoError):
    """Invalid configuration. `path` is the dotted YAML key, `line` its 1-based line in `file`."""

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        file: str | None = None,
        line: int | None = None,
    ) -> None:
        where = ":".join(str(part) for part in (file, line) if part is not None)
        super().__init__(": ".join(part for part in (where, path, message) if part))
        self.message, self.path, self.file, self.line = message, path, file, line


class PluginError(OctavoError):
    """Something about a plugin."""

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        name: str | None = None,
        distribution: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind, self.name, self.distribution = kind, name, distribution


class PluginFault(PluginError):
    """An implementation raised while the engine ran; the engine stops."""


class ReturnedWrong(PluginFault):
    """A method of `made` returned what its contract does not know: told where it was called."""

    def __init__(self, made: object, method: str, got: object, expected: str) -> None:
        super().__init__(
            f"{type(made).__name__}.{method} returned {got!r:.80}, expected {expected}"
        )
        self.made = made


class PluginNotFound(PluginError):
    """No implementation of this kind has this name."""


class PluginConflict(PluginError):
    """Two plugins register the same name for one kind."""


class PluginUnavailable(PluginError):
    """The implementation cannot run here."""


class PluginImportError(PluginError):
    """The plugin's module or factory cannot be imported."""


class PluginOptionsError(PluginError):
    """Invalid options of an implementation."""


class ContractError(PluginError):
    """Wrong contract version or signature."""


class ModelError(OctavoError):
    """A model cannot be found, read or built."""


class ModelNotFound(ModelError):
    """There is no model at the given source."""


class UnsupportedModel(ModelError):
    """No implementation of the architecture."""


class WeightError(ModelError):
    """Weights are truncated, missing or have the wrong shape."""


class CapacityError(OctavoError):
    """Not enough memory."""


class RequestError(OctavoError, ValueError):
    """Invalid request. `param` names the parameter, as in OpenAI's error objects."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.code = message, param, code


class RequestTooLong(RequestError):
    """A request that can never fit."""


class RequestFault(RequestError):
    """A valid request that failed: a plugin raised, or logits were NaN."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code=INTERNAL_ERROR)


def failure(message: str, param: str | None, code: str | None) -> RequestError:
    """The exception for a request that failed while running."""
    if code == INTERNAL_ERROR:
        return RequestFault(message, param=param)
    return RequestError(message, param=param, code=code)


class GenerationError(RequestError):
    """Some requests of a batch failed while running. `outputs` holds all outputs in order; those of
    failed requests have `error` set."""

    def __init__(self, message: str, outputs: Sequence[Any]) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class EngineDeadError(OctavoError):
    """The engine has stopped."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A `did you mean` clause for error messages, or the list of known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(names)}" if names else "there are none"
