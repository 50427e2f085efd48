"""`Kind`: a category of implementations, with one contract and one hook.

A kind is declared beside its contract and its hook specification:

    class Spec:
        @hookspec
        def acme_rerankers(self) -> list[Provider[Reranker]]:
            ...

    KIND = Kind("reranker", Spec, Reranker, RerankerContext, "rerank.model")

The engine's kinds are `octavo.core.contracts.KINDS`. Any plugin adds its own by the hook
`octavo_kinds`, as the server does; see docs/add-a-kind.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from octavo.core.contracts.provider import hookspec


@dataclass(frozen=True)
class Kind:
    """A category of implementations."""

    name: str
    """As messages and `octavo plugins` call it: `scheduler_policy`."""
    spec: type[Any]
    """The class that holds the hook specification, and nothing else."""
    contract: type[Any]
    """The abstract class that implementations inherit from."""
    context: type[Any]
    """The class of the context that a factory gets."""
    config_path: str
    """The YAML key that chooses: `section.key`, or a top-level `key` for a list of choices."""
    version: str = "1"
    """The contract's version; "0" is free to change, see docs/stability.md."""

    @property
    def hook(self) -> str:
        """Name of the hook that returns providers."""
        return next(str(name) for name in vars(self.spec) if not name.startswith("_"))

    @property
    def module(self) -> ModuleType:
        """The module that declares the contract."""
        return sys.modules[self.contract.__module__]


class KindSpec:
    """The hook that adds kinds."""

    @hookspec
    def octavo_kinds(self) -> list[Kind]:  # type: ignore[empty-body]
        """Kinds that a package declares.

        When: once, when the registry is made, before any providers are asked for. Where: any
        process. Result: all are collected; a name or hook that is taken is refused.
        """
