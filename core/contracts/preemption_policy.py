"""Kind `preemption_policy`: what happens to the KV of a request that gives way, victim by victim.

Runs in the engine process, on the engine thread, only when blocks are short.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

from octavo.core.contracts.provider import Provider, hookspec


class PreemptionAction(Enum):
    """What happens to a victim's blocks."""

    RECOMPUTE = "recompute"  # they are dropped
    SWAP = "swap"  # they move to the host pool


@dataclass(frozen=True, slots=True)
class Victim:
    """A sequence to be preempted."""

    slot: int
    handle: int
    num_computed: int  # tokens whose KV would be lost
    num_blocks: int  # that hold them
    host_blocks_free: int  # 0 without a host pool


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step took."""

    num_decodes: int  # rows
    num_prefill: int  # tokens of prompts or of recomputation
    num_copied_blocks: int  # between host and device, both directions
    compute_s: float  # forward pass and sampling
    copy_s: float


@dataclass(frozen=True)
class PreemptionPolicyContext:
    """What a factory gets."""

    block_bytes: int  # one block in all layers


class PreemptionPolicy(ABC):
    """Chooses recompute or swap for each victim."""

    swaps: bool = False  # whether `decide` ever returns SWAP; only then is there a host pool

    @abstractmethod
    def decide(self, victim: Victim) -> PreemptionAction:
        """What to do with this victim. SWAP falls back to RECOMPUTE when the host pool is full."""

    def reason(self) -> str:
        """Why the last `decide` decided as it did, for the step log; may be empty."""
        return ""

    def observe(self, cost: StepCost) -> None:  # noqa: B027
        """Called once per step with its cost; skipped for policies that do not override it."""


class Spec:
    @hookspec
    def octavo_preemption_policies(self) -> list[Provider[PreemptionPolicy]]:  # type: ignore[empty-body]
        """Providers of preemption policies.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `PreemptionPolicyContext`.
        """
