"""What every eviction policy promises."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.core.contracts.eviction_policy import EvictionPolicy, EvictionPolicyContext
from octavo.testing.conformance.base import ConformanceSuite, executed_lines
from octavo.testing.conformance.workload import SITUATIONS, run_situation

BLOCKS = 12


class EvictionPolicySuite(ConformanceSuite):
    """Subclass it with `provider`, or override `make` (an `EvictionPolicy` for the context)."""

    kind = "eviction_policy"

    def policy(self, num_blocks: int = BLOCKS) -> EvictionPolicy:
        """The policy under test, for a pool of `num_blocks`."""
        policy = self.make(EvictionPolicyContext(num_blocks))
        assert isinstance(policy, EvictionPolicy), f"make returned {type(policy).__name__}"
        return policy

    def test_a_fresh_policy_has_nothing_to_evict(self) -> None:
        """A fresh policy counts no evictable block."""
        policy = self.policy()
        assert len(policy) == 0, f"a fresh policy counts {len(policy)} blocks"
        assert not list(policy.blocks()), "a fresh policy lists blocks"
        assert policy.evict(0) == [], "evicting none must give an empty list"

    def test_each_block_is_evictable_or_not(self) -> None:
        """Whatever happens, exactly the retired blocks that were not reused can be evicted."""
        for seed in range(12):
            self._walk(np.random.default_rng(seed), self.policy(), 120)

    def _walk(self, random: Any, policy: EvictionPolicy, moves: int) -> list[int]:
        blank, order = set(range(1, BLOCKS)), list[int]()
        used, evictable = set[int](), set[int]()
        for _ in range(moves):
            move = ("fill", "fill", "retire", "retire", "reuse", "evict")[random.integers(6)]
            if move == "fill" and blank:
                block = min(blank)
                parents = [0, *sorted(used | evictable)]
                policy.link(block, parents[random.integers(len(parents))])
                blank.discard(block)
                used.add(block)
            elif move == "retire" and used:
                chosen = random.permutation(sorted(used))[: random.integers(1, 4)].tolist()
                policy.retire(chosen)
                evictable |= set(chosen)
                used -= set(chosen)
            elif move == "reuse" and used | evictable:
                known = sorted(used | evictable)
                chosen = random.permutation(known)[: random.integers(1, 4)].tolist()
                policy.reuse(chosen)
                evictable -= set(chosen)
                used |= set(chosen)
            elif move == "evict" and evictable:
                count = int(random.integers(1, len(evictable) + 1))
                taken = policy.evict(count)
                assert len(taken) == count, f"evict({count}) gave {len(taken)} blocks"
                assert len(set(taken)) == count, f"evict gave a block twice: {taken}"
                assert set(taken) <= evictable, f"evicted {taken}, evictable are {evictable}"
                evictable -= set(taken)
                blank |= set(taken)
                order += taken
            assert len(policy) == len(evictable), (
                f"counts {len(policy)} evictable blocks, expected {len(evictable)}"
            )
            listed = sorted(policy.blocks())
            assert listed == sorted(evictable), f"lists {listed}, expected {sorted(evictable)}"
        return order

    def test_equal_histories_give_equal_evictions(self) -> None:
        """Two policies that saw the same evict the same blocks in the same order."""
        first, second = (self._walk(np.random.default_rng(5), self.policy(), 150) for _ in range(2))
        assert first == second, f"evicted {first}, then {second}"

    def test_a_block_goes_before_the_one_it_continues(self) -> None:
        """Of one sequence that was used once, the tail is evicted first."""
        policy = self.policy()
        for block in range(1, 6):
            policy.link(block, block - 1)
        policy.retire([5, 4, 3, 2, 1])
        assert policy.evict(2) == [5, 4], "the tail of a sequence must go first"
        assert policy.evict(3) == [3, 2, 1], "the tail of a sequence must go first"

    def test_a_reused_block_is_safe(self) -> None:
        """A block that got a user again is not evicted before it is retired again."""
        policy = self.policy()
        for block in (1, 2, 3):
            policy.link(block, 0)
            policy.retire([block])
        policy.reuse([2])
        assert sorted(policy.evict(2)) == [1, 3], "a block in use was evicted"
        policy.retire([2])
        assert policy.evict(1) == [2], "a block that was retired again is not evictable"

    def test_an_evicted_block_starts_afresh(self) -> None:
        """A block that was evicted and filled anew carries nothing over: it can be linked, retired
        and evicted like a new one."""
        policy = self.policy()
        for parent in (0, 2, 0, 3):
            policy.link(1, parent)
            policy.retire([1])
            assert policy.evict(1) == [1], "the only evictable block was not evicted"
            assert len(policy) == 0, "an evicted block is still counted"

    def test_moves_cost_the_same_in_a_large_pool(self) -> None:
        """Retiring, reusing and evicting executes no more Python in a pool of 20,000 blocks than in
        one of 200, beyond a logarithm."""
        cost = {}
        for size in (200, 20_000):
            policy = self.policy(size + 1)
            for block in range(1, size + 1):
                policy.link(block, 0)
                policy.retire([block])
            cost[size] = executed_lines(lambda policy=policy: self._moves(policy))  # type: ignore[misc]
        assert cost[20_000] <= 3 * cost[200] + 200, f"lines executed by blocks: {cost}"

    @staticmethod
    def _moves(policy: EvictionPolicy) -> None:
        for block in (7, 9, 11, 13, 15):
            policy.reuse([block])
            policy.retire([block])
        policy.evict(5)

    def test_engine_gives_every_request_its_own_tokens(self) -> None:
        """In an engine with the `paged` manager, whatever is short: every request ends with the
        tokens it would have alone."""
        for where in SITUATIONS:
            for seed in range(2):
                num_blocks = where.engine.get("num_blocks", 400)
                run_situation(where, seed, eviction=self.policy(num_blocks))
