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
        """Whatever makes later lookups of these tokens cheap (hashes of full blocks). Called once
        a request when it arrives. `extra` are keys of the request (cache salt, adapter); requests
        whose extra keys differ never share. The result is opaque to the core and is handed to
        `lookup` and `admit` unchanged."""

    @abstractmethod
    def lookup(self, digest: Any, token_ids: NDArray[np.int32]) -> Match:
        """The longest reusable prefix, at most `len(token_ids) - 1` tokens, so that at least one
        token is always recomputed. Changes nothing but statistics kept by `admit`."""

    @abstractmethod
    def admit(self, slot: int, digest: Any, match: Match, total: int) -> Sequence[BlockCopy] | None:
        """Give `slot` the matched blocks and new ones up to `total` tokens. None when blocks do
        not suffice: then nothing has changed. The copies returned must run before the forward
        pass."""

    @abstractmethod
    def extend(self, slots: NDArray[np.intp], totals: NDArray[np.int64]) -> int:
        """Make room for `totals[i]` tokens in `slots[i]`, in order; stop at the first that does
        not fit and return how many did. Those before it keep what they got. Copies that this causes
        are fetched by `take_copies`."""

    @abstractmethod
    def commit(
        self, slots: NDArray[np.intp], totals: NDArray[np.int64], tokens: NDArray[np.int32]
    ) -> None:
        """The KV of the first `totals[i]` tokens of `slots[i]` has been computed: full blocks may
        be published for reuse. `tokens` is int32[S, L], the token ids of every slot: always the
        same array, in which these tokens stay until the slot is released or truncated."""

    def catch_up(self) -> None:  # noqa: B027
        """Do what `commit` put off, such as hashing. Called once a step while the device computes,
        when it costs nobody time. A manager that puts work off does it by itself before any answer
        that depends on it."""

    @abstractmethod
    def truncate(self, slot: int, total: int) -> None:
        """Drop what lies beyond `total` tokens (rejected speculation). Where `total` ends in a
        block that others use or may find, the slot gets a copy of it, which is fetched by
        `take_copies`. Raises `CapacityError` when there is no block for the copy: then nothing has
        changed."""

    @abstractmethod
    def fork(self, parent: int, child: int, total: int) -> Sequence[BlockCopy] | None:
        """Let slot `child` share the first `total` tokens of `parent`, with room for one token
        more. A block that `child` will write into is copied. None when blocks do not suffice."""

    @abstractmethod
    def release(self, slot: int) -> None:
        """The slot is done or preempted. Published blocks stay reusable until evicted. Nothing
        happens to a slot that is empty."""

    @abstractmethod
    def fits(self, total: int) -> int | None:
        """None when a request of `total` tokens can ever fit into the empty pool, else the largest
        number of tokens that can."""

    @abstractmethod
    def stats(self) -> KVStats:
        """Counts, cheap enough for every step."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget all reusable content. False when blocks in use prevent it; then nothing is
        forgotten."""

    def take_copies(self) -> Sequence[BlockCopy]:
        """Copies that `extend` or `truncate` has caused since the last call (evicted content that
        goes to the host). Called after them and before any other call that allocates. The core
        skips managers that do not override it."""
        return ()

    def swap_out(self, slot: int, num_tokens: int) -> SwapOut | None:
        """Move the KV of a slot's first `num_tokens` tokens to the host pool; the slot is then
        empty. None when the manager has no host pool or it is full: then nothing has changed.
        Called only while no step is in flight."""
        return None

    def swap_in(self, slot: int, handle: Any, total: int) -> Sequence[BlockCopy] | None:
        """Bring back into an empty slot, not necessarily the same one, what `swap_out` moved, with
        room for `total` tokens. None when blocks do not suffice: then nothing has changed and the
        handle stays good; otherwise it is used up."""
        return None

    def swap_drop(self, handle: Any) -> None:  # noqa: B027
        """Forget what `swap_out` moved: the sequence was aborted."""

    def block_states(self) -> NDArray[np.uint8] | None:
        """A `BlockState` for each block but the null block, uint8[num_blocks - 1], for people to
        look at. Called between steps while somebody does. None: the manager does not tell."""
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
