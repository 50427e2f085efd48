"""Kind `eviction_policy`: which cached block goes first when memory is needed.

Used by KV cache managers that keep content without a user and share it by prefix. Runs in the
engine process, on the engine thread, inside the manager's calls. Blocks are the manager's numbers,
from 1 to `num_blocks` - 1. A block is *evictable* from `retire` until `reuse` or `evict`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.core.contracts.provider import Provider, hookspec


@dataclass(frozen=True)
class EvictionPolicyContext:
    """What a factory gets."""

    num_blocks: int  # of the pool, including the null block 0


class EvictionPolicy(ABC):
    """Orders the blocks that have content and no user."""

    @abstractmethod
    def retire(self, blocks: Sequence[int]) -> None:
        """These blocks lost their last user and keep their content. Blocks of one sequence come in
        one call, the last one first: a block should go before the one that it continues."""

    @abstractmethod
    def reuse(self, blocks: Sequence[int]) -> None:
        """A prefix hit on these blocks, in order of the sequence. Those that are evictable are no
        longer; others have users already."""

    @abstractmethod
    def evict(self, count: int) -> list[int]:
        """Take out the `count` blocks that go first; at least so many are evictable. Their content
        is forgotten."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of evictable blocks."""

    @abstractmethod
    def blocks(self) -> Iterable[int]:
        """The evictable blocks in any order, for tests and inspection."""

    def link(self, block: int, parent: int) -> None:  # noqa: B027
        """The content of `block` has just become reusable and continues that of `parent` (0: it
        begins a prefix). Override to follow chains; managers skip policies that do not."""


class Spec:
    @hookspec
    def octavo_eviction_policies(self) -> list[Provider[EvictionPolicy]]:  # type: ignore[empty-body]
        """Providers of eviction policies.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `EvictionPolicyContext`.
        """
