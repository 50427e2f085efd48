"""What this package offers to Octavo. Importing it imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo import Provider, hookimpl

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="segmented_lru",
        factory="octavo_segmented_lru.eviction_policy:SegmentedLruEviction",
        options="octavo_segmented_lru.eviction_policy:SegmentedLruOptions",
        contract_version="1",
        rank=-1,  # only when named; give it a rank from 0 on to let `auto` choose it
        summary="what was hit once is kept longer than what never was",
    ),
]


@hookimpl
def octavo_eviction_policies() -> list[Provider[Any]]:
    return PROVIDERS
