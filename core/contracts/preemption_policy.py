"""Kind `preemption_policy`: what happens to the KV of a request that gives way, victim by victim.

Runs in the engine process, on the engine thread, only when blocks are short.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

from octavo.core.contracts.provider import Provider, hookspec


class PreemptionAction(Enum):
    """RECOMPUTE drops the victim's blocks; SWAP moves them to the host pool."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Victim:
    """num_computed: tokens whose KV would be lost. num_blocks: blocks that hold them.
    host_blocks_free: free blocks of the host pool (0 when there is none)."""

    slot: int
    handle: int
    num_computed: int
    num_blocks: int
    host_blocks_free: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step took, in seconds. compute_s: forward pass and sampling. copy_s: copies between
    host and device of `num_copied_blocks` blocks (both directions). num_prefill: tokens of prompts
    or of recomputation, beside `num_decodes` decoding rows."""

    num_decodes: int
    num_prefill: int
    num_copied_blocks: int
    compute_s: float
    copy_s: float


@dataclass(frozen=True)
class PreemptionPolicyContext:
    """block_bytes: bytes of one block in all layers."""

    block_bytes: int


class PreemptionPolicy(ABC):
    """Chooses recompute or swap for each victim.

    swaps: whether `decide` ever answers SWAP. The host pool is made only then.
    """

    swaps: bool = False

    @abstractmethod
    def decide(self, victim: Victim) -> PreemptionAction:
        """What to do with this victim. SWAP falls back to RECOMPUTE when the host pool is full."""

    def reason(self) -> str:
        """Why the last `decide` decided as it did, for the step log. Empty: nothing to say."""
        return ""

    def observe(self, cost: StepCost) -> None:  # noqa: B027
        """Told once a step what it took. The core skips policies that do not override it."""


class Spec:
    @hookspec
    def octavo_preemption_policies(self) -> list[Provider[PreemptionPolicy]]:  # type: ignore[empty-body]
        """Providers of preemption policies.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `PreemptionPolicyContext`.
        """
