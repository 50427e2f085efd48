"""Built-in KV cache managers. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="paged",
        factory="octavo.plugins.kv_cache_managers.paged:PagedKVCacheManager",
        summary="fixed-size blocks, hash-chained prefix reuse, LRU eviction",
    ),
]
