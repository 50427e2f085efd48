"""Announcing that something public will go: every deprecation warning of Octavo is raised here.

docs/stability.md says how long what is announced keeps working.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass


class OctavoDeprecationWarning(DeprecationWarning):
    """Something public that will go; the message says when, and what to use instead."""


@dataclass(frozen=True)
class Deprecation:
    """what: as a user writes it. since, gone_in: versions of Octavo. instead: what to use."""

    what: str
    since: str
    gone_in: str
    instead: str

    def __str__(self) -> str:
        return (
            f"{self.what} is deprecated since Octavo {self.since} and will be gone in "
            f"{self.gone_in}: use {self.instead}"
        )


def warn(deprecation: Deprecation, stacklevel: int = 2) -> None:
    """Announce it to whoever called what calls this."""
    warnings.warn(str(deprecation), OctavoDeprecationWarning, stacklevel=stacklevel + 1)
