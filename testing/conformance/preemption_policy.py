"""What every preemption policy promises."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts.preemption_policy import (
    PreemptionAction,
    PreemptionPolicy,
    PreemptionPolicyContext,
    StepCost,
    Victim,
)
from octavo.testing.conformance.base import ConformanceSuite, executed_lines
from octavo.testing.conformance.workload import SITUATIONS, run_situation

BLOCK_BYTES = 1 << 20


class PreemptionPolicySuite(ConformanceSuite):
    """Subclass it with `provider`, or override `make` (a `PreemptionPolicy` for the context)."""

    kind = "preemption_policy"

    def policy(self) -> PreemptionPolicy:
        """The policy under test, for blocks of 1 MiB."""
        policy = self.make(PreemptionPolicyContext(BLOCK_BYTES))
        assert isinstance(policy, PreemptionPolicy), f"make returned {type(policy).__name__}"
        return policy

    def test_every_victim_gets_an_action(self) -> None:
        """decide gives RECOMPUTE or SWAP for every victim, from one token to very long ones, before
        anything was measured."""
        policy = self.policy()
        for victim in self._victims():
            action = policy.decide(victim)
            assert isinstance(action, PreemptionAction), f"decide gave {action!r} for {victim}"

    def test_swaps_is_true_to_its_word(self) -> None:
        """A policy that says it never swaps never answers SWAP."""
        policy = self.policy()
        self._observe(policy)
        answers = {policy.decide(victim) for victim in self._victims()}
        assert isinstance(policy.swaps, bool), f"swaps is {policy.swaps!r}"
        assert policy.swaps or PreemptionAction.SWAP not in answers, "swaps is False, but it swaps"

    def test_reasons_are_text(self) -> None:
        """reason gives text of one line after every decision."""
        policy = self.policy()
        for victim in self._victims():
            policy.decide(victim)
            reason = policy.reason()
            assert isinstance(reason, str), f"reason is {type(reason).__name__}"
            assert "\n" not in reason, f"the reason has several lines: {reason!r}"

    def test_odd_costs_are_taken(self) -> None:
        """observe takes steps that cost nothing, copied nothing or computed nothing, and every
        victim still gets an action."""
        policy = self.policy()
        for cost in (
            StepCost(0, 0, 0, 0.0, 0.0),
            StepCost(8, 0, 0, 0.01, 0.0),
            StepCost(0, 512, 4, 0.0, 0.0),
            StepCost(0, 512, 0, 1e9, 0.0),
            StepCost(1, 0, 1_000_000, 1e-9, 1e-9),
        ):
            policy.observe(cost)
            for victim in self._victims():
                assert isinstance(policy.decide(victim), PreemptionAction), f"after {cost}"

    def test_equal_histories_give_equal_decisions(self) -> None:
        """Two policies that saw the same decide the same."""
        first, second = self.policy(), self.policy()
        for policy in (first, second):
            self._observe(policy)
        for victim in self._victims():
            assert first.decide(victim) == second.decide(victim), f"they differ about {victim}"

    def test_deciding_is_not_learning(self) -> None:
        """Asking twice about one victim gives one answer."""
        policy = self.policy()
        self._observe(policy)
        for victim in self._victims():
            assert policy.decide(victim) == policy.decide(victim), f"changes its mind: {victim}"

    def test_memory_does_not_grow_with_steps(self) -> None:
        """observe costs the same after 20,000 steps as after ten."""
        policy, cost = self.policy(), {}
        steps = 0
        for until in (10, 20_000):
            while steps < until:
                policy.observe(StepCost(steps % 7, steps % 300, steps % 3, 0.01, 0.001))
                steps += 1
            step = StepCost(4, 100, 2, 0.01, 0.001)
            cost[until] = executed_lines(lambda step=step: policy.observe(step))  # type: ignore[misc]
            cost[until] += executed_lines(lambda: policy.decide(Victim(0, 1, 100, 7, 50)))
        assert cost[20_000] <= 2 * cost[10] + 100, f"lines executed by steps seen: {cost}"

    def test_engine_gives_every_request_its_own_tokens(self) -> None:
        """In an engine whose pool is too small: every request ends with the tokens it would have
        alone, with and without a host pool."""
        preempted = 0
        for where in SITUATIONS:
            for seed in range(3):
                settings: dict[str, Any] = {"preemption": self.policy()}
                engine = run_situation(where, seed, **settings)
                preempted += engine.metrics()["num_preemptions"]
        assert preempted, "nothing was ever preempted"

    @staticmethod
    def _victims() -> list[Victim]:
        return [
            Victim(slot, 100 + slot, tokens, -(-tokens // 16), free)
            for slot, (tokens, free) in enumerate(
                (tokens, free) for tokens in (1, 16, 500, 100_000) for free in (0, 3, 10_000)
            )
        ]

    @staticmethod
    def _observe(policy: PreemptionPolicy) -> None:
        for step in range(60):
            policy.observe(StepCost(step % 9, 17 * step % 400, step % 4, 0.002 * step, 0.0003))
