"""An engine around `FakeWorker`, for tests of policies, managers and the step loop.

Parts are chosen by name from the registry, or given as objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from octavo.core.config.models import COMPOSED, ImplementationConfig
from octavo.core.contracts.eviction_policy import EvictionPolicyContext
from octavo.core.contracts.kv_cache_manager import KVCacheManagerContext
from octavo.core.contracts.preemption_policy import PreemptionPolicyContext
from octavo.core.contracts.scheduler_policy import SchedulerPolicyContext
from octavo.core.messages import EngineRequest
from octavo.core.registry import Registry
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step import SchedulerLimits
from octavo.testing.fake_worker import FakeExecutor, FakeWorker

EOS = 7
"""The end token of `request`."""


@lru_cache(maxsize=1)
def _registry() -> Registry:
    return Registry.discover()


def _part(kind: str, part: Any, context: Any) -> Any:
    """A plugin by name (with options), or the object itself."""
    if isinstance(part, list):
        part = {"name": COMPOSED, "policies": part}
    if not isinstance(part, str | dict | ImplementationConfig):
        return part
    selection = _registry().select(kind, ImplementationConfig.model_validate(part))
    return _registry().create(selection, context)


def make_fake_engine(
    *,
    policy: Any = "fcfs",
    manager: Any = "paged",
    eviction: Any = "lru",
    preemption: Any = "recompute",
    num_blocks: int = 400,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 32,
    max_model_len: int = 96,
    num_swap_blocks: int = 0,
    num_host_cache_blocks: int = 0,
    prefix_caching: bool = True,
    in_flight: int = 1,
    chunked_prefill: bool = True,
    max_chunk: int | None = None,
    clock: Callable[[], float] | None = None,
    **core: Any,
) -> EngineCore:
    """An engine around a `FakeWorker`. clock: seconds; by default one that ticks once a call.
    `core` goes to `EngineCore` (observers, ...)."""
    ticks = itertools.count()
    now = clock or (lambda: float(next(ticks)))

    def make_policy(part: Any) -> Any:
        context = SchedulerPolicyContext(max_num_seqs, budget, now, make_policy)
        return _part("scheduler_policy", part, context)

    worker = FakeWorker(block_size=block_size)
    executor = FakeExecutor(worker, in_flight)
    executor.allocate_kv(num_blocks, num_swap_blocks + num_host_cache_blocks)
    kv_context = KVCacheManagerContext(
        num_blocks,
        block_size,
        max_num_seqs,
        max_model_len,
        prefix_caching=prefix_caching,
        num_swap_blocks=num_swap_blocks,
        num_host_cache_blocks=num_host_cache_blocks,
        eviction=_part("eviction_policy", eviction, EvictionPolicyContext(num_blocks)),
    )
    scheduler = Scheduler(
        SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            vocab_size=worker.vocab_size,
            block_size=block_size,
            max_chunk_tokens=max_chunk,
            chunked_prefill=chunked_prefill,
        ),
        _part("kv_cache_manager", manager, kv_context),
        make_policy(policy),
        _part("preemption_policy", preemption, PreemptionPolicyContext(1)),
        now,
    )
    return EngineCore(scheduler, executor, clock=now, **core)


def request(
    handle: int,
    tokens: Sequence[int],
    max_tokens: int = 8,
    *,
    parent: int | None = None,
    index: int = 0,
    priority: int = 0,
    user: str | None = None,
    **sampling: Any,
) -> EngineRequest:
    """A request for a fake engine; `sampling` goes to `SamplingParams`."""
    return EngineRequest(
        handle=handle,
        request_id=f"r{handle}",
        token_ids=np.asarray(tokens, np.int32),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        seed=0,
        max_tokens=max_tokens,
        eos_token_ids=[EOS],
        parent=parent,
        index=index,
        priority=priority,
        user=user,
    )


class Collector:
    """Follows one engine: tokens and end of every sequence; checks invariants after each step."""

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.errors: dict[int, str | None] = {}
        self.codes: dict[int, str | None] = {}

    def step(self) -> None:
        """One step of the engine."""
        outputs = self.engine.step()
        if outputs is not None:
            for handle, token in zip(
                outputs.handles.tolist(), outputs.token_ids[:, 0].tolist(), strict=True
            ):
                assert handle not in self.reasons, "a token after the end"
                self.tokens.setdefault(handle, []).append(token)
            for finish in outputs.finished:
                assert finish.handle not in self.reasons, "ended twice"
                self.reasons[finish.handle] = finish.reason
                self.errors[finish.handle] = finish.error
                self.codes[finish.handle] = finish.code
        self.engine.scheduler.kv.check()

    def run(self, limit: int = 5000) -> Collector:
        """Until nothing is left to do."""
        for _ in range(limit):
            if not self.engine.has_work():
                return self
            self.step()
        raise AssertionError("the engine does not come to an end")


def expected(req: EngineRequest, max_model_len: int = 96) -> list[int]:
    """What a sequence generates when nothing disturbs it."""
    worker = FakeWorker()
    tokens = req.token_ids.tolist()
    out: list[int] = []
    while len(out) < req.max_tokens and len(tokens) < max_model_len:
        token = worker.next_token(tokens, req.seed, req.index)
        tokens.append(token)
        out.append(token)
        if token == EOS and not req.sampling.ignore_eos:
            break
    return out


def assert_clean(engine: EngineCore) -> None:
    """Every block is free or evictable, every slot free, nothing waits."""
    stats = engine.scheduler.kv.stats()
    assert stats.num_free + stats.num_evictable == stats.num_blocks, "blocks are still in use"
    assert stats.num_free_swap_blocks == stats.num_swap_blocks, "host blocks are still in use"
    assert engine.scheduler.preemption.num_swapped == 0, "sequences are still counted as swapped"
    assert engine.scheduler.slots.num_free == engine.scheduler.limits.max_num_seqs
    assert not engine.scheduler.sequences, "sequences are left"
    assert len(engine.scheduler.policy) == 0, "the policy still holds requests"
