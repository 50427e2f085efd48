"""A radix tree over token ids whose nodes know which blocks hold the KV of their tokens.

An edge ends at any token, not only where a block does. Legend: P tokens a block.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class Node:
    """Tokens `start` to `end` of a prefix. `blocks` hold them: blocks[i] is block start // P + i of
    the prefix. The first one holds the whole block up to there, tokens of the ancestors included;
    the last one may be partly filled."""

    __slots__ = ("blocks", "children", "cuts", "parent", "stamp", "start", "tokens")

    def __init__(
        self, parent: Node | None, start: int, tokens: NDArray[np.int32], blocks: list[int]
    ) -> None:
        self.parent, self.start, self.tokens, self.blocks = parent, start, tokens, blocks
        self.children: dict[int, Node] = {}
        self.stamp = self.cuts = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Tip:
    """Where a prefix ended when it was last inserted, so that the next insertion starts there.
    Valid while the node still ends there and has not been cut since."""

    node: Node
    end: int
    cuts: int

    @property
    def is_valid(self) -> bool:
        node = self.node
        return node.parent is not None and node.end == self.end and node.cuts == self.cuts


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest known prefix of a lookup."""

    num_tokens: int
    node: Node
    """The node in which it ends."""
    blocks: list[int]
    """The blocks that hold its KV."""


class RadixTree:
    """One tree for each key of requests. hold, drop: called with a block that one node more, or
    one node less, refers to. busy: whether a block has a user, so that forgetting it frees nothing.
    """

    def __init__(
        self,
        block_size: int,
        hold: Callable[[int], None],
        drop: Callable[[int], None],
        busy: Callable[[int], bool],
    ) -> None:
        self.block_size = block_size
        self._hold, self._drop, self._busy = hold, drop, busy
        self._roots: dict[bytes, Node] = {}
        self._key_of: dict[Node, bytes] = {}
        # Leaves by time of use; an entry counts only while it carries its leaf's stamp.
        self._leaves: list[tuple[int, int, Node]] = []
        self._stamp = self._pushed = 0
        self.num_nodes = 0

    # ---- looking up -----------------------------------------------------------------------------

    def find(self, key: bytes, tokens: NDArray[np.int32], limit: int) -> PrefixMatch | None:
        """The longest known prefix of `tokens[:limit]`, or None when there is none."""
        node = self._roots.get(key)
        blocks: list[int] = []
        position = 0
        while node is not None:
            child = node.children.get(int(tokens[position])) if position < limit else None
            if child is None:
                break
            count = _common(child.tokens, tokens[position:limit])
            position += count
            first = child.start // self.block_size
            blocks[first:] = child.blocks[: -(-position // self.block_size) - first]
            node = child
            if count < len(child.tokens):
                break
        return PrefixMatch(position, node, blocks) if node is not None and position else None

    def touch(self, node: Node) -> None:
        """The node and what it continues were used now."""
        self._stamp += 1
        while node.parent is not None:
            node.stamp = self._stamp
            if not node.children:
                self._push(node)
            node = node.parent

    # ---- growing --------------------------------------------------------------------------------

    def insert(
        self,
        key: bytes,
        tokens: NDArray[np.int32],
        blocks: list[int],
        tip: Tip | None,
    ) -> Tip:
        """Make the prefix `tokens`, whose KV is in `blocks`, known. tip: what this returned the
        last time for a beginning of it. What was known before stays with its own blocks."""
        node, position = self._resume(key, tokens, tip)
        while position < len(tokens):
            child = node.children.get(int(tokens[position]))
            if child is None:
                node = self._grow(node, position, tokens, blocks)
                break
            count = _common(child.tokens, tokens[position:])
            position += count
            if position == len(tokens) and count < len(child.tokens):
                self.touch(child)  # nothing is new
                return Tip(child, -1, 0)
            node = self._split(child, position) if count < len(child.tokens) else child
        self.touch(node)
        return Tip(node, node.end, node.cuts)

    def _resume(self, key: bytes, tokens: NDArray[np.int32], tip: Tip | None) -> tuple[Node, int]:
        if tip is not None and tip.is_valid and tip.end <= len(tokens):
            return tip.node, tip.end
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Node(None, 0, np.empty(0, np.int32), [])
            self._key_of[root] = key
        return root, 0

    def _grow(
        self, node: Node, position: int, tokens: NDArray[np.int32], blocks: list[int]
    ) -> Node:
        """Add `tokens[position:]` below a node that ends there."""
        size = self.block_size
        added = blocks[position // size : -(-len(tokens) // size)]
        for block in added:
            self._hold(block)
        rest = tokens[position:].copy()
        if node.parent is not None and not node.children and position % size == 0:
            node.tokens = np.concatenate([node.tokens, rest])
            node.blocks.extend(added)
            return node
        child = Node(node, position, rest, added)
        node.children[int(rest[0])] = child
        self.num_nodes += 1
        return child

    def _split(self, node: Node, position: int) -> Node:
        """Cut a node in two at `position`; the upper half, a new node, is returned."""
        parent, size = node.parent, self.block_size
        assert parent is not None, "a root is never split"
        cut, first = position - node.start, node.start // size
        last = -(-position // size) - first
        upper = Node(parent, node.start, node.tokens[:cut], node.blocks[:last])
        if position % size:
            self._hold(upper.blocks[-1])  # both halves refer to the block that is cut
        upper.stamp = node.stamp
        parent.children[int(upper.tokens[0])] = upper
        node.blocks = node.blocks[position // size - first :]
        node.parent, node.start, node.tokens = upper, position, node.tokens[cut:]
        upper.children[int(node.tokens[0])] = node
        self.num_nodes += 1
        return upper

    # ---- shrinking ------------------------------------------------------------------------------

    def _push(self, node: Node) -> None:
        self._pushed += 1
        heapq.heappush(self._leaves, (node.stamp, self._pushed, node))
        if len(self._leaves) > 2 * self.num_nodes + 1024:
            self._leaves = [entry for entry in self._leaves if _is_current(entry)]
            heapq.heapify(self._leaves)

    def _oldest(self) -> Node | None:
        while self._leaves:
            entry = heapq.heappop(self._leaves)
            if _is_current(entry):
                return entry[2]
        return None

    def shrink(self) -> None:
        """Forget the last block of the leaf that was used least recently; of leaves in use only
        when there are no others (their blocks stay with their users)."""
        passed: list[Node] = []
        leaf = self._oldest()
        while leaf is not None and self._busy(leaf.blocks[-1]):
            passed.append(leaf)
            leaf = self._oldest()
        if leaf is None:
            leaf = passed.pop(0)
        for other in passed:
            self._push(other)
        self._cut(leaf)

    def _cut(self, leaf: Node) -> None:
        parent, size = leaf.parent, self.block_size
        assert parent is not None, "a root is no leaf"
        block = leaf.blocks.pop()
        end = (leaf.start // size + len(leaf.blocks)) * size
        leaf.cuts += 1
        if end > leaf.start:
            leaf.tokens = leaf.tokens[: end - leaf.start]
            self._push(leaf)
        else:
            del parent.children[int(leaf.tokens[0])]
            leaf.parent = None
            self.num_nodes -= 1
            if not parent.children and parent.parent is not None:
                self._push(parent)
            elif not parent.children:
                del self._roots[self._key_of.pop(parent)]
        self._drop(block)

    def clear(self) -> None:
        """Forget everything."""
        for node in self.nodes():
            for block in node.blocks:
                self._drop(block)
            node.parent = None
        self._roots.clear()
        self._key_of.clear()
        self._leaves.clear()
        self.num_nodes = 0

    def nodes(self) -> list[Node]:
        """All nodes but the roots, parents before children."""
        found: list[Node] = []
        open_: list[Node] = list(self._roots.values())
        while open_:
            children = list(open_.pop().children.values())
            found += children
            open_ += children
        return found


def _is_current(entry: tuple[int, int, Node]) -> bool:
    stamp, _, node = entry
    return node.parent is not None and not node.children and node.stamp == stamp


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of the common beginning."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length
