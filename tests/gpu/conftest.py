"""Tests that need a CUDA device: `make gpu-test`. A short table within eight minutes comes last.

pytest tests/gpu --gpu-device cpu     a rehearsal: every test function runs once, as far as a CPU
                                      can, so that what is wrong with a test is found without a GPU
pytest tests/gpu --gpu-seconds 200    tests that begin later are skipped
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

ORDER = ("demo", "engine", "families", "ahead", "memory", "kernels", "attention")
"""Modules, what users meet first: time may run out."""


def pytest_addoption(parser):
    group = parser.getgroup("GPU tests")
    group.addoption("--gpu-device", choices=["cuda", "cpu"], help="cpu: a rehearsal")
    group.addoption("--gpu-seconds", type=float, default=450.0, help="time limit (450)")
    group.addoption("--gpu-test-seconds", type=float, default=150.0, help="of one test (150)")


def pytest_configure(config):
    """`outcome.py`, next to this file, tells what became of the tests, where they are asked for."""
    if not hasattr(config.option, "gpu_seconds"):
        return  # of the whole suite, whose GPU tests are found too late for options
    # Torch is imported here, where what it may warn of on another machine is no error yet.
    if not _rehearsing(config) and _device_name() is not None:
        # tests/conftest.py sets it where it sees no GPU; a container may hide one from it.
        os.environ.pop("TRITON_INTERPRET", None)
    spec = importlib.util.spec_from_file_location(
        "octavo_gpu_outcome", Path(__file__).with_name("outcome.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config.pluginmanager.register(module.Outcome(config), "octavo-gpu-outcome")


def _rehearsing(config):
    return config.getoption("gpu_device", None) == "cpu"


def _device_name():
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


# ---- what runs -----------------------------------------------------------------------------------


def pytest_collection_modifyitems(config, items):
    mine = [item for item in items if item.path.parent.name == "gpu"]
    if not mine:
        return
    rehearsing = _rehearsing(config)
    missing = not rehearsing and _device_name() is None
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        # What the libraries of another machine warn of is no failure of ours.
        item.add_marker(pytest.mark.filterwarnings("default"))
        if missing:
            item.add_marker(pytest.mark.skip(reason="no CUDA device is here"))
    kept = _one_each(mine) if rehearsing else mine
    dropped = [item for item in mine if item not in kept]
    config.hook.pytest_deselected(items=dropped)
    chosen = sorted(kept, key=_rank)
    items[:] = [item for item in items if item not in mine] + chosen


def _rank(item):
    """By module; what takes long for what few use comes last."""
    name = item.path.stem.removeprefix("test_gpu_")
    return "flex" in item.name, ORDER.index(name) if name in ORDER else len(ORDER)


def _one_each(items):
    """The first case of each test function."""
    found = {}
    for item in items:
        found.setdefault((item.path, item.originalname), item)
    return list(found.values())


@pytest.fixture(scope="session")
def rehearsing(pytestconfig):
    return _rehearsing(pytestconfig)


@pytest.fixture(scope="session")
def device(rehearsing):
    return "cpu" if rehearsing else "cuda"


@pytest.fixture(autouse=True)
def seeded():
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def require_flashinfer(rehearsing):
    """`require_flashinfer()` skips a test where FlashInfer has no kernels, with the reason. To see
    that, a small one is loaded, or compiled."""
    why = None
    if not rehearsing:
        try:
            import flashinfer

            flashinfer.page.get_page_module()
        except Exception as error:
            why = f"FlashInfer: {type(error).__name__}: {' '.join(str(error).split())}"

    def require_flashinfer():
        if why is not None:
            pytest.skip(why[:300])

    return require_flashinfer


# ---- engines -------------------------------------------------------------------------------------

ATTENTION = {
    "torch": {"backend": "torch"},
    "triton": {"backend": "triton"},
    "flex": {"backend": "flex"},
    "flashinfer": {"backend": "flashinfer"},
    "mixed": {"prefill": "flashinfer", "decode": "triton"},
    "auto": {"backend": "auto"},
}
REFERENCE = {
    "attention": {"backend": "torch"},
    "sampler": {"backend": "torch"},
    "graph": {"runner": "eager"},
}


class Answers:
    """What a run gave, a request each: `tokens`, `top` (for each position [token, log probability],
    best first, where they were asked for), `reasons`."""

    def __init__(self, count):
        self.outputs = [{"tokens": [], "top": []} for _ in range(count)]
        self.reasons = [None] * count

    @property
    def tokens(self):
        return [output["tokens"] for output in self.outputs]

    def take(self, outputs):
        """One step's message."""
        tops = {}
        if outputs.logprobs is not None:
            columns = outputs.logprobs
            for place, row in enumerate(columns.rows.tolist()):
                pairs = zip(columns.token_ids[place, 1:], columns.values[place, 1:], strict=True)
                tops[row] = [(int(token), float(value)) for token, value in pairs]
        for row, handle in enumerate(outputs.handles.tolist()):
            self.outputs[handle - 1]["tokens"].append(int(outputs.token_ids[row, 0]))
            if row in tops:
                self.outputs[handle - 1]["top"].append(tops[row])
        for finish in outputs.finished:
            assert finish.error is None, finish.error
            self.reasons[finish.handle - 1] = finish.reason

    def check_like(self, other, dtype):
        """Greedy tokens with log probabilities are another run's, up to what rounding explains."""
        from octavo.bench.compare.outputs import compare_greedy

        found = compare_greedy(self.outputs, other.outputs, dtype)
        assert found["verdict"] in ("identical", "rounding"), found


def _config(device, rehearsing, source, dtype, parts):
    mapping = {
        "model": {"source": str(source), "dtype": dtype, "quantization": "none"},
        "kv_cache": {"num_blocks": 60},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
        "executor": {"device": device},
        "attention": {},
        "sampler": {},
    }
    for section, values in parts.items():
        if section == "attention":
            values = ATTENTION[values]
        mapping.setdefault(section, {}).update(values)
    if rehearsing:
        _rehearse(mapping)
    return mapping


def _rehearse(mapping):
    """What a CPU has in place of backends, samplers and graph runners, and is quick."""
    stand_in = "cpu" if mapping["model"]["dtype"] == "float32" else "torch"
    stand_ins = {
        "attention": {"triton": stand_in, "flashinfer": stand_in},
        "sampler": {"triton": "cpu", "flashinfer": "cpu"},
        "graph": {"triton": "eager", "compile": _NO_CODE, "cuda_graph": _NO_CODE},
    }
    for section, names in stand_ins.items():
        for key, value in mapping.get(section, {}).items():
            name = value if isinstance(value, str) else value["name"]
            mapping[section] = {**mapping[section], key: names.get(name, value)}


_NO_CODE = {"name": "compile", "backend": "eager"}


@pytest.fixture(scope="session")
def make_engine(device, rehearsing, request):
    """`make_engine(source, dtype, **configuration)`: the caller closes it. attention: a name of
    `ATTENTION`."""
    from octavo.core.errors import PluginUnavailable
    from octavo.core.registry import Registry
    from octavo.engine.builder import build_engine
    from octavo.engine.resolve import resolve
    from octavo.frontend.config import load_config

    def make(source, dtype="float32", **parts):
        mapping = _config(device, rehearsing, source, dtype, parts)
        if "flashinfer" in [*mapping["attention"].values(), *mapping["sampler"].values()]:
            request.getfixturevalue("require_flashinfer")()
        registry = Registry.discover()
        try:
            resolved = resolve(load_config(mapping=mapping), registry)
        except PluginUnavailable as error:
            pytest.skip(str(error))
        return build_engine(resolved, registry)

    return make


@pytest.fixture(scope="session")
def answer(make_engine):
    """`answer(source, requests, dtype, abort_at=..., **configuration)`: an engine's answers to
    [(prompt, parameters)], all sent at once. abort_at: by request's number, after how many tokens
    it is aborted."""
    from octavo.core.messages import EngineRequest
    from octavo.core.sampling_params import SamplingParams

    def run(engine, requests, abort_at):
        answers = Answers(len(requests))
        for handle, (prompt, params) in enumerate(requests, 1):
            sampling = SamplingParams(**{"max_tokens": 10, "ignore_eos": True, **params})
            engine.add(
                EngineRequest(
                    handle=handle,
                    request_id=str(handle),
                    token_ids=np.asarray(prompt, np.int32),
                    sampling=sampling,
                    seed=handle,
                    max_tokens=sampling.max_tokens,
                )
            )
        while engine.has_work():
            outputs = engine.step()
            if outputs is None:
                continue
            answers.take(outputs)
            for number, count in abort_at.items():
                if len(answers.tokens[number]) == count and answers.reasons[number] is None:
                    engine.abort([number + 1])
        return answers

    def answer(source, requests, dtype="float32", abort_at=None, **parts):
        import torch

        engine = make_engine(source, dtype, **parts)
        try:
            return run(engine, requests, abort_at or {})
        finally:
            engine.close()
            torch._dynamo.reset()  # code is kept by the class of a layer, for a few engines at most

    return answer


# ---- models --------------------------------------------------------------------------------------

_TINY = {
    "vocab_size": 500,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """`tiny(family, **changes)`: the folder of a random model of transformers, two layers, heads of
    64, spread so that greedy choices are never close."""
    made = {}

    def tiny(family="Llama", **changes):
        import torch
        import transformers

        key = (family, *sorted(changes.items()))
        if key not in made:
            torch.manual_seed(0)
            config = getattr(transformers, f"{family}Config")(**_TINY | changes)
            folder = tmp_path_factory.mktemp(family)
            getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
            made[key] = folder
        return made[key]

    return tiny


@pytest.fixture(scope="session")
def prompts():
    return [[5, 9, 3], list(range(10, 45)), list(range(10, 80)), [7] * 17]


@pytest.fixture(scope="session")
def requests_of(prompts):
    """`requests_of(**parameters)`: greedy and seeded requests in turn; with `greedy=True` greedy
    ones, with log probabilities."""

    def requests_of(greedy=False, **params):
        if greedy:
            return [(prompt, {"temperature": 0.0, "logprobs": 5, **params}) for prompt in prompts]
        return [
            (prompt, {"temperature": float(number % 2), "top_k": 30, **params})
            for number, prompt in enumerate(prompts, 1)
        ]

    return requests_of
