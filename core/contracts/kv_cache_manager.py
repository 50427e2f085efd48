"""Kind `kv_cache_manager`: which block holds which tokens, what is shared, what is evicted.

Runs in the engine process, on the engine thread. It deals in block numbers; the tensors are the
worker's. Shapes: G groups of layers (see `KVSpec.group`), S slots, M blocks a slot at most.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.eviction_policy import EvictionPolicy
from octavo.core.contracts.kind import Kind
from octavo.core.contracts.provider import Provider, hookspec


class CopyKind(IntEnum):
    """Where a block copy reads and writes."""

    DEVICE = 0
    TO_HOST = 1
    TO_DEVICE = 2


class BlockState(IntEnum):
    """Of a block on the device."""

    FREE = 0  # no content
    USED = 1  # one user
    SHARED = 2  # several users
    CACHED = 3  # reusable content, no user


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy leading tokens of a block in every layer of a group before the step's forward pass. A
    partial count is a copy-on-write, or a radix match that ends inside a block."""

    group: int
    source: int  # host blocks are numbered from 0 on their own
    target: int
    num_tokens: int
    kind: CopyKind = CopyKind.DEVICE


@dataclass(frozen=True, slots=True)
class Match:
    """Result of a lookup."""

    num_tokens: int  # leading tokens whose KV can be reused
    handle: Any = None  # the manager's own, valid until the next call that allocates


NO_MATCH = Match(0)


@dataclass(frozen=True, slots=True)
class SwapOut:
    """A slot's content on the host."""

    handle: Any  # the manager's own
    copies: Sequence[BlockCopy]  # that move it there


@dataclass(frozen=True)
class KVCacheManagerContext:
    """What a factory gets."""

    num_blocks: int  # of each group, including the null block 0 (padding; never handed out)
    block_size: int  # tokens
    max_num_seqs: int  # S
    max_model_len: int
    num_groups: int = 1  # G
    prefix_caching: bool = True  # whether `lookup` may match
    num_swap_blocks: int = 0  # host blocks for `swap_out`, numbered from 0
    num_host_cache_blocks: int = 0  # host blocks for evicted content, numbered from there on
    eviction: EvictionPolicy | None = None  # None: the manager's own choice


@dataclass(slots=True)
class KVStats:
    """Counts. Queries and hits are tokens since start, of every admission (the core leaves out
    those after a preemption where it shows them); hits include those of the host cache."""

    num_blocks: int  # that can be handed out
    num_free: int  # without content
    num_evictable: int  # with reusable content and no user
    prefix_queries: int
    prefix_hits: int
    num_swap_blocks: int = 0  # host blocks for swapping
    num_free_swap_blocks: int = 0
    host_cache_blocks: int = 0  # host blocks for evicted content
    host_cache_used: int = 0
    host_cache_queries: int = 0  # tokens not found on the device and looked up on the host
    host_cache_hits: int = 0

    @property
    def usage(self) -> float:
        """Fraction of blocks in use; evictable blocks count as free."""
        used = self.num_blocks - self.num_free - self.num_evictable
        return used / self.num_blocks if self.num_blocks else 0.0


class KVCacheManager(ABC):
    """Owns the block tables.

    Copies run in the order in which they were returned, before the forward pass of the step being
    planned. So a block may be handed out again as soon as a copy out of it was returned, and a copy
    may read what an earlier one wrote.
    """

    # Which of `eviction`, `host_cache` and `swap` it uses; a configuration that asks for another
    # one is refused.
    uses: frozenset[str] = frozenset()
    # int32[G, S, M] and filled entries int32[S]; 0 (the null block) beyond. Read by the core,
    # written by the manager only.
    block_tables: NDArray[np.int32]
    num_slot_blocks: NDArray[np.int32]

    @abstractmethod
    def digest(self, token_ids: NDArray[np.int32], extra: Sequence[bytes]) -> Any:
        """Anything that makes later lookups of these tokens cheap (hashes of full blocks), opaque
        to the core. Called once per request on arrival. Requests whose `extra` keys (cache salt,
        adapter) differ never share."""

    @abstractmethod
    def lookup(self, digest: Any, token_ids: NDArray[np.int32]) -> Match:
        """The longest reusable prefix, at most `len(token_ids) - 1` tokens: at least one token is
        always recomputed. Changes nothing."""

    @abstractmethod
    def admit(self, slot: int, digest: Any, match: Match, total: int) -> Sequence[BlockCopy] | None:
        """Give `slot` the matched blocks and new ones up to `total` tokens. Returns copies to run
        before the forward pass; None, and nothing changes, when there are too few blocks."""

    @abstractmethod
    def extend(self, slots: NDArray[np.intp], totals: NDArray[np.int64]) -> int:
        """Make room for `totals[i]` tokens in `slots[i]`, in order, up to the first that does not
        fit; returns how many did. The copies are fetched by `take_copies`."""

    @abstractmethod
    def commit(
        self, slots: NDArray[np.intp], totals: NDArray[np.int64], tokens: NDArray[np.int32]
    ) -> None:
        """The KV of the first `totals[i]` tokens of `slots[i]` has been computed: full blocks may
        be published for reuse. `tokens` is int32[S, L], the token ids of every slot: always the
        same array, in which these tokens stay until the slot is released or truncated."""

    def catch_up(self) -> None:  # noqa: B027
        """Do what `commit` deferred, such as hashing. Called once per step while the device
        computes. A manager that defers work does it itself before any answer that depends on it."""

    @abstractmethod
    def truncate(self, slot: int, total: int) -> None:
        """Drop what lies beyond `total` tokens (rejected speculation). Where `total` ends in a
        block that others use or may find, the slot gets a copy, fetched by `take_copies`. Raises
        `CapacityError`, and nothing changes, when there is no block for the copy."""

    @abstractmethod
    def fork(self, parent: int, child: int, total: int) -> Sequence[BlockCopy] | None:
        """Let slot `child` share the first `total` tokens of `parent`, with room for one more. A
        block that `child` will write to is copied. None when there are too few blocks."""

    @abstractmethod
    def release(self, slot: int) -> None:
        """Free a slot, which may be empty. Published blocks stay reusable until evicted."""

    @abstractmethod
    def fits(self, total: int) -> int | None:
        """None when `total` tokens fit into the empty pool, else the largest number that does."""

    @abstractmethod
    def stats(self) -> KVStats:
        """Counts, cheap enough for every step."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget all reusable content. False, and nothing changes, when blocks are in use."""

    def take_copies(self) -> Sequence[BlockCopy]:
        """Copies that `extend` or `truncate` caused since the last call. Called after them and
        before any other call that allocates; skipped for managers that do not override it."""
        return ()

    def swap_out(self, slot: int, num_tokens: int) -> SwapOut | None:
        """Move the KV of a slot's first `num_tokens` tokens to the host pool and empty the slot.
        None, and nothing changes, when the pool is full or absent. Called only while no step is in
        flight."""
        return None

    def swap_in(self, slot: int, handle: Any, total: int) -> Sequence[BlockCopy] | None:
        """Bring back what `swap_out` moved into an empty slot, not necessarily the same one, with
        room for `total` tokens. None when there are too few blocks: the handle stays valid, else
        it is used up."""
        return None

    def swap_drop(self, handle: Any) -> None:  # noqa: B027
        """Forget what `swap_out` moved: the sequence was aborted."""

    def block_states(self) -> NDArray[np.uint8] | None:
        """A `BlockState` for each block but the null block, uint8[num_blocks - 1], for display.
        Called between steps. None: not supported."""
        return None

    def check(self) -> None:  # noqa: B027
        """Verify all invariants, for tests: raise AssertionError with what is wrong."""


class Spec:
    @hookspec
    def octavo_kv_cache_managers(self) -> list[Provider[KVCacheManager]]:  # type: ignore[empty-body]
        """Providers of KV cache managers.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `KVCacheManagerContext`.
        """


KIND = Kind(
    "kv_cache_manager", Spec, KVCacheManager, KVCacheManagerContext, "kv_cache.manager", "1.1"
)
