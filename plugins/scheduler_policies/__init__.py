"""Built-in scheduler policies. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="fcfs",
        factory="octavo.plugins.scheduler_policies.fcfs:FcfsPolicy",
        summary="first come, first served",
    ),
]
