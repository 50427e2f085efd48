"""What every KV cache manager promises."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.core.contracts.eviction_policy import EvictionPolicyContext
from octavo.core.contracts.kv_cache_manager import KVCacheManager, KVCacheManagerContext
from octavo.testing.conformance.base import (
    ConformanceSuite,
    NotApplicable,
    create,
    executed_lines,
)
from octavo.testing.conformance.kv_walk import LENGTH, SIZE, SLOTS, KVWalk
from octavo.testing.conformance.workload import SITUATIONS, run_situation

Tokens = np.ndarray[Any, np.dtype[np.int32]]


class KVCacheManagerSuite(ConformanceSuite):
    """Subclass it with `provider`, or override `make` (a `KVCacheManager` for the context)."""

    kind = "kv_cache_manager"

    def manager(self, num_blocks: int = 24, **changes: Any) -> KVCacheManager:
        """The manager under test: blocks of 4 tokens, 5 slots of 40 tokens by default."""
        uses = changes.pop("uses", None)
        values: dict[str, Any] = {
            "num_blocks": num_blocks,
            "block_size": SIZE,
            "max_num_seqs": SLOTS,
            "max_model_len": LENGTH,
            **changes,
        }
        if uses is None or "eviction" in uses:
            values["eviction"] = create(
                "eviction_policy", "lru", EvictionPolicyContext(values["num_blocks"])
            )
        manager = self.make(KVCacheManagerContext(**values))
        assert isinstance(manager, KVCacheManager), f"make returned {type(manager).__name__}"
        return manager

    def walk(self, seed: int, num_blocks: int = 24, **context: Any) -> KVWalk:
        """A random walk; the host offers are those that the manager says it uses."""
        uses = type(self.manager()).uses
        swap = context.pop("swap", 0) if "swap" in uses else 0
        cache = context.pop("cache", 0) if "host_cache" in uses else 0
        context.pop("swap", 0)
        context.pop("cache", 0)
        kv = self.manager(num_blocks, num_swap_blocks=swap, num_host_cache_blocks=cache, **context)
        return KVWalk(kv, num_blocks, swap + cache, context.get("num_groups", 1), seed)

    # ---- what a fresh one is ----------------------------------------------------------------

    def test_a_fresh_pool_is_empty(self) -> None:
        """All blocks but the null block are free, tables are int32[G, S, M] and zero."""
        kv = self.manager(num_groups=2)
        stats = kv.stats()
        width = -(-LENGTH // SIZE)
        assert stats.num_blocks == stats.num_free, f"{stats.num_free} of {stats.num_blocks} free"
        assert stats.num_evictable == 0, "a fresh pool has evictable blocks"
        assert kv.block_tables.dtype == np.int32, (
            f"block_tables are {kv.block_tables.dtype}, expected int32"
        )
        assert kv.block_tables.shape[:2] == (2, SLOTS), (
            f"block_tables have shape {kv.block_tables.shape}, expected (2, {SLOTS}, M)"
        )
        assert kv.block_tables.shape[2] >= width, (
            f"block_tables hold {kv.block_tables.shape[2]} blocks a slot, expected {width} at least"
        )
        assert not kv.block_tables.any(), "a fresh table names blocks"
        assert kv.num_slot_blocks.dtype == np.int32, f"counts are {kv.num_slot_blocks.dtype}"
        assert kv.num_slot_blocks.shape == (SLOTS,), f"counts are {kv.num_slot_blocks.shape}"

    def test_fits_says_what_can_ever_fit(self) -> None:
        """A request of `fits` tokens can be admitted into the empty pool, one more cannot."""
        kv = self.manager(8)
        most = next((total for total in range(LENGTH, 0, -1) if kv.fits(total) is None), 0)
        assert most == 7 * SIZE, f"7 blocks of {SIZE} tokens fit {most} tokens"
        told = kv.fits(most + 1)
        assert told == most, f"fits({most + 1}) says {told}, expected {most}"
        prompt = np.ones(most, np.int32)
        digest = kv.digest(prompt, [])
        assert kv.admit(0, digest, kv.lookup(digest, prompt), most) is not None, (
            f"{most} tokens do not fit though fits says so"
        )

    # ---- random walks -----------------------------------------------------------------------

    def test_walks_in_a_roomy_pool(self) -> None:
        """Blocks are conserved and every sequence reads its own tokens, with room for all."""
        for seed in range(6):
            self.walk(seed, 60).run(120)

    def test_walks_in_a_tight_pool(self) -> None:
        """The same where blocks are short, and cached content must go."""
        for seed in range(10):
            walk = self.walk(100 + seed, 12)
            walk.run(150)
            assert walk.num_moves["admit"], "nothing could ever be admitted"

    def test_walks_with_several_groups(self) -> None:
        """The same with two groups of layers."""
        for seed in range(4):
            self.walk(200 + seed, 24, num_groups=2).run(120)

    def test_walks_without_prefix_caching(self) -> None:
        """Without prefix caching nothing is found and nothing stays."""
        for seed in range(3):
            walk = self.walk(300 + seed, 16, prefix_caching=False)
            walk.run(120)
            stats = walk.kv.stats()
            assert stats.prefix_hits == 0, "prefix caching is off, but tokens were found"

    def test_walks_with_a_host_pool(self) -> None:
        """What is swapped out comes back as it was, in any slot, also from a small host pool."""
        if "swap" not in type(self.manager()).uses:
            raise NotApplicable("this manager does not swap")
        moved = 0
        for seed, swap in ((400, 3), (401, 8), (402, 12), (403, 12)):
            walk = self.walk(seed, 16, swap=swap)
            walk.run(150)
            moved += walk.num_moves["swap_in"]
        assert moved, "nothing ever came back from the host pool"

    def test_walks_with_a_host_cache(self) -> None:
        """Evicted content that went to the host comes back as it was."""
        if "host_cache" not in type(self.manager()).uses:
            raise NotApplicable("this manager keeps no evicted content on the host")
        for seed in range(5):
            self.walk(500 + seed, 12, cache=(1, 4, 16)[seed % 3], swap=3).run(150)

    # ---- sharing ----------------------------------------------------------------------------

    def test_a_shared_prefix_is_found_or_never(self) -> None:
        """After a prompt was computed, its full blocks are found again, unless the manager shares
        nothing at all; what differs is not found."""
        walk = self.walk(1, 60)
        prompt = np.arange(1, 17, dtype=np.int32)
        walk.admit_prompt(0, prompt, [])
        found = self._found(walk.kv, np.append(prompt, 99))
        assert found in (0, 16), f"{found} of 16 computed tokens were found"
        other = prompt.copy()
        other[0] = 77
        assert self._found(walk.kv, other) == 0, "a prompt with another first token was found"
        other = prompt.copy()
        other[9] = 77
        assert self._found(walk.kv, other) <= 9, "tokens behind a difference were found"

    def test_extra_keys_keep_requests_apart(self) -> None:
        """Requests whose extra keys differ never share."""
        walk = self.walk(2, 60)
        prompt = np.arange(1, 17, dtype=np.int32)
        longer = np.append(prompt, 99).astype(np.int32)
        walk.admit_prompt(0, prompt, [b"a"])
        for extra in ([], [b"b"], [b"a", b"b"]):
            digest = walk.kv.digest(longer, extra)
            found = walk.kv.lookup(digest, longer).num_tokens
            assert found == 0, f"a request with keys {extra} found content of one with [b'a']"

    def test_a_sequence_that_is_cut_back_leaves_others_alone(self) -> None:
        """Cut back into a block that others use or may find, and continued differently, a sequence
        changes nothing of theirs."""
        for total in (3, 6, 9):
            walk = self.walk(total, 60)
            prompt = np.arange(1, 17, dtype=np.int32)
            walk.admit_prompt(0, prompt, [])
            walk.admit_prompt(1, np.append(prompt, 99).astype(np.int32), [])
            walk.cut(0, total)
            walk.grow(0, 16 - total)
            walk.check()
            walk.admit_prompt(2, np.append(prompt, 98).astype(np.int32), [])
            walk.check()
            for slot in (1, 2):
                walk.cut(slot, total + 1)
            walk.finish()

    def test_nothing_is_found_before_it_was_committed(self) -> None:
        """Blocks are shared only once their KV has been computed."""
        kv = self.manager(60)
        prompt = np.arange(1, 17, dtype=np.int32)
        digest = kv.digest(prompt, [])
        assert kv.admit(0, digest, kv.lookup(digest, prompt), 16) is not None, "16 tokens fit not"
        found = self._found(kv, np.append(prompt, 99))
        assert found == 0, f"{found} tokens were found whose KV is not computed"

    def test_lookup_changes_nothing(self) -> None:
        """lookup leaves counts and tables alone, however often it is called."""
        walk = self.walk(3, 60)
        prompt = np.arange(1, 17, dtype=np.int32)
        walk.admit_prompt(0, prompt, [])
        walk.kv.release(0)
        before, tables = walk.kv.stats(), walk.kv.block_tables.copy()
        for _ in range(5):
            self._found(walk.kv, prompt)
        assert walk.kv.stats() == before, "lookup changes the counts"
        assert (walk.kv.block_tables == tables).all(), "lookup changes a table"

    @staticmethod
    def _found(kv: KVCacheManager, prompt: Tokens) -> int:
        tokens = prompt.astype(np.int32)
        return kv.lookup(kv.digest(tokens, []), tokens).num_tokens

    # ---- cost -------------------------------------------------------------------------------

    def test_a_decode_step_costs_by_borders_not_by_rows(self) -> None:
        """extend for rows that stay inside their blocks executes no Python a row."""
        cost = {}
        for rows in (16, 256):
            kv = self.manager(4 * rows + 1, max_num_seqs=rows, block_size=16, max_model_len=64)
            for slot in range(rows):
                prompt = np.full(3, slot % 90, np.int32)
                digest = kv.digest(prompt, [])
                kv.admit(slot, digest, kv.lookup(digest, prompt), 3)
            slots, totals = np.arange(rows, dtype=np.intp), np.full(rows, 4, np.int64)
            cost[rows] = executed_lines(lambda kv=kv, s=slots, t=totals: kv.extend(s, t))  # type: ignore[misc]
        assert cost[256] <= cost[16] + 100, f"extend: lines executed by rows: {cost}"

    # ---- in an engine -----------------------------------------------------------------------

    def test_engine_gives_every_request_its_own_tokens(self) -> None:
        """In an engine, whatever is short: every request ends with the tokens it would have alone,
        and no block is lost."""
        for where in SITUATIONS:
            for seed in range(2):
                run_situation(where, seed, manager=self._for_engine(where.engine))

    def _for_engine(self, settings: dict[str, Any]) -> KVCacheManager:
        num_blocks = settings.get("num_blocks", 400)
        return self.manager(
            num_blocks,
            max_num_seqs=settings.get("max_num_seqs", 8),
            max_model_len=96,
            prefix_caching=settings.get("prefix_caching", True),
            num_swap_blocks=settings.get("num_swap_blocks", 0),
        )
