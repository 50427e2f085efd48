"""What every model implementation promises."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.contracts.model import AttentionFn, AttentionSpec, CausalLM, ModelContext
from octavo.core.contracts.quantization import QuantizationContext
from octavo.core.errors import WeightError
from octavo.testing.conformance import engine_run
from octavo.testing.conformance.base import ConformanceSuite, NotApplicable, create

if TYPE_CHECKING:
    import torch

TOKENS = [(7 * i * i + 3 * i) % 90 + 5 for i in range(24)]


class ModelSuite(ConformanceSuite):
    """Subclass it with `provider`, or override `make` (a `CausalLM` for the context).

    write_files: a small model that the implementation knows; by default a Llama of two layers.
    reference: its logits by another way, if there is one.
    """

    kind = "model"

    def write_files(self, folder: Path) -> None:
        """config.json, weights (safetensors) and tokenizer of a small model."""
        from octavo.testing.tiny_model import write_tiny_model

        write_tiny_model(folder)

    def reference(self, folder: Path, token_ids: Sequence[int]) -> torch.Tensor | None:
        """Logits [T, V] by transformers, None where that does not know the model."""
        import torch
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.eval()
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
        return logits

    # ---- doing ------------------------------------------------------------------------------

    def load(self, folder: Path) -> CausalLM:
        """The model under test with the weights of a folder."""
        from safetensors.torch import load_file

        model = self.build(folder)
        tensors = load_file(folder / "model.safetensors")
        model.load_weights(iter(tensors.items()))
        return model

    def build(self, folder: Path) -> CausalLM:
        """The model under test without weights."""
        import torch

        cpu = torch.device("cpu")
        quantization = create("quantization", "none", QuantizationContext({}, torch.float32, cpu))
        made = self.make(
            ModelContext(
                config=json.loads((folder / "config.json").read_text()),
                dtype=torch.float32,
                device=cpu,
                max_model_len=64,
                quantization=quantization,
                attention=_attention,
            )
        )
        assert isinstance(made, CausalLM), f"make returned {type(made).__name__}"
        return made

    @staticmethod
    def logits(model: CausalLM, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [T, V] of one whole sequence."""
        import torch

        with torch.inference_mode():
            positions = torch.arange(len(token_ids))
            return model.compute_logits(model.forward(torch.tensor(list(token_ids)), positions))

    # ---- promises ---------------------------------------------------------------------------

    def test_shapes_and_dtypes(self) -> None:
        """forward gives [T, E] for any T, compute_logits float32[R, V] for any rows of it."""
        import torch

        with tempfile.TemporaryDirectory() as name:
            self.write_files(Path(name))
            model = self.load(Path(name))
            for count in (1, 2, 17):
                tokens = torch.tensor(TOKENS[:count])
                with torch.inference_mode():
                    hidden = model.forward(tokens, torch.arange(count))
                    logits = model.compute_logits(hidden[-1:])
                assert hidden.shape[0] == count, f"{count} tokens gave {tuple(hidden.shape)}"
                assert tuple(logits.shape) == (1, model.vocab_size), f"{tuple(logits.shape)}"
                assert logits.dtype == torch.float32, f"logits are {logits.dtype}, expected float32"

    def test_kv_specs_are_complete(self) -> None:
        """kv_specs gives one a layer, in layer order, with sensible sizes."""
        with tempfile.TemporaryDirectory() as name:
            self.write_files(Path(name))
            model = self.build(Path(name))
            specs = model.kv_specs()
            assert [item.layer for item in specs] == list(range(model.num_layers)), (
                f"kv_specs names layers {[item.layer for item in specs]}, expected 0 to "
                f"{model.num_layers - 1} in order"
            )
            for item in specs:
                kinds = ("full", "window", "latent", "recurrent")
                assert item.kind in kinds, (
                    f"layer {item.layer} has kind {item.kind!r}, expected one of {kinds}"
                )
                assert item.num_kv_heads > 0, f"layer {item.layer} has no KV heads"
                assert item.head_size > 0, f"layer {item.layer} has no head size"

    def test_logits_are_those_of_the_reference(self) -> None:
        """Logits of every position equal the reference's within 1e-3."""
        with tempfile.TemporaryDirectory() as name:
            self.write_files(Path(name))
            wanted = self.reference(Path(name), TOKENS)
            if wanted is None:
                return
            got = self.logits(self.load(Path(name)), TOKENS)
            error = float((got - wanted).abs().max())
            assert error < 1e-3, f"logits differ by {error:.3g} from the reference"

    def test_later_tokens_do_not_matter(self) -> None:
        """The logits of a position depend on the tokens up to it only."""
        with tempfile.TemporaryDirectory() as name:
            self.write_files(Path(name))
            model = self.load(Path(name))
            whole, part = self.logits(model, TOKENS), self.logits(model, TOKENS[:9])
            error = float((whole[:9] - part).abs().max())
            assert error < 1e-3, f"logits of the first 9 tokens change by {error:.3g}"

    def test_positions_are_used(self) -> None:
        """Positions given to forward matter, not the place in the batch."""
        import torch

        with tempfile.TemporaryDirectory() as name:
            self.write_files(Path(name))
            model = self.load(Path(name))
            tokens = torch.tensor(TOKENS[:8])
            with torch.inference_mode():
                near = model.forward(tokens, torch.arange(8))
                far = model.forward(tokens, torch.arange(8) * 3)
            assert not near.allclose(far, atol=1e-6), "positions have no effect"

    def test_a_missing_tensor_is_named(self) -> None:
        """load_weights raises WeightError that names a tensor that is missing."""
        self._tensors_changed(lambda tensors, last: tensors.pop(last), "a missing tensor")

    def test_an_unknown_tensor_is_named(self) -> None:
        """load_weights raises WeightError that names a tensor that it does not know."""

        def change(tensors: dict[str, Any], last: str) -> None:
            tensors["model.layers.0.nobody.knows.weight"] = tensors[last]

        self._tensors_changed(change, "an unknown tensor", "nobody")

    def test_a_wrong_shape_is_named(self) -> None:
        """load_weights raises WeightError that names a tensor of another shape."""

        def change(tensors: dict[str, Any], last: str) -> None:
            tensors[last] = tensors[last][..., :-1].contiguous()

        self._tensors_changed(change, "a tensor of the wrong shape")

    def _tensors_changed(self, change: Any, what: str, named: str | None = None) -> None:
        from safetensors.torch import load_file

        with tempfile.TemporaryDirectory() as name:
            self.write_files(Path(name))
            tensors = load_file(Path(name) / "model.safetensors")
            last = sorted(name for name in tensors if "layers.1" in name or "layers" not in name)[0]
            change(tensors, last)
            try:
                self.build(Path(name)).load_weights(iter(tensors.items()))
            except WeightError as error:
                parts = [named] if named else [part for part in last.split(".") if len(part) > 4]
                if not any(part in str(error) for part in parts):
                    raise AssertionError(f"{what}: not named: {error}") from error
            else:
                raise AssertionError(f"{what} was accepted")

    def test_engine_gives_the_same_tokens_when_preempted(self) -> None:
        """A real engine gives the same tokens with room for all, and chunked and preempted."""
        from octavo.testing.tiny_model import generate, make_engine, make_requests

        with tempfile.TemporaryDirectory() as name:
            self.write_files(Path(name))
            chosen: engine_run.Config = {
                "model": {"implementation": {"name": engine_run.under_test(self)[1].name}}
            }
            results = []
            for where in ({}, engine_run.TIGHT):
                engine = make_engine(
                    name, engine_run.merged(where, chosen), [engine_run.under_test(self)]
                )
                try:
                    results.append(generate(engine, make_requests()))
                finally:
                    engine.close()
        assert results[0] == results[1], "tokens depend on preemption or chunking"


def _attention(layer: int, spec: AttentionSpec, cos_sin: torch.Tensor | None) -> AttentionFn:
    """Attention over one whole sequence, which must be the batch."""

    from octavo.kernels import RopeTable, apply_rope

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        if cos_sin is not None:
            cos, sin = RopeTable(cos_sin, spec.rope_interleaved).rows(positions)
            q = apply_rope(q, cos, sin, interleaved=spec.rope_interleaved)
            k = apply_rope(k, cos, sin, interleaved=spec.rope_interleaved)
        repeat = spec.num_heads // spec.num_kv_heads
        keys, values = (t.repeat_interleave(repeat, dim=1).transpose(0, 1) for t in (k, v))
        scores = spec.scale * q.transpose(0, 1) @ keys.transpose(1, 2)
        if spec.soft_cap is not None:
            scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
        distance = positions[:, None] - positions[None, :]
        hidden = distance < 0
        if spec.window is not None:
            hidden |= distance >= spec.window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return (weights @ values).transpose(0, 1).reshape(len(positions), -1)

    if spec.alibi or spec.sinks or spec.latent:
        raise NotApplicable(f"the suite computes no such layer: {spec}")
    return attend
