"""`Provider`: how an implementation of a contract is offered, before anything of it is imported."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import pluggy
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from octavo.core.plain_values import plain_value

PROJECT = "octavo"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

T = TypeVar("T")


class Options(BaseModel):
    """Base class of options models: frozen, unknown keys refused. Every field has a description.
    As in the configuration, numbers are not read out of text or `true`, nor switches out of text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        return plain_value(value, cls.model_fields[str(info.field_name)].annotation)


class NoOptions(Options):
    """For implementations that have nothing to set."""


@dataclass(frozen=True)
class Platform:
    """What a probe may ask about. Made without importing torch when the device is the CPU.

    device: `cpu` or `cuda`. capability: CUDA compute capability as (major, minor), else None.
    """

    device: str = "cpu"
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class ProbeContext:
    """What `auto` knows when it asks whether an implementation can be used.

    `facts` holds what has been decided so far (model architecture, dtype, head size, KV dtype),
    by name; a probe treats an absent fact as unknown, not as a refusal. `chosen` among them maps
    the kinds that are settled already to the names of their implementations: the model and its
    quantization come first, then the kinds in the order of `KINDS`.
    """

    platform: Platform = field(default_factory=Platform)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Availability:
    """A probe's answer. `reason` says why not, or how it will run. `lost`: what users lose where
    it is not available; the startup report notes it once when `auto` had to do without. `for_auto`:
    whether `auto` may take it, or only a configuration that names it (a slow way, for tests)."""

    available: bool
    reason: str = ""
    lost: str = ""
    for_auto: bool = True

    def __bool__(self) -> bool:
        return self.available


@dataclass(frozen=True)
class Requirement:
    """What must be there before the factory is imported.

    package: an importable module name, with `extra` the Octavo extra that brings it.
    devices: empty means any. capability: the least CUDA compute capability.
    """

    package: str | None = None
    extra: str | None = None
    devices: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Provider(Generic[T]):
    """An implementation of one contract kind.

    name: what the YAML says, lower case with underscores.
    factory: `"package.module:attribute"` or a callable, called as `factory(options, context)`
        where `options` is an instance of the options model and `context` the kind's own context
        class (see the kind's module). A class whose `__init__` takes these two is the usual
        factory. In a worker it may still raise `PluginUnavailable`, for what only a loaded model
        shows: what `auto` chose then gives way to the next best, and the startup report says why.
    options: `"package.module:Class"` or the class, a subclass of `Options`. The module it lives in
        must not import torch.
    contract_version: the version of the kind's contract that this was written for; see
        docs/stability.md.
    requires: checked first; a missing package is reported as such.
    probe: `"package.module:function"` or a callable from `ProbeContext` to `Availability`, called
        when every requirement is met. None means always available.
    rank: `auto` takes the available provider with the highest rank; a negative rank is never
        chosen by `auto`.
    summary: one line for `octavo plugins`.
    """

    name: str
    factory: str | Callable[..., T]
    options: str | type[Options] = NoOptions
    contract_version: str = "1"
    requires: tuple[Requirement, ...] = ()
    probe: str | Callable[[ProbeContext], Availability] | None = None
    rank: int = 0
    summary: str = ""

    def problem(self) -> str | None:
        """What is wrong with it by itself; None: nothing."""
        if not isinstance(self.name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9_]*", self.name):
            return f"name {self.name!r} must be lower case letters, digits and underscores"
        if self.name == "auto":
            return "name 'auto' is what the configuration says for the best that is available"
        expected = {"rank": int, "requires": tuple, "summary": str, "contract_version": str}
        for field_name, wanted in expected.items():
            value = getattr(self, field_name)
            if not isinstance(value, wanted) or isinstance(value, bool):
                return f"{field_name} must be {wanted.__name__}, got {value!r:.80}"
        return None
