"""Every exception that Octavo raises on purpose.

    OctavoError
    ├── ConfigError            a YAML file, flag or mapping is wrong (carries path and line)
    ├── PluginError            something about a plugin (carries kind, name, distribution)
    │   ├── PluginNotFound     no such name; suggests the nearest one
    │   ├── PluginConflict     two plugins offer one name
    │   ├── PluginUnavailable  known, but it cannot run here; carries the reason
    │   ├── PluginImportError  its module or factory cannot be imported
    │   ├── PluginOptionsError its options do not validate
    │   └── ContractError      wrong contract version or a signature that differs
    ├── ModelError             a model cannot be found, read or built
    │   ├── ModelNotFound      wrong path, unknown hub id, no such package
    │   ├── UnsupportedModel   the architecture has no implementation here
    │   └── WeightError        a file is truncated, a tensor is missing or has a wrong shape
    ├── CapacityError          the machine lacks memory for what was asked
    ├── RequestError           a request is invalid: the caller's mistake (carries param)
    │   ├── RequestTooLong     it can never fit (carries both numbers)
    │   ├── RequestFault       it failed by no doing of its caller (a plugin raised, NaN)
    │   └── GenerationError    some requests of a batch failed (carries all outputs)
    └── EngineDeadError        the engine stopped; the reason is the message

A user's mistake raises one of these and names the thing, what was expected and what came.
`assert` is for invariants.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, Self

INTERNAL_ERROR = "internal_error"
"""Code of what is not the caller's doing."""


class OctavoError(Exception):
    """Base class."""


class ConfigError(OctavoError):
    """A configuration is wrong.

    `path` is the dotted YAML key (`scheduler.max_num_seqs`), `line` its 1-based line in `file`.
    """

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
    """Two plugins offer the same name for the same kind."""


class PluginUnavailable(PluginError):
    """The implementation exists and cannot run here."""


class PluginImportError(PluginError):
    """The plugin's module or factory cannot be imported."""


class PluginOptionsError(PluginError):
    """The options given for a plugin do not validate."""


class ContractError(PluginError):
    """The plugin was written for another contract version, or its signature differs."""


class ModelError(OctavoError):
    """A model cannot be found, read or built."""


class ModelNotFound(ModelError):
    """Nothing is at the given source."""


class UnsupportedModel(ModelError):
    """No model implementation serves this architecture."""


class WeightError(ModelError):
    """Weights are truncated, missing or of the wrong shape."""


class CapacityError(OctavoError):
    """Not enough memory for what was asked."""


class RequestError(OctavoError, ValueError):
    """A request is invalid. `param` names the offending parameter, as in OpenAI's error objects."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.code = message, param, code


class RequestTooLong(RequestError):
    """A request that can never fit, however long it waits."""

    @classmethod
    def of_prompt(
        cls, num_tokens: int, limit: str, *, max_tokens: int | None = None, at_least: bool = False
    ) -> Self:
        """A prompt that exceeds `limit`, which reads like "max_model_len is 4096".

        max_tokens: how many more must fit; None: one, whatever was asked for. at_least: the
        prompt was not tokenized to the end, so `num_tokens` is a lower bound.
        """
        bound = "at least " if at_least else ""
        wanted = "needs room for one more"
        if max_tokens is not None:
            wanted = f"max_tokens asks for {max_tokens}, together {bound}{num_tokens + max_tokens}"
        return cls(
            f"the prompt has {bound}{num_tokens} tokens and {wanted}, but {limit}",
            param="prompt",
            code="context_length_exceeded",
        )


class RequestFault(RequestError):
    """A valid request that failed: a plugin raised for it, or no number was computed."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code=INTERNAL_ERROR)


def failure(message: str, param: str | None, code: str | None) -> RequestError:
    """What is raised for a request that has failed while it ran."""
    if code == INTERNAL_ERROR:
        return RequestFault(message, param=param)
    return RequestError(message, param=param, code=code)


class GenerationError(RequestError):
    """Requests of a batch failed while they ran. `outputs` holds every request's output in order;
    those that failed have `error` set."""

    def __init__(self, message: str, outputs: Sequence[Any]) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class EngineDeadError(OctavoError):
    """The engine has stopped and answers nothing more."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A `did you mean` clause for error messages, or the list of what is known."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(names)}" if names else "none is known"
