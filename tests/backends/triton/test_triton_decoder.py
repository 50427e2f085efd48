"""Graph runner `triton` when the model changes while it is served."""

from __future__ import annotations

import pytest
from torch import nn

from octavo.testing.tiny_model import generate, make_engine, make_requests, write_tiny_model


class Doubled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, *more):
        return self.inner(x, *more) * 2


def replace_parts(model):
    """With another linear layer and other parameters the decoder stays fused."""
    model.layers[0].mlp.down = Doubled(model.layers[0].mlp.down)
    norm = model.layers[1].attention_norm
    norm.weight = nn.Parameter(norm.weight * -1, requires_grad=False)
    norm.scaled = norm.scaled * -1
    return True


def hook_a_layer(model):
    """The model computes itself."""
    model.layers[1].register_forward_hook(lambda module, inputs, output: output * -1.5)
    return False


@pytest.mark.parametrize("change", [replace_parts, hook_a_layer])
def test_a_changed_model_is_followed(tmp_path, change):
    folder = write_tiny_model(tmp_path / "model")
    tokens = []
    for runner in ("triton", "eager"):
        config = {
            "model": {"quantization": "none"},
            "attention": {"backend": "torch"},
            "sampler": {"backend": "torch"},
            "graph": {"runner": runner},
        }
        engine = make_engine(folder, config)
        worker = engine.executor._worker
        before = generate(engine, make_requests(1))
        fused = change(worker.model)
        worker.model.forward_version += 1
        engine.reset_prefix_cache()
        after = generate(engine, make_requests(1))
        assert after != before
        tokens.append((before, after))
        if runner == "triton":
            assert worker._graph_runner._fused == fused
        engine.close()
    assert tokens[0] == tokens[1]
