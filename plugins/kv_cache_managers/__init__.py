"""Built-in KV cache managers. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="paged",
        factory="octavo.plugins.kv_cache_managers.paged:PagedKVCacheManager",
        summary="fixed-size blocks, hash-chained prefix reuse, host cache for evicted content",
    ),
    Provider(
        name="radix",
        factory="octavo.plugins.kv_cache_managers.radix:RadixKVCacheManager",
        summary="prefixes in a tree over tokens: reuse to the token, not to the block",
    ),
    Provider(
        name="none",
        factory="octavo.plugins.kv_cache_managers.none:UnsharedKVCacheManager",
        summary="no sharing and no reuse, the baseline for comparisons",
    ),
]
