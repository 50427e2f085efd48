"""`make_worker`: from a resolved configuration to a model runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from octavo.core.contracts.attention_backend import AttentionBackend, AttentionBackendContext
from octavo.core.contracts.executor import Worker, WorkerChoice
from octavo.core.contracts.graph_runner import GraphRunner
from octavo.core.contracts.logits_processor import DeviceLogitsProcessor, LogitsProcessorContext
from octavo.core.contracts.model import CausalLM, ModelContext
from octavo.core.contracts.quantization import QuantizationContext
from octavo.core.errors import ConfigError
from octavo.engine.worker.model_runner import ModelRunner
from octavo.engine.worker.parts import RegisterAttention, RunnerParts, RunnerSettings
from octavo.engine.worker.phased_attention import PhasedAttention

if TYPE_CHECKING:
    from octavo.core.registry import Registry, Selection
    from octavo.engine.resolve import Resolved


def make_worker(resolved: Resolved, registry: Registry, rank: int, world: int) -> Worker:
    """The worker of one rank. Its parts are created when it loads."""
    if world != 1:
        raise ConfigError(
            f"this executor asked for rank {rank} of {world}, but a model is not split yet",
            path="executor.kind",
        )
    settings = _settings(resolved)
    return ModelRunner(settings, _parts(resolved, registry, settings))


def _settings(resolved: Resolved) -> RunnerSettings:
    config = resolved.config
    kv_dtype = config.kv_cache.dtype
    budget = config.scheduler.max_num_batched_tokens
    threads = config.executor.num_threads
    assert isinstance(config.kv_cache.block_size, int), "resolve settles the block size"
    assert config.model.max_model_len is not None, "resolve settles max_model_len"
    return RunnerSettings(
        device=torch.device(config.executor.device),
        dtype=_dtype(config.model.dtype),
        kv_dtype=_dtype(config.model.dtype if kv_dtype == "auto" else kv_dtype),
        block_size=config.kv_cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=config.model.max_model_len,
        max_num_batched_tokens=budget if isinstance(budget, int) else None,
        memory_utilization=config.kv_cache.memory_utilization,
        num_threads=threads if isinstance(threads, int) else None,
    )


def _dtype(name: str) -> torch.dtype:
    special = {"fp8": "float8_e4m3fn"}
    found = getattr(torch, special.get(name, name))
    assert isinstance(found, torch.dtype), f"{name} is no dtype"
    return found


def _parts(resolved: Resolved, registry: Registry, settings: RunnerSettings) -> RunnerParts:
    selections = resolved.selections

    instead: dict[str, WorkerChoice] = {}

    def create(kind: str, context: Any) -> Any:
        return create_selected(kind, selections[kind], context)

    def create_selected(shown: str, selection: Selection, context: Any) -> Any:
        made, used, refused = registry.create_best(selection, context)
        if refused:
            owner = used.registered.distribution or ""
            instead[shown] = WorkerChoice(used.name, used.reason, owner, refused)
        return made

    def build(attention: RegisterAttention) -> CausalLM:
        quantization = create(
            "quantization",
            QuantizationContext(
                config=resolved.model_config.get("quantization_config") or {},
                dtype=settings.dtype,
                device=settings.device,
            ),
        )
        model: CausalLM = create(
            "model",
            ModelContext(
                config=resolved.model_config,
                dtype=settings.dtype,
                device=settings.device,
                max_model_len=settings.max_model_len,
                quantization=quantization,
                attention=attention,
            ),
        )
        return model

    def load(model: CausalLM) -> None:
        assert resolved.weight_source is not None, "a worker needs a model"
        model.load_weights(resolved.weight_source.tensors())

    def attention(context: AttentionBackendContext) -> AttentionBackend:
        backend: AttentionBackend
        if resolved.prefill_attention is None:
            backend = create("attention_backend", context)
            return backend
        chosen = {"prefill": resolved.prefill_attention, "decode": selections["attention_backend"]}
        made = {
            phase: create_selected(f"attention_backend ({phase})", selection, context)
            for phase, selection in chosen.items()
        }
        return PhasedAttention(made["prefill"], made["decode"], context)

    def processors(context: LogitsProcessorContext) -> list[tuple[str, DeviceLogitsProcessor]]:
        made = []
        for selection in resolved.logits_processors:
            factory = registry.factory(selection)
            if isinstance(factory, type) and not issubclass(factory, DeviceLogitsProcessor):
                continue  # the engine's
            processor = registry.create(selection, context)
            if isinstance(processor, DeviceLogitsProcessor):
                made.append((selection.registered.label, processor))
        return made

    def label(made: object) -> str:
        if isinstance(made, PhasedAttention):
            return f"{label(made.prefill)} for prefill and {label(made.decode)} for decodes"
        return registry.made.label(made)

    def blame(error: BaseException) -> str:
        found = registry.made.blame(error)
        return str(found) if found is not None else ""

    runner = registry.factory(selections["graph_runner"])
    sizes: tuple[int, ...] = ()
    if isinstance(runner, type) and issubclass(runner, GraphRunner):
        sizes = runner.batch_sizes(selections["graph_runner"].options, settings.max_num_seqs)

    return RunnerParts(
        model=build,
        load_weights=load,
        attention_backend=attention,
        sampler=lambda context: create("sampler", context),
        graph_runner=lambda context: create("graph_runner", context),
        logits_processors=processors,
        instead=instead,
        graph_batch_sizes=sizes,
        label=label,
        blame=blame,
    )
