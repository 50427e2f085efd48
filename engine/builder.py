"""Composes an engine: workers first, then the KV pool that fits, then scheduler and loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from octavo.core.config.models import Choice
from octavo.core.contracts import KINDS
from octavo.core.contracts.executor import (
    Executor,
    ExecutorContext,
    WarmUp,
    Worker,
    WorkerChoice,
    WorkerReport,
)
from octavo.core.contracts.logits_processor import HostLogitsProcessor, LogitsProcessorContext
from octavo.core.contracts.observer import Observer, ObserverContext
from octavo.core.contracts.preemption_policy import PreemptionPolicy, PreemptionPolicyContext
from octavo.core.contracts.scheduler_policy import SchedulerPolicy, SchedulerPolicyContext
from octavo.core.contracts.tokenizer import Tokenizer
from octavo.core.errors import ConfigError
from octavo.core.plugin_faults import PluginTimes
from octavo.engine.core import EngineCore
from octavo.engine.device import limit_spinning
from octavo.plugins.structured_output.setup import make_grammars
from octavo.engine.kv import Room, check_length, make_manager, size_pools
from octavo.engine.observers import Observers
from octavo.engine.report import PluginChoice, StartupReport
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step import SchedulerLimits
from octavo.frontend.assembly import make_tokenizer

if TYPE_CHECKING:
    from octavo.core.config.resolve import Resolved
    from octavo.core.registry import Registry

DEFAULT_BUDGET = {"cpu": 512, "cuda": 8192}
"""`max_num_batched_tokens: auto` where nothing was measured, by device."""

Progress = Callable[[str], None]


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
    config = resolved.config
    worker = executor.start()
    budget, budget_reason = _token_budget(resolved, worker)
    max_num_seqs = min(config.scheduler.max_num_seqs, budget)
    max_model_len, block_size = _settled(resolved)
    room = Room(max_num_seqs, max_model_len, block_size)
    preemption: PreemptionPolicy = registry.create(
        resolved.selections["preemption_policy"],
        PreemptionPolicyContext(block_bytes=worker.block_bytes),
    )
    pools = size_pools(resolved, worker, room, preemption)
    groups = 1 + max(spec.group for spec in worker.kv_specs)
    kv = make_manager(resolved, registry, pools, room, groups)
    most = kv.fits(max_model_len)
    check_length(resolved, worker, pools, room, most)
    tell(f"making a KV cache of {pools.num_blocks * block_size:,} tokens")
    started = time.perf_counter()
    # One block more: the null block.
    warm = executor.allocate_kv(pools.num_blocks + 1, pools.num_host_blocks) or WarmUp()
    took = time.perf_counter() - started - sum(warm.phases.values())
    phases = {**worker.phases, "kv cache": max(0.0, took), **warm.phases}
    report = StartupReport(
        source=config.model.source,
        architecture=str((resolved.model_config.get("architectures") or ["?"])[0]),
        dtype=worker.dtype,
        device=resolved.platform.device,
        num_threads=_threads(resolved),
        num_parameters=worker.num_parameters,
        weight_bytes=worker.weight_bytes,
        activation_bytes=worker.activation_bytes,
        kv_bytes=pools.num_blocks * worker.block_bytes,
        num_blocks=pools.num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_sequence_tokens=max_model_len if most is None else most,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        budget_reason=budget_reason,
        pool_reason=pools.reason,
        num_swap_blocks=pools.num_swap_blocks,
        num_host_cache_blocks=pools.num_host_cache_blocks,
        plugins=_choices(resolved, worker),
        phases=phases,
        notes=(*worker.notes, *warm.notes, *_lost(resolved), *_pool_notes(most, max_model_len)),
        num_graphs=warm.num_graphs,
        graph_bytes=warm.graph_bytes,
        graph_bytes_estimated=worker.graph_bytes,
        memory=worker.memory,
    )

    def make_policy(choice: Any) -> SchedulerPolicy:
        selection = resolved.selections["scheduler_policy"]
        if choice is not None:
            selection = registry.select("scheduler_policy", Choice.model_validate(choice))
        policy: SchedulerPolicy = registry.create(
            selection, SchedulerPolicyContext(max_num_seqs, budget, clock, make_policy)
        )
        return policy

    scheduler = Scheduler(
        SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            vocab_size=worker.vocab_size,
            block_size=block_size,
            max_chunk_tokens=config.scheduler.max_chunk_tokens,
            chunked_prefill=config.scheduler.chunked_prefill,
        ),
        kv,
        make_policy(None),
        preemption,
        clock,
    )
    processors = _host_processors(
        resolved, registry, worker.vocab_size, max_num_seqs, max_model_len
    )
    with contextlib.ExitStack() as on_failure:
        observers = _observers(resolved, registry, report, on_failure)
        grammars = make_grammars(
            resolved,
            registry,
            worker.vocab_size,
            lambda: tokenizer or make_tokenizer(resolved, registry),
        )
        on_failure.callback(grammars.close)
        engine = EngineCore(
            scheduler,
            executor,
            host_processors=processors,
            observers=observers,
            report=report,
            resolved=resolved,
            clock=clock,
            timelines=config.observability.timelines,
            grammars=grammars,
            made=registry.made,
            plugin_times=registry.times,
        )
        on_failure.pop_all()  # from here on the engine closes them
    return engine


def _settled(resolved: Resolved) -> tuple[int, int]:
    """max_model_len and block_size, which `resolve` has made concrete."""
    max_model_len = resolved.config.model.max_model_len
    block_size = resolved.config.kv_cache.block_size
    assert max_model_len is not None, "resolve() left max_model_len open"
    assert isinstance(block_size, int), "resolve() left block_size open"
    return max_model_len, block_size


def _threads(resolved: Resolved) -> int | None:
    threads = resolved.config.executor.num_threads
    return threads if isinstance(threads, int) else None


def _token_budget(resolved: Resolved, worker: WorkerReport) -> tuple[int, str]:
    wanted = resolved.config.scheduler.max_num_batched_tokens
    if isinstance(wanted, int):
        if wanted < 1:
            raise ConfigError(
                f"must be at least 1, got {wanted}", path="scheduler.max_num_batched_tokens"
            )
        return wanted, "as configured"
    if worker.step_token_limit is not None:
        budget, reason = worker.step_token_limit, "measured: what half a second computes"
    else:
        device = resolved.platform.device
        budget, reason = DEFAULT_BUDGET.get(device, 2048), f"the default on {device}"
    # What was asked for is not cut short by what is found out here.
    scheduler, longest = resolved.config.scheduler, resolved.config.model.max_model_len or 0
    if "max_num_seqs" in scheduler.model_fields_set and scheduler.max_num_seqs > budget:
        budget, reason = scheduler.max_num_seqs, f"one token for each of max_num_seqs ({reason})"
    if not scheduler.chunked_prefill and longest > budget:
        budget, reason = longest, f"a whole prompt, without chunked prefill ({reason})"
    return budget, reason


def _lost(resolved: Resolved) -> Iterable[str]:
    """What users miss of implementations that cannot be used here, each once."""
    return dict.fromkeys(text for s in resolved.selections.values() for text in s.lost)


def _pool_notes(most: int | None, max_model_len: int) -> list[str]:
    """What a pool smaller than one full sequence means."""
    if most is None:
        return []
    return [
        f"the KV cache holds {most} tokens, fewer than max_model_len {max_model_len}: a longer"
        f" prompt is refused, and an output ends by length at {most} tokens"
    ]


def _choices(resolved: Resolved, worker: WorkerReport) -> tuple[PluginChoice, ...]:
    """Every plugin in use, with what the worker decided in place of what was planned."""
    listed = [
        (KINDS[selection.kind].config_path, selection) for selection in resolved.selections.values()
    ]
    if resolved.prefill_attention is not None:
        # `selections` has the one for decodes.
        listed = [item for item in listed if item[1].kind != "attention_backend"]
        listed += [
            ("attention.prefill", resolved.prefill_attention),
            ("attention.decode", resolved.selections["attention_backend"]),
        ]
    for key, selections in (
        ("logits_processors", resolved.logits_processors),
        ("observers", resolved.observers),
    ):
        listed += [(f"{key}[{index}]", selection) for index, selection in enumerate(selections)]
    choices = []
    for path, selection in listed:
        kind = selection.kind
        if path in ("attention.prefill", "attention.decode"):
            kind = f"{kind} ({path.partition('.')[2]})"
        used = worker.choices.get(kind) or WorkerChoice(
            name=selection.name,
            reason=resolved.reasons.get(path, selection.reason),
            distribution=selection.registered.distribution or "",
        )
        name = used.name
        if hasattr(selection.options, "choices"):
            parts = ", ".join(choice.name for choice in selection.options.choices())
            name = f"{name} [{parts}]"
        others = [item for item in selection.rejected if item[0] != used.name]
        choices.append(
            PluginChoice(
                kind=kind,
                name=name,
                reason=used.reason,
                distribution=used.distribution,
                rejected=(*used.refused, *others),
            )
        )
    return tuple(choices)


def _host_processors(
    resolved: Resolved,
    registry: Registry,
    vocab_size: int,
    max_num_seqs: int,
    max_model_len: int,
) -> list[HostLogitsProcessor]:
    """Those of the configured logits processors that run in this process."""
    context = LogitsProcessorContext(vocab_size, max_num_seqs, max_model_len)
    made: list[HostLogitsProcessor] = []
    for selection in resolved.logits_processors:
        factory = registry.factory(selection)
        if isinstance(factory, type) and not issubclass(factory, HostLogitsProcessor):
            continue  # the worker's
        processor = registry.create(selection, context)
        if isinstance(processor, HostLogitsProcessor):
            made.append(processor)
    return made


def _observers(
    resolved: Resolved, registry: Registry, report: StartupReport, on_failure: contextlib.ExitStack
) -> list[tuple[str, Observer]]:
    """Made in order; each is left to `on_failure` to be closed."""
    context = ObserverContext(report=report.as_dict())
    made: list[tuple[str, Observer]] = []
    for selection in resolved.observers:
        observer: Observer = registry.create(selection, context)
        made.append((selection.registered.label, observer))
        on_failure.callback(Observers(made[-1:]).close)
    return made
