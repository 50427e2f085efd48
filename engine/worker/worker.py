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
from octavo.engine.worker.phased_attention import PhasedAttention
from octavo.engine.worker.runner_setup import RegisterAttention, RunnerFactories, RunnerSettings

if TYPE_CHECKING:
    from octavo.core.registry import Registry, Selection
    from octavo.engine.resolve import Resolved


def make_worker(resolved: Resolved, registry: Registry, rank: int, world: int) -> Worker:
    """The worker of one rank. What it is made of is created when it loads."""
    if world != 1:
        raise ConfigError(
            f"this executor asked for rank {rank} of {world}, but a model is not split yet",
            path="executor.kind",
        )
    settings = _settings(resolved)
    return ModelRunner(settings, _Implementations(resolved, registry, settings).factories())


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


class _Implementations:
    """Creates what the configuration selects, in the worker's process."""

    def __init__(self, resolved: Resolved, registry: Registry, settings: RunnerSettings) -> None:
        self._resolved, self._registry, self._settings = resolved, registry, settings
        self._instead: dict[str, WorkerChoice] = {}

    def factories(self) -> RunnerFactories:
        return RunnerFactories(
            model=self._model,
            load_weights=self._load_weights,
            attention_backend=self._attention_backend,
            sampler=lambda context: self._create("sampler", context),
            graph_runner=lambda context: self._create("graph_runner", context),
            logits_processors=self._logits_processors,
            instead=self._instead,
            graph_batch_sizes=self._graph_batch_sizes(),
            label=self._label,
            blame=self._blame,
        )

    def _create(self, kind: str, context: Any) -> Any:
        return self._create_selected(kind, self._resolved.selections[kind], context)

    def _create_selected(self, shown: str, selection: Selection, context: Any) -> Any:
        """shown: what the startup report calls it."""
        implementation, used, refused = self._registry.create_best(selection, context)
        if refused:
            owner = used.registered.distribution or ""
            self._instead[shown] = WorkerChoice(used.name, used.reason, owner, refused)
        return implementation

    def _model(self, attention: RegisterAttention) -> CausalLM:
        config, settings = self._resolved.model_config, self._settings
        quantization = self._create(
            "quantization",
            QuantizationContext(
                config=config.get("quantization_config") or {},
                dtype=settings.dtype,
                device=settings.device,
            ),
        )
        model: CausalLM = self._create(
            "model",
            ModelContext(
                config=config,
                dtype=settings.dtype,
                device=settings.device,
                max_model_len=settings.max_model_len,
                quantization=quantization,
                attention=attention,
            ),
        )
        return model

    def _load_weights(self, model: CausalLM) -> None:
        assert self._resolved.weight_source is not None, "a worker needs a model"
        model.load_weights(self._resolved.weight_source.tensors())

    def _attention_backend(self, context: AttentionBackendContext) -> AttentionBackend:
        decode, prefill = (
            self._resolved.selections["attention_backend"],
            self._resolved.prefill_attention,
        )
        if prefill is None:
            backend: AttentionBackend = self._create("attention_backend", context)
            return backend
        return PhasedAttention(
            self._create_selected("attention_backend (prefill)", prefill, context),
            self._create_selected("attention_backend (decode)", decode, context),
            context,
        )

    def _logits_processors(
        self, context: LogitsProcessorContext
    ) -> list[tuple[str, DeviceLogitsProcessor]]:
        processors = []
        for selection in self._resolved.logits_processors:
            factory = self._registry.factory(selection)
            if isinstance(factory, type) and not issubclass(factory, DeviceLogitsProcessor):
                continue  # runs in the engine
            processor = self._registry.create(selection, context)
            if isinstance(processor, DeviceLogitsProcessor):
                processors.append((selection.registered.label, processor))
        return processors

    def _graph_batch_sizes(self) -> tuple[int, ...]:
        selection = self._resolved.selections["graph_runner"]
        runner = self._registry.factory(selection)
        if isinstance(runner, type) and issubclass(runner, GraphRunner):
            return runner.batch_sizes(selection.options, self._settings.max_num_seqs)
        return ()

    def _label(self, implementation: object) -> str:
        if isinstance(implementation, PhasedAttention):
            prefill, decode = map(self._label, (implementation.prefill, implementation.decode))
            return f"{prefill} for prefill and {decode} for decodes"
        return self._registry.owners.label(implementation)

    def _blame(self, error: BaseException) -> str:
        found = self._registry.owners.blame(error)
        return str(found) if found is not None else ""
