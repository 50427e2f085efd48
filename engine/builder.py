"""Composes an engine: workers first, then the KV pool that fits, then scheduler and loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.core.config.models import ImplementationConfig
from octavo.core.contracts.engine_extension import EngineExtension, EngineExtensionContext
from octavo.core.contracts.executor import (
    Executor,
    ExecutorContext,
    WarmUp,
    Worker,
    WorkerReport,
)
from octavo.core.contracts.logits_processor import HostLogitsProcessor, LogitsProcessorContext
from octavo.core.contracts.observer import Observer, ObserverContext
from octavo.core.contracts.preemption_policy import PreemptionPolicy, PreemptionPolicyContext
from octavo.core.contracts.scheduler_policy import SchedulerPolicy, SchedulerPolicyContext
from octavo.core.contracts.tokenizer import Tokenizer
from octavo.core.errors import ConfigError
from octavo.core.registry.faults import PluginTimes
from octavo.engine.core import EngineCore
from octavo.engine.device import limit_spinning
from octavo.engine.extensions import SchedulerState
from octavo.engine.kv import Pools, Room, check_length, make_manager, size_pools
from octavo.engine.observers import Observers
from octavo.engine.report import StartupReport, plugin_choices
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step import SchedulerLimits
from octavo.engine.tokenizer import make_tokenizer

if TYPE_CHECKING:
    from octavo.core.registry import Registry
    from octavo.engine.resolve import Resolved

DEFAULT_BUDGET = {"cpu": 512, "cuda": 8192}
"""`max_num_batched_tokens: auto` where nothing was measured, by device."""

Progress = Callable[[str], None]


class TokenBudget(NamedTuple):
    """`max_num_batched_tokens`, and why it is so many."""

    max_num_batched_tokens: int
    reason: str


def build_engine(
    resolved: Resolved,
    registry: Registry,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
    tokenizer: Tokenizer | None = None,
) -> EngineCore:
    """Load the model and make an engine that is ready to answer. tokenizer: for structured output;
    None: the configured one, should a request need it.

    Raises the `OctavoError` that names what is wrong; whatever was started is stopped then.
    """
    tell = progress or (lambda _: None)
    if resolved.config.observability.plugin_times:
        registry.times = PluginTimes()
    tell(f"loading {resolved.config.model.source}")
    executor = _make_executor(resolved, registry, clock)
    try:
        return _build(resolved, registry, executor, tell, clock, tokenizer=tokenizer)
    except BaseException:
        executor.close()
        raise


def _make_executor(resolved: Resolved, registry: Registry, clock: Callable[[], float]) -> Executor:
    def make(rank: int, world: int) -> Worker:
        if resolved.platform.device == "cpu":
            limit_spinning()
        from octavo.engine.worker.worker import make_worker

        return make_worker(resolved, registry, rank, world)

    context = ExecutorContext(
        make_worker=make,
        engine_config=resolved.config.model_dump(mode="json"),
        model_config=resolved.model_config,
        clock=clock,
    )
    executor: Executor = registry.create(resolved.selections["executor"], context)
    return executor


def _build(
    resolved: Resolved,
    registry: Registry,
    executor: Executor,
    tell: Progress,
    clock: Callable[[], float],
    *,
    tokenizer: Tokenizer | None,
) -> EngineCore:
    worker = executor.start()
    budget = _token_budget(resolved, worker)
    room = _room(resolved, budget.max_num_batched_tokens)
    preemption: PreemptionPolicy = registry.create(
        resolved.selections["preemption_policy"],
        PreemptionPolicyContext(block_bytes=worker.block_bytes),
    )
    pools = size_pools(resolved, worker, room, preemption)
    groups = 1 + max(spec.group for spec in worker.kv_specs)
    kv = make_manager(resolved, registry, pools, room, groups)
    most = kv.fits(room.max_model_len)
    check_length(resolved, worker, pools, room, most)
    tell(f"making a KV cache of {pools.num_blocks * room.block_size:,} tokens")
    warm = _allocate(executor, pools)
    report = _report(resolved, worker, warm, budget=budget, room=room, pools=pools, longest=most)
    policy = _make_policy(resolved, registry, room, budget.max_num_batched_tokens, clock)
    limits = _limits(resolved, worker, room, budget.max_num_batched_tokens)
    scheduler = Scheduler(limits, kv, policy, preemption, clock)
    processors = _host_processors(resolved, registry, limits)
    with contextlib.ExitStack() as on_failure:
        observers = _observers(resolved, registry, report, on_failure)
        extensions = _extensions(resolved, registry, scheduler, tokenizer, on_failure)
        engine = EngineCore(
            scheduler,
            executor,
            host_processors=processors,
            observers=observers,
            extensions=extensions,
            owners=registry.owners,
        )
        on_failure.pop_all()  # from here on the engine closes them
    engine.report, engine.resolved = report, resolved
    return engine


def _allocate(executor: Executor, pools: Pools) -> WarmUp:
    """Allocate the KV pools and warm up; what the allocation alone took is among the phases."""
    started = time.perf_counter()
    # One block more: the null block.
    warm = executor.allocate_kv(pools.num_blocks + 1, pools.num_host_blocks) or WarmUp()
    took = time.perf_counter() - started - sum(warm.phases.values())
    return replace(warm, phases={"kv cache": max(0.0, took), **warm.phases})


def _report(
    resolved: Resolved,
    worker: WorkerReport,
    warm: WarmUp,
    *,
    budget: TokenBudget,
    room: Room,
    pools: Pools,
    longest: int | None,
) -> StartupReport:
    """longest: tokens of a sequence that fit into the KV cache; None: any number."""
    lost = dict.fromkeys(text for s in resolved.selections.values() for text in s.lost)
    return StartupReport(
        source=resolved.config.model.source,
        architecture=str((resolved.model_config.get("architectures") or ["?"])[0]),
        dtype=worker.dtype,
        device=resolved.platform.device,
        num_threads=_threads(resolved),
        num_parameters=worker.num_parameters,
        weight_bytes=worker.weight_bytes,
        activation_bytes=worker.activation_bytes,
        kv_bytes=pools.num_blocks * worker.block_bytes,
        num_blocks=pools.num_blocks,
        block_size=room.block_size,
        max_model_len=room.max_model_len,
        max_sequence_tokens=room.max_model_len if longest is None else longest,
        max_num_seqs=room.max_num_seqs,
        max_num_batched_tokens=budget.max_num_batched_tokens,
        budget_reason=budget.reason,
        pool_reason=pools.reason,
        num_swap_blocks=pools.num_swap_blocks,
        num_host_cache_blocks=pools.num_host_cache_blocks,
        plugins=plugin_choices(resolved, worker),
        phases={**worker.phases, **warm.phases},
        notes=(*worker.notes, *warm.notes, *lost, *_pool_notes(longest, room.max_model_len)),
        num_graphs=warm.num_graphs,
        graph_bytes=warm.graph_bytes,
        graph_bytes_estimated=worker.graph_bytes,
        memory=worker.memory,
    )


def _make_policy(
    resolved: Resolved, registry: Registry, room: Room, budget: int, clock: Callable[[], float]
) -> SchedulerPolicy:
    def make(choice: Any) -> SchedulerPolicy:
        """The configured policy for None, or one that it is composed of."""
        selection = resolved.selections["scheduler_policy"]
        if choice is not None:
            selection = registry.select(
                "scheduler_policy", ImplementationConfig.model_validate(choice)
            )
        policy: SchedulerPolicy = registry.create(
            selection, SchedulerPolicyContext(room.max_num_seqs, budget, clock, make)
        )
        return policy

    return make(None)


def _limits(resolved: Resolved, worker: WorkerReport, room: Room, budget: int) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=room.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=room.max_model_len,
        vocab_size=worker.vocab_size,
        block_size=room.block_size,
        max_chunk_tokens=resolved.config.scheduler.max_chunk_tokens,
        chunked_prefill=resolved.config.scheduler.chunked_prefill,
    )


def _room(resolved: Resolved, budget: int) -> Room:
    """What `resolve` has made concrete; no more sequences than a step has tokens."""
    max_model_len = resolved.config.model.max_model_len
    block_size = resolved.config.kv_cache.block_size
    assert max_model_len is not None, "resolve() left max_model_len open"
    assert isinstance(block_size, int), "resolve() left block_size open"
    return Room(min(resolved.config.scheduler.max_num_seqs, budget), max_model_len, block_size)


def _threads(resolved: Resolved) -> int | None:
    threads = resolved.config.executor.num_threads
    return threads if isinstance(threads, int) else None


def _token_budget(resolved: Resolved, worker: WorkerReport) -> TokenBudget:
    wanted = resolved.config.scheduler.max_num_batched_tokens
    if isinstance(wanted, int):
        if wanted < 1:
            raise ConfigError(
                f"must be at least 1, got {wanted}", path="scheduler.max_num_batched_tokens"
            )
        return TokenBudget(wanted, "as configured")
    if worker.step_token_limit is not None:
        budget, reason = worker.step_token_limit, "what this machine computes in 0.5 s"
    else:
        device = resolved.platform.device
        budget, reason = DEFAULT_BUDGET.get(device, 2048), f"the default on {device}"
    # What was asked for is not cut short by what is found out here.
    scheduler, longest = resolved.config.scheduler, resolved.config.model.max_model_len or 0
    if "max_num_seqs" in scheduler.model_fields_set and scheduler.max_num_seqs > budget:
        budget, reason = scheduler.max_num_seqs, f"one token for each of max_num_seqs ({reason})"
    if not scheduler.chunked_prefill and longest > budget:
        budget, reason = longest, f"a whole prompt, without chunked prefill ({reason})"
    return TokenBudget(budget, reason)


def _pool_notes(most: int | None, max_model_len: int) -> list[str]:
    """What a pool smaller than one full sequence means."""
    if most is None:
        return []
    return [
        f"the KV cache holds {most} tokens, fewer than max_model_len {max_model_len}: a longer"
        f" prompt is refused, and an output ends by length at {most} tokens"
    ]


def _host_processors(
    resolved: Resolved, registry: Registry, limits: SchedulerLimits
) -> list[HostLogitsProcessor]:
    """Those of the configured logits processors that run in this process."""
    context = LogitsProcessorContext(limits.vocab_size, limits.max_num_seqs, limits.max_model_len)
    processors: list[HostLogitsProcessor] = []
    for selection in resolved.logits_processors:
        factory = registry.factory(selection)
        if isinstance(factory, type) and not issubclass(factory, HostLogitsProcessor):
            continue  # the worker's
        processor = registry.create(selection, context)
        if isinstance(processor, HostLogitsProcessor):
            processors.append(processor)
    return processors


def _observers(
    resolved: Resolved, registry: Registry, report: StartupReport, on_failure: contextlib.ExitStack
) -> list[tuple[str, Observer]]:
    """Created in order; each is left to `on_failure` to be closed."""
    context = ObserverContext(report=report.as_dict())
    observers: list[tuple[str, Observer]] = []
    for selection in resolved.observers:
        observer: Observer = registry.create(selection, context)
        observers.append((selection.registered.label, observer))
        on_failure.callback(Observers(observers[-1:]).close)
    return observers


def _extensions(
    resolved: Resolved,
    registry: Registry,
    scheduler: Scheduler,
    tokenizer: Tokenizer | None,
    on_failure: contextlib.ExitStack,
) -> list[EngineExtension]:
    """Likewise."""
    context = EngineExtensionContext(
        state=SchedulerState(scheduler),
        clock=scheduler.clock,
        vocab_size=scheduler.limits.vocab_size,
        config=resolved.config.model_dump(mode="json"),
        selections=resolved.selections,
        create=registry.create,
        make_tokenizer=lambda: tokenizer or make_tokenizer(resolved, registry),
        plugin_times=registry.times.summary if registry.times is not None else dict,
    )
    extensions: list[EngineExtension] = []
    for selection in resolved.extensions:
        extension: EngineExtension = registry.create(selection, context)
        extensions.append(extension)
        on_failure.callback(extension.close)
    return extensions
