"""Built-in eviction policies. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="lru",
        factory="octavo.plugins.eviction.lru:LruPolicy",
        rank=10,
        summary="evict the block that has been without a user for longest",
    ),
    Provider(
        name="lfu",
        factory="octavo.plugins.eviction.lfu:LfuPolicy",
        summary="evict the block with the fewest prefix hits, with ageing",
    ),
    Provider(
        name="prefix_aware",
        factory="octavo.plugins.eviction.prefix_aware:PrefixAwarePolicy",
        summary="evict the block that the fewest cached chains go through",
    ),
]
