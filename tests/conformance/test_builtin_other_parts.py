"""The built-in executors, weight sources, tokenizers and observers keep their contracts."""

from __future__ import annotations

import pytest

from octavo.core.testing.conformance.base import registry
from octavo.core.testing.conformance.executor import ExecutorSuite
from octavo.core.testing.conformance.observer import ObserverSuite
from octavo.core.testing.conformance.tokenizer import TokenizerSuite
from octavo.core.testing.conformance.weight_source import WeightSourceSuite


def entry(kind, name):
    return registry().providers(kind)[name]


class TestLocal(ExecutorSuite):
    entry = entry("executor", "local")


class TestWire(ExecutorSuite):
    entry = entry("executor", "wire")


class TestThreaded(ExecutorSuite):
    entry = entry("executor", "threaded")


class TestSimulated(ExecutorSuite):
    entry = entry("executor", "simulated")
    options = {
        "accelerator": "h100",
        "model": {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 1000,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    }


class TestFolder(WeightSourceSuite):
    entry = entry("weight_source", "folder")


class TestDummy(WeightSourceSuite):
    entry = entry("weight_source", "dummy")
    options = {"std": 0.3}


class TestFast(TokenizerSuite):
    entry = entry("tokenizer", "fast")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestTransformers(TokenizerSuite):
    entry = entry("tokenizer", "transformers")


class TestStepTrace(ObserverSuite):
    entry = entry("observer", "step_trace")

    @pytest.fixture(autouse=True)
    def _own_file(self, tmp_path, monkeypatch):
        monkeypatch.setattr(TestStepTrace, "options", {"path": str(tmp_path / "trace.json")})
