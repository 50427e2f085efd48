"""`ModelRunner`: one rank's worker. Prepare, forward, sample, on state that only plans change.

Legend: T tokens of the batch, B rows, R rows that sample, E hidden size, V vocabulary, G KV groups.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from octavo.core.contracts.executor import WarmUp, Worker, WorkerReport
from octavo.core.contracts.graph_runner import GraphRunner, GraphRunnerContext
from octavo.core.contracts.logits_processor import LogitsProcessorContext
from octavo.core.contracts.model import KVSpec
from octavo.core.contracts.sampler import SamplerContext
from octavo.core.errors import ConfigError
from octavo.core.messages import LogitMasks, StepPlan, StepResult
from octavo.engine.worker import profile
from octavo.engine.worker.attention_op import AttentionOp
from octavo.engine.worker.batch import BatchBuilder, StepBatch
from octavo.engine.worker.clock import device_clock
from octavo.engine.worker.kv_layout import block_bytes
from octavo.engine.worker.kv_pool import KVPool
from octavo.engine.worker.kv_setup import (
    Backends,
    kv_budget,
    layouts_of,
    make_backends,
    make_pool,
)
from octavo.engine.worker.logprobs import PromptLogprobsCollector
from octavo.engine.worker.measure import measure, timed
from octavo.engine.worker.mirror import Mirror
from octavo.engine.worker.out_of_memory import Phase, out_of_memory
from octavo.engine.worker.pending_step import ForwardPass, PendingResult, SamplingInputs
from octavo.engine.worker.probe_plan import probe_plan, probe_rows
from octavo.engine.worker.processors import ProcessorSet
from octavo.engine.worker.runner_setup import RunnerFactories, RunnerSettings
from octavo.engine.worker.sampling_state import SamplingState
from octavo.engine.worker.sampling_step import SamplingStep
from octavo.engine.worker.token_feed import TokenFeed
from octavo.engine.worker.transfer import Fence
from octavo.kernels import upload

_SUPPORT = ("none", "decode", "all")

_KEPT = {"settings", "asynchronous", "pool", "_factories", "_attention", "_step"}
"""What a closed runner still has."""


class ModelRunner(Worker):
    """Not thread-safe; all calls come from the thread that its executor chose."""

    def __init__(self, settings: RunnerSettings, factories: RunnerFactories) -> None:
        self.settings, self._factories = settings, factories
        self._attention = AttentionOp()
        self._kv_specs: list[KVSpec] = []
        self._backends: Backends = []
        self._step: tuple[ForwardPass, SamplingInputs] | None = None
        self._clock = device_clock(settings.device)
        self._staged = Fence(settings.device)
        self.asynchronous = settings.device.type == "cuda"
        self.pool: KVPool | None = None

    # ---- start ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def load(self) -> WorkerReport:
        phases: dict[str, float] = {}
        settings = self.settings
        if settings.num_threads is not None and settings.device.type == "cpu":
            torch.set_num_threads(settings.num_threads)
        with out_of_memory(Phase.WEIGHTS, settings.device):
            with timed(phases, "build model"):
                self.model = self._factories.model(self._attention.register)
            with timed(phases, "load weights"):
                self._factories.load_weights(self.model)
        self._forward_version = self.model.forward_version
        module = self.model
        assert isinstance(module, torch.nn.Module), "a CausalLM is a torch.nn.Module"
        self._kv_specs = list(self.model.kv_specs())
        self._create(module)
        found, graph_bytes = measure(
            settings, self._graph_runner, phases, set_pool=self._set_pool, run=self._probe
        )
        self.mirror.clear()
        self._drop_pool()
        parameters, weight_bytes = profile.weight_size(module)
        size = block_bytes(self._kv_specs, self._layouts, settings.block_size, settings.kv_dtype)
        budget, memory = kv_budget(
            settings,
            size,
            weights=weight_bytes,
            activations=found.activation_bytes,
            graphs=graph_bytes,
            tables=self._processors.device_bytes(),
        )
        return WorkerReport(
            kv_specs=tuple(self._kv_specs),
            num_parameters=parameters,
            weight_bytes=weight_bytes,
            activation_bytes=found.activation_bytes,
            block_bytes=size,
            kv_budget=budget,
            vocab_size=self.model.vocab_size,
            dtype=str(settings.dtype).removeprefix("torch."),
            step_token_limit=found.step_token_limit,
            phases=phases,
            choices=dict(self._factories.instead),
            graph_bytes=graph_bytes,
            memory=memory,
        )

    def _create(self, module: torch.nn.Module) -> None:
        settings, vocab_size = self.settings, self.model.vocab_size
        num_groups = 1 + max((spec.group for spec in self._kv_specs), default=0)
        max_tokens = settings.max_num_batched_tokens or 0
        self.mirror = Mirror(
            num_slots=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            block_size=settings.block_size,
            num_groups=num_groups,
        )
        self._builder = BatchBuilder(self.mirror, max_tokens=max_tokens, device=settings.device)
        self._backends = make_backends(
            settings, self._factories, self._kv_specs, self._attention.specs
        )
        self._layouts = layouts_of(
            settings,
            self._backends,
            self._kv_specs,
            self._attention.specs,
            self._factories.label,
        )
        self._sampler = self._factories.sampler(
            SamplerContext(vocab_size, settings.max_num_seqs, settings.device)
        )
        self._sampling = SamplingState(settings.max_num_seqs, vocab_size, settings.device)
        named = self._factories.logits_processors(
            LogitsProcessorContext(
                vocab_size, settings.max_num_seqs, settings.max_model_len, settings.device
            )
        )
        self._processors = ProcessorSet(
            [processor for _, processor in named],
            settings.max_num_seqs,
            [name for name, _ in named],
        )
        self._sampling_step = SamplingStep(
            self.mirror,
            self._sampling,
            self._processors,
            self._sampler,
            self._factories.label(self._sampler),
        )
        self._feed = TokenFeed(settings.max_num_seqs, settings.device)
        self._prompt_logprobs = PromptLogprobsCollector(
            self.mirror, self._sampling, self._sampler, self.model.compute_logits
        )
        self._graph_runner = self._factories.graph_runner(
            GraphRunnerContext(
                forward=self._call_model,
                model=module,
                device=settings.device,
                graph_support=min(
                    (backend.graph_support for _, backend in self._backends), key=_SUPPORT.index
                ),
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=max_tokens or profile.CUDA_BUDGET,
                attention_layers=self._attention.bound,
                attention_backends=[backend for _, backend in self._backends],
                dummy=self._dummy,
                label=self._factories.label,
                blame=self._factories.blame,
                draw=self._draw if self._sampler.captures else None,
            )
        )
        overridden = type(self._graph_runner).draw is not GraphRunner.draw
        self._draws = self._sampler.captures and overridden
        if type(self._graph_runner).padded_rows is not GraphRunner.padded_rows:
            self._builder.pad = self._graph_runner.padded_rows

    def _probe(self, tokens: int) -> None:
        """Compute so many prompt tokens, for `measure`."""
        plan = probe_plan(tokens, self.mirror, self.model.vocab_size)
        hidden = self._prepare_and_run(plan)[1]
        if self.settings.device.type == "cuda":
            self._probe_sampling(hidden[: self.settings.max_num_seqs])

    def _probe_sampling(self, hidden: torch.Tensor) -> None:
        """Draw a token for each of hidden [R, E] in the way that takes most memory: every row has
        filters and wants logprobs, which keep the logits as they were."""
        slots = np.arange(len(hidden), dtype=np.intp)
        for row in probe_rows(len(hidden)):
            self._sampling.attach(row)
        logits = self.model.compute_logits(hidden)
        kept = logits.clone()
        self._sampler.sample(logits, self._sampling.batch(slots, np.zeros(len(slots), np.int64)))
        del kept
        for slot in slots.tolist():
            self._sampling.release(slot)

    def _set_pool(self, num_blocks: int, num_host_blocks: int = 0, poison: bool = False) -> None:
        self._drop_pool()
        self.pool = make_pool(
            self.settings,
            self._backends,
            self._kv_specs,
            self._layouts,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            poison=poison,
        )
        self._attention.bind(self.pool.layers, self._backends)

    def _drop_pool(self) -> None:
        self.pool = None
        self._attention.unbind()
        if self.settings.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> WarmUp:
        if num_blocks < 2:
            raise ConfigError(
                f"the KV pool needs at least 2 blocks (one is the null block), got {num_blocks}",
                path="kv_cache.num_blocks",
            )
        with out_of_memory(Phase.POOL, self.settings.device):
            self._set_pool(num_blocks, num_host_blocks, self.settings.poison)
            phases = dict(self._graph_runner.warm_up())
            if self.asynchronous:
                with timed(phases, "first decodes"):
                    self._decode_first()
        assert self.pool is not None, "it was just made"
        self.pool.clear_null_block()
        captured = self._graph_runner.captured()
        return WarmUp(
            phases=phases,
            num_graphs=captured.num_graphs,
            graph_bytes=captured.num_bytes,
            notes=tuple(captured.notes),
        )

    def _decode_first(self) -> None:
        """Decodes of all size classes, and a draw. On a GPU, kernels are compiled when they are
        first launched, some anew for a class of batch sizes: not while somebody waits."""
        most = self.settings.max_num_seqs
        for rows in sorted({*(1 << power for power in range(most.bit_length())), most}):
            hidden = self._graph_runner.forward(*self._dummy(rows, 1), rows)
        self._draw(hidden[:1])

    @property
    def forward_version(self) -> int:
        return self.model.forward_version

    def _call_model(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Looked up at every call: a plugin may put another `forward` in its place."""
        return self.model.forward(token_ids, positions)

    def _renew(self) -> None:
        """The model's forward pass is another than before."""
        assert self.pool is not None, "the KV pool is not allocated"
        self._forward_version = self.model.forward_version
        if self.settings.device.type == "cuda":
            torch.cuda.synchronize(self.settings.device)
        self._graph_runner.invalidate()
        self.pool.clear_null_block()

    def _dummy(self, rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._staged.wait()
        batch = self._builder.dummy(rows, tokens)
        self._attention.plan(batch.groups)
        self._staged.set()
        return batch.token_ids, batch.positions

    # ---- a step ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        assert self._step is None, "the last step has not sampled"
        started = time.perf_counter()
        if self.model.forward_version != self._forward_version:
            self._renew()
        self._sampling_step.reserve()
        for slot in plan.released.tolist():
            self._sampling.release(slot)
            self._processors.release(slot)
        for row in plan.admitted:
            self._sampling.attach(row)
            self._processors.attach(row)
        batch, hidden, began, prepared = self._prepare_and_run(plan)
        prompt_logprobs = self._prompt_logprobs.collect(plan, batch, hidden)
        logits, rows = None, plan.sample_rows.size
        if not (self._draws and plan.num_decodes == plan.slots.size):
            if rows != batch.num_tokens:
                hidden = hidden.index_select(0, upload(batch.last[plan.sample_rows], hidden.device))
            logits = self.model.compute_logits(hidden) if rows else None
        step = ForwardPass(
            plan=plan,
            slots=batch.slots[plan.sample_rows],
            prompt_logprobs=prompt_logprobs,
            prepare_s=prepared - started,
            began=began,
            ended=self._clock.mark(),
        )
        self._step = step, SamplingInputs(hidden, logits)

    def _prepare_and_run(self, plan: StepPlan) -> tuple[StepBatch, torch.Tensor, Any, float]:
        """(batch, hidden [T, E], when the device began, when the host was ready to launch)."""
        assert self.pool is not None, "the KV pool is not allocated"
        self.mirror.apply(plan)
        if plan.copies.size:
            self.pool.copy(plan.copies)
        self._staged.wait()
        batch = self._builder.build(plan)
        self._attention.plan(batch.groups)
        self._staged.set()
        self._feed.fill(
            batch.token_ids,
            batch.slots,
            self._sampling_step.unfinished,
            decodes_only=plan.num_decodes == batch.slots.size,
        )
        self.pool.join()
        prepared, began = time.perf_counter(), self._clock.mark()
        hidden = self._graph_runner.forward(batch.token_ids, batch.positions, batch.num_decodes)
        self.mirror.advance(batch.slots, plan.counts)
        return batch, hidden, began, prepared

    def sample(self, masks: LogitMasks | None) -> StepResult:
        return self.launch(masks)()

    @torch.inference_mode()
    def launch(self, masks: LogitMasks | None) -> Callable[[], StepResult]:
        assert self._step is not None, "sample without a forward pass"
        (step, inputs), self._step = self._step, None
        assert self.pool is not None, "the KV pool is not allocated"
        graph_runner = self._graph_runner
        began, launched = self._clock.mark(), None
        if step.slots.size:
            launched = self._sampling_step.launch(
                step.slots,
                lambda: self._logits(inputs, step.slots.size),
                masks,
                None if inputs.logits is not None else lambda: graph_runner.draw(inputs.hidden),
            )
        copies = self.pool.take_host_copies()
        pending = PendingResult(step, launched, began, self._clock.mark(), copies)
        return lambda: pending.wait(self._sampling_step, self._clock)

    def _logits(self, inputs: SamplingInputs, rows: int) -> torch.Tensor:
        """float32[R, V]"""
        if inputs.logits is not None:
            return inputs.logits
        return self.model.compute_logits(inputs.hidden[:rows])

    def _draw(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `GraphRunnerContext.draw`."""
        batch = self._sampling.unfiltered(len(hidden))
        sampled = self._sampler.sample(self.model.compute_logits(hidden), batch)
        return sampled.token_ids, sampled.valid

    def close(self) -> None:
        """Let go of all that takes memory: whoever still holds a closed engine holds no weights, no
        KV cache and no graphs."""
        self._attention.close()
        self.pool = None
        self._step = None
        for name in vars(self).keys() - _KEPT:
            delattr(self, name)
        if self.settings.device.type == "cuda":
            gc.collect()  # layers and the graph runner that runs them know each other
            torch.cuda.empty_cache()
