"""What this package offers to Octavo. Importing it imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo import Provider, hookimpl

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="class_quotas",
        factory="octavo_class_quotas.scheduler_policy:ClassQuotasPolicy",
        options="octavo_class_quotas.scheduler_policy:ClassQuotasOptions",
        contract_version="1",
        rank=-1,  # only when named; give it a rank from 0 on to let `auto` choose it
        summary="classes share the slots by weight, within quotas",
    ),
]


@hookimpl
def octavo_scheduler_policies() -> list[Provider[Any]]:
    return PROVIDERS
