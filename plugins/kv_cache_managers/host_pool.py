"""Host memory of a KV cache manager: blocks of swapped sequences, and evicted content by hash."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class SwappedSequence:
    """A sequence in the host pool."""

    blocks: list[int]
    """Host blocks, in order."""
    num_tokens: int
    """Leading tokens of the sequence whose KV they hold."""
    state: Any
    """Whatever else the manager needs to bring it back."""


class SwapPool:
    """Host blocks 0 to `num_blocks` - 1, for preempted sequences."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._live: dict[int, SwappedSequence] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def put(self, count: int, num_tokens: int, state: Any) -> SwappedSequence | None:
        """Take `count` blocks; None when there are not so many."""
        if count > len(self._free):
            return None
        swapped = SwappedSequence([self._free.pop() for _ in range(count)], num_tokens, state)
        self._live[id(swapped)] = swapped
        return swapped

    def drop(self, swapped: SwappedSequence) -> None:
        """Free its blocks."""
        del self._live[id(swapped)]
        self._free.extend(reversed(swapped.blocks))

    def check(self) -> None:
        held = [block for swapped in self._live.values() for block in swapped.blocks]
        every = sorted(held + self._free)
        assert every == list(range(self.num_blocks)), "swap blocks were lost or are held twice"


class HostCache:
    """Evicted content by hash, least recently used first; host blocks from `first` on."""

    def __init__(self, first: int, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.queries = 0
        """Tokens looked up here, since start."""
        self.hits = 0
        """Tokens found here, since start."""
        self._first = first
        self._block_of: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(first + num_blocks - 1, first - 1, -1))

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._block_of

    def store(self, key: bytes) -> int | None:
        """The host block that takes the content of `key`, or None when there is nothing to copy: it
        is here already, or there is no room."""
        if key in self._block_of:
            self._block_of.move_to_end(key)
            return None
        if self._free:
            block = self._free.pop()
        elif self._block_of:
            block = self._block_of.popitem(last=False)[1]
        else:
            return None
        self._block_of[key] = block
        return block

    def take(self, key: bytes) -> int:
        """Keep the block of `key` from being reused by `store` until `put_back`."""
        return self._block_of.pop(key)

    def put_back(self, key: bytes, block: int) -> None:
        """Return what `take` took; it is now the most recently used."""
        self._block_of[key] = block

    def clear(self) -> None:
        """Forget everything."""
        self._free.extend(self._block_of.values())
        self._block_of.clear()

    def check(self) -> None:
        every = sorted([*self._free, *self._block_of.values()])
        wanted = list(range(self._first, self._first + self.num_blocks))
        assert every == wanted, "host cache blocks were lost or are held twice"
