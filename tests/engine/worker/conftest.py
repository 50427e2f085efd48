"""A tiny model of random weights from transformers, and runners of it made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from octavo.backends.attention.torch_attention import TorchAttention
from octavo.backends.graph_runners.eager import EagerRunner
from octavo.backends.quantization.none import Unquantized
from octavo.core.contracts import NoOptions
from octavo.core.contracts.model import ModelContext
from octavo.core.contracts.quantization import QuantizationContext
from octavo.core.messages import AdmittedRow, StepPlan, StepResult
from octavo.core.sampling_params import SamplingParams
from octavo.engine.worker.model_runner import ModelRunner
from octavo.engine.worker.runner_setup import RunnerFactories, RunnerSettings
from octavo.plugins.samplers.torch_sampler import TorchSampler

CPU = torch.device("cpu")


@dataclass
class TinyModel:
    """config: config.json's mapping. reference: transformers' module."""

    config: dict[str, Any]
    reference: Any

    def runner(self, *, processors: Sequence[Any] = (), **settings: Any) -> ModelRunner:
        """A loaded runner on the CPU without a KV pool. Settings as in `RunnerSettings`."""
        values: dict[str, Any] = {
            "device": CPU,
            "dtype": torch.float32,
            "kv_dtype": torch.float32,
            "block_size": 4,
            "max_num_seqs": 6,
            "max_model_len": 64,
            "max_num_batched_tokens": 64,
            "num_threads": 1,
            "poison": True,
            **settings,
        }
        made = RunnerSettings(**values)
        return ModelRunner(made, self.parts(made, processors))

    def parts(self, settings: RunnerSettings, processors: Sequence[Any] = ()) -> RunnerFactories:
        from octavo.models.families.decoder import Decoder

        nothing = NoOptions()
        quantization = Unquantized(
            nothing, QuantizationContext({}, settings.dtype, settings.device)
        )
        return RunnerFactories(
            model=lambda attention: Decoder(
                nothing,
                ModelContext(
                    config=self.config,
                    dtype=settings.dtype,
                    device=settings.device,
                    max_model_len=settings.max_model_len,
                    quantization=quantization,
                    attention=attention,
                ),
            ),
            load_weights=lambda model: model.load_weights(self.reference.state_dict().items()),
            attention_backend=lambda context: TorchAttention(nothing, context),
            sampler=lambda context: TorchSampler(nothing, context),
            graph_runner=lambda context: EagerRunner(nothing, context),
            logits_processors=lambda context: [
                (f"processor {i}", make(context)) for i, make in enumerate(processors)
            ],
        )

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """transformers' logits float32[T, V]."""
        with torch.inference_mode():
            return self.reference(torch.tensor([list(token_ids)])).logits[0]

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy continuation by transformers' logits."""
        known = list(prompt)
        for _ in range(count):
            known.append(int(self.logits(known)[-1].argmax()))
        return known[len(prompt) :]


@pytest.fixture(scope="session")
def tiny_llama() -> TinyModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    return TinyModel(
        {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}, LlamaForCausalLM(config).eval()
    )


@dataclass
class Driver:
    """A scheduler made by hand: each slot has its own run of blocks, and a step computes what the
    test says."""

    block_size: int
    blocks_each: int
    num_groups: int = 1
    step: int = 0
    known: dict[int, list[int]] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)
    admitted: list[AdmittedRow] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    batch: tuple[int, ...] = ()
    layout: int = 0

    def block(self, slot: int, index: int) -> int:
        """Blocks of a slot lie apart and backwards, so that order and neighbourhood never help."""
        return 1 + slot + (self.blocks_each - 1 - index) * 16

    def admit(
        self, slot: int, tokens: Sequence[int], *, num_prompt: int | None = None, **sampling: Any
    ) -> None:
        self.known[slot], self.computed[slot], self.told[slot] = list(tokens), 0, 1
        params = sampling.pop("params", None) or SamplingParams(temperature=0, **sampling)
        self.admitted.append(
            AdmittedRow(
                slot=slot,
                handle=100 + slot,
                token_ids=np.asarray(tokens, np.int32),
                num_prompt=len(tokens) if num_prompt is None else num_prompt,
                num_computed=0,
                blocks=np.full((self.num_groups, 1), self.block(slot, 0), np.int32),
                sampling=params,
                seed=0,
            )
        )

    def release(self, slot: int) -> None:
        self.released.append(slot)
        del self.known[slot], self.computed[slot], self.told[slot]

    def plan(self, counts: dict[int, int], **changes: Any) -> StepPlan:
        """Compute `counts` tokens of each slot; decodes are put first."""

        def decodes(slot: int) -> bool:
            return counts[slot] == 1 and self.computed[slot] + 1 == len(self.known[slot])

        slots = tuple(sorted(counts, key=lambda slot: not decodes(slot)))
        if slots != self.batch:
            self.batch, self.layout = slots, self.layout + 1
        appended = []
        for slot in slots:
            self.computed[slot] += counts[slot]
            needed = -(-self.computed[slot] // self.block_size)
            for index in range(self.told[slot], needed):
                appended += [
                    (group, slot, index, self.block(slot, index))
                    for group in range(self.num_groups)
                ]
            self.told[slot] = max(self.told[slot], needed)
        sample = [i for i, s in enumerate(slots) if self.computed[s] == len(self.known[s])]
        values: dict[str, Any] = {
            "step": self.step,
            "slots": np.asarray(slots, np.int32),
            "counts": np.asarray([counts[slot] for slot in slots], np.int32),
            "num_decodes": sum(
                counts[s] == 1 and self.computed[s] == len(self.known[s]) for s in slots
            ),
            "sample_rows": np.asarray(sample, np.int32),
            "layout": self.layout,
            "released": np.asarray(self.released, np.int32),
            "appended": np.asarray(appended, np.int32).reshape(-1, 4).T,
            "copies": np.zeros((5, 0), np.int32),
            "admitted": self.admitted,
            **changes,
        }
        self.step += 1
        self.admitted, self.released = [], []
        return StepPlan(**values)

    def take(self, plan: StepPlan, result: StepResult) -> dict[int, int]:
        """Append what was sampled; slot to token."""
        slots = plan.slots[plan.sample_rows].tolist()
        tokens = dict(zip(slots, result.token_ids[:, 0].tolist(), strict=True))
        for slot, token in tokens.items():
            self.known[slot].append(token)
        return tokens

    def run(self, runner: ModelRunner, counts: dict[int, int], **changes: Any) -> dict[int, int]:
        plan = self.plan(counts, **changes)
        runner.forward(plan)
        return self.take(plan, runner.sample(None))


@pytest.fixture(scope="session")
def new_driver() -> Callable[[], Driver]:
    return lambda: Driver(block_size=4, blocks_each=16)


@pytest.fixture
def driver(new_driver: Callable[[], Driver]) -> Driver:
    return new_driver()
