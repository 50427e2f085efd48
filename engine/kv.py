"""How large the KV pools are, on the device and on the host, and the manager of their blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.contracts.eviction_policy import EvictionPolicyContext
from octavo.core.contracts.executor import WorkerReport
from octavo.core.contracts.kv_cache_manager import KVCacheManager, KVCacheManagerContext
from octavo.core.contracts.preemption_policy import PreemptionPolicy
from octavo.core.errors import CapacityError, ConfigError
from octavo.engine.capacity import breakdown, no_room, size, too_long
from octavo.engine.config import MAX_BLOCKS, KVCacheConfig

if TYPE_CHECKING:
    from octavo.core.registry import Registry
    from octavo.engine.resolve import Resolved

DEFAULT_SWAP_SPACE = 4 * 2**30
"""`preemption.swap_space` at most, where it is not configured."""


@dataclass(frozen=True)
class Pools:
    """num_blocks: usable ones on the device, without the null block, and the reason for their
    number. num_swap_blocks, num_host_cache_blocks: on the host."""

    num_blocks: int
    reason: str
    num_swap_blocks: int = 0
    num_host_cache_blocks: int = 0

    @property
    def num_host_blocks(self) -> int:
        return self.num_swap_blocks + self.num_host_cache_blocks


@dataclass(frozen=True)
class Room:
    """What the blocks are for: `max_num_seqs` sequences of `max_model_len` tokens."""

    max_num_seqs: int
    max_model_len: int
    block_size: int


def size_pools(
    resolved: Resolved, worker: WorkerReport, room: Room, preemption: PreemptionPolicy
) -> Pools:
    """Blocks of the KV pools: as configured, or what memory allows and the budgets can use."""
    kv = resolved.config.kv_cache
    device = _size_device_pool(kv, worker, room)
    _check_least(kv, device.num_blocks, worker, room.block_size)
    swap_space = resolved.config.preemption.swap_space
    if not preemption.swaps:
        swap_space = 0
    elif swap_space is None:
        swap_space = min(DEFAULT_SWAP_SPACE, device.num_blocks * worker.block_bytes)
    pools = Pools(
        device.num_blocks,
        device.reason,
        swap_space // worker.block_bytes,
        kv.host_cache_bytes // worker.block_bytes,
    )
    _check_most(pools, worker)
    return pools


def _check_most(pools: Pools, worker: WorkerReport) -> None:
    """Before anything is made for every block."""
    for reason, count in (
        (pools.reason, pools.num_blocks),
        ("preemption.swap_space", pools.num_swap_blocks),
        ("kv_cache.host_cache_bytes", pools.num_host_cache_blocks),
    ):
        if count > MAX_BLOCKS:
            raise CapacityError(
                f"{reason}: expected at most {MAX_BLOCKS:,} KV blocks, got {count:,} of "
                f"{size(worker.block_bytes)} each ({size(count * worker.block_bytes)})"
            )


def _size_device_pool(kv: KVCacheConfig, worker: WorkerReport, room: Room) -> Pools:
    if kv.num_blocks is not None:
        return Pools(kv.num_blocks, "kv_cache.num_blocks")
    if kv.memory_bytes is not None:
        return Pools(kv.memory_bytes // worker.block_bytes, "kv_cache.memory_bytes")
    useful = room.max_num_seqs * -(-room.max_model_len // room.block_size)
    count = worker.kv_budget // worker.block_bytes
    if count >= useful:
        return Pools(useful, "what max_num_seqs sequences of max_model_len need")
    return Pools(count, f"what {size(worker.kv_budget)} of memory hold")


def _check_least(kv: KVCacheConfig, num_blocks: int, worker: WorkerReport, block_size: int) -> None:
    """A pool must hold at least a prompt token and the token after it."""
    needed = -(-2 // block_size)
    if num_blocks >= needed:
        return
    by_memory = kv.num_blocks is None and kv.memory_bytes is None
    if by_memory and worker.memory is not None:
        raise CapacityError(no_room(worker.memory, needed * worker.block_bytes))
    there = ""
    if kv.num_blocks is None:
        there = f" ({size(kv.memory_bytes or worker.kv_budget)} are available)"
    raise CapacityError(
        f"the KV cache needs at least {needed} blocks of {size(worker.block_bytes)}, got"
        f" {num_blocks}{there}; the longest context that fits is"
        f" {max(num_blocks, 0) * block_size} tokens: give it more memory"
        " (kv_cache.memory_bytes, kv_cache.memory_utilization)"
    )


def check_length(
    resolved: Resolved, worker: WorkerReport, pools: Pools, room: Room, longest: int | None
) -> None:
    """Raise `CapacityError` when the configuration gives `max_model_len` and one such sequence does
    not fit into a pool whose size follows from memory. A length that is the model's own, and a pool
    counted in blocks, are taken as they are. longest: tokens that fit, None when all do."""
    kv = resolved.config.kv_cache
    if longest is None or kv.num_blocks is not None or "model.max_model_len" in resolved.reasons:
        return
    needed = -(-room.max_model_len // room.block_size) * worker.block_bytes
    available = pools.num_blocks * worker.block_bytes
    reason, more = "", "kv_cache.memory_bytes"
    if kv.memory_bytes is None and worker.memory is not None:
        reason, more = f" ({breakdown(worker.memory)})", "kv_cache.memory_utilization"
    raise CapacityError(
        f"model.max_model_len: {too_long(room.max_model_len, needed, available, longest)}{reason}. "
        f"Lower model.max_model_len to that, or leave it out to be served what fits; or raise "
        f"{more}, or make a token smaller by kv_cache.dtype"
    )


def make_manager(
    resolved: Resolved, registry: Registry, pools: Pools, room: Room, num_groups: int
) -> KVCacheManager:
    """The configured KV cache manager with its eviction policy. Raises `ConfigError` where the
    configuration asks for what the manager does not do."""
    config = resolved.config.kv_cache
    total = pools.num_blocks + 1  # and the null block
    eviction = resolved.selections["eviction_policy"]
    selected = resolved.selections["kv_cache_manager"]
    manager: KVCacheManager = registry.create(
        selected,
        KVCacheManagerContext(
            num_blocks=total,
            block_size=room.block_size,
            max_num_seqs=room.max_num_seqs,
            max_model_len=room.max_model_len,
            num_groups=num_groups,
            prefix_caching=config.prefix_caching,
            num_swap_blocks=pools.num_swap_blocks,
            num_host_cache_blocks=pools.num_host_cache_blocks,
            eviction=registry.create(eviction, EvictionPolicyContext(total)),
        ),
    )
    asked = {
        "eviction": ("kv_cache.eviction", eviction.name != KVCacheConfig().eviction.name),
        "host_cache": ("kv_cache.host_cache_bytes", pools.num_host_cache_blocks > 0),
        "swap": ("preemption.policy", pools.num_swap_blocks > 0),
    }
    for feature, (path, wanted) in asked.items():
        if wanted and feature not in manager.uses:
            raise ConfigError(
                f"the KV cache manager '{selected.name}' has no {feature.replace('_', ' ')} that "
                "could be configured; choose another kv_cache.manager",
                path=path,
            )
    return manager
