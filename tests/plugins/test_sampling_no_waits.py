"""Nothing between a forward pass and its tokens makes the host wait for the device."""

from __future__ import annotations

import pkgutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from octavo.core.contracts import NoOptions
from octavo.core.contracts.logits_processor import AttachedRequest, LogitsProcessorContext
from octavo.core.contracts.sampler import SamplerContext, SamplingBatch, SamplingColumns
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.transfer import upload
from octavo.plugins.logits_processors import PROVIDERS
from octavo.plugins.samplers.torch_sampler import TorchSampler
from octavo.testing.conformance.device import WouldWait, asynchronous_device

V, SLOTS = 5000, 6
PROCESSORS = {provider.name: pkgutil.resolve_name(provider.factory) for provider in PROVIDERS}
EVERYTHING = {
    "logit_bias": {3: 1.0, 7: -2.0},
    "allowed_token_ids": [1, 2, 3],
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.1,
    "bad_words_token_ids": [[4], [5, 6]],
    "min_tokens": 3,
    "stop_token_ids": [9],
}


def request(slot: int, prompt: list[int], output: list[int]) -> AttachedRequest:
    return AttachedRequest(
        slot=slot,
        handle=slot,
        prompt=np.array(prompt, np.int32),
        output=np.array(output, np.int32),
        params=SamplingParams(**EVERYTHING),
        eos_token_ids=(11,),
    )


@pytest.mark.parametrize("name", list(PROCESSORS))
def test_processors(name):
    with asynchronous_device() as device:
        processor = PROCESSORS[name](NoOptions(), LogitsProcessorContext(V, SLOTS, 64, device))
        logits = torch.zeros(3, V, device=device)
        lives = [request(4, [1, 2], []), request(0, [], []), request(2, [5], [5])]
        for life in lives:
            assert processor.attach(life)
        for slots, rows in (([4, 0, 2], [0, 1, 2]), ([0, 2], [0, 2]), ([4], [1])):
            processor.apply(logits, np.array(slots), np.array(rows))
            processor.accept(np.array(slots), np.full(len(slots), 5, np.int32))
        processor.rollback(0, 1)
        processor.detach(2)
        assert processor.attach(request(2, list(range(70)), []))
        processor.apply(logits, np.array([2, 4]), np.array([0, 1]))


def held(processor) -> int:
    """Bytes of its tensors."""
    return sum(each.nbytes for each in vars(processor).values() if isinstance(each, torch.Tensor))


@pytest.mark.parametrize("name", list(PROCESSORS))
def test_processors_take_what_they_say(name):
    """The KV pool leaves so much free: exactly that from the first use on, and never more."""
    context = [V, SLOTS, 64]
    with asynchronous_device() as device:
        made = PROCESSORS[name](NoOptions(), LogitsProcessorContext(*context, device))
        most = held(made) + made.device_bytes()
        for slot in range(SLOTS):
            assert made.attach(request(slot, list(range(50 + slot)), [1, 2]))
            assert held(made) == most
        for _ in range(4):
            made.accept(np.arange(SLOTS), np.full(SLOTS, 5, np.int32))
        made.detach(3)
        assert made.attach(request(3, list(range(64)), []))
        assert held(made) == most
    made = PROCESSORS[name](NoOptions(), LogitsProcessorContext(*context))
    for slot in range(SLOTS):
        assert made.attach(request(slot, list(range(60)), [1, 2]))
        assert held(made) <= most
    assert held(made) == most, "on a CPU they grow, to the same size"


def test_an_attachment_that_fails_keeps_no_row():
    made = PROCESSORS["penalties"](NoOptions(), LogitsProcessorContext(V, SLOTS, 64))
    for _ in range(3 * SLOTS):
        with pytest.raises(RuntimeError):
            made.attach(request(0, [1, V + 1], [V + 1]))  # as where memory ends
    for slot in range(SLOTS):
        assert made.attach(request(slot, [1, 2], [3]))


def batch(device: torch.device, params: list[dict[str, float]]) -> SamplingBatch:
    """What a worker hands over, without its buffers."""
    host = SamplingColumns(
        np.array([row.get("temperature", 1.0) for row in params], np.float32),
        np.array([row.get("top_k", V) for row in params], np.int32),
        np.array([row.get("top_p", 1.0) for row in params], np.float32),
        np.array([row.get("min_p", 0.0) for row in params], np.float32),
    )
    zeros = np.zeros(len(params), np.int64)
    return SamplingBatch(
        len(params),
        *(
            upload(column, device)
            for column in (host.temperature, host.top_k, host.top_p, host.min_p, zeros, zeros)
        ),
        upload(zeros, device),
        all_greedy=not host.temperature.any(),
        any_top_k=bool((host.top_k < V).any()),
        any_top_p=bool((host.top_p < 1).any()),
        any_min_p=bool(host.min_p.any()),
        max_logprobs=-1,
        host=host,
    )


ROWS = {
    "greedy": [{"temperature": 0.0}] * 3,
    "temperature": [{}, {"temperature": 0.3}],
    "top_k": [{"top_k": 5}, {}],
    "top_k_large": [{"top_k": 3000}, {"top_k": 7}],
    "min_p": [{"min_p": 0.1}, {"min_p": 0.0}],
    "top_k_top_p": [{"top_k": 40, "top_p": 0.5}, {"top_k": 2}],
    "top_p": [{"top_p": 0.9}, {"top_p": 0.5, "min_p": 0.01}],
    "all": [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.2}],
}


@pytest.mark.parametrize("rows", [name for name in ROWS if name not in ("top_p", "all")])
def test_sampler_torch(rows):
    with asynchronous_device() as device:
        sampler = TorchSampler(NoOptions(), SamplerContext(V, SLOTS, device))
        found = sampler.sample(
            torch.zeros(len(ROWS[rows]), V, device=device), batch(device, ROWS[rows])
        )
    assert found.token_ids.shape == found.valid.shape == (len(ROWS[rows]),)


def test_sampler_torch_waits_to_see_whose_nucleus_is_wide():
    with asynchronous_device() as device:
        sampler = TorchSampler(NoOptions(), SamplerContext(V, SLOTS, device))
        logits, rows = torch.zeros(2, V, device=device), batch(device, ROWS["top_p"])
        with pytest.raises(NotImplementedError, match="nonzero"):
            sampler.sample(logits, rows)


class Unlaunched:
    """A kernel that is asked for and not run."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


@pytest.fixture
def unlaunched(monkeypatch):
    """Triton's kernels are not run, FlashInfer's functions give tensors of the right shape."""
    pytest.importorskip("triton")
    from octavo.backends.triton import nucleus, sampling

    monkeypatch.setattr(nucleus, "nucleus_kernel", Unlaunched())
    for name in ("top_kernel", "draw_kernel", "pick_kernel"):
        monkeypatch.setattr(sampling, name, Unlaunched())


@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize("kind", ["triton", "flashinfer"])
def test_samplers_with_kernels(unlaunched, monkeypatch, kind, rows):
    if kind == "triton":
        from octavo.backends.triton.sampler import TritonSampler as Kind
    else:
        pytest.importorskip("flashinfer", exc_type=ImportError)
        from octavo.backends.flashinfer import filters
        from octavo.backends.flashinfer.sampler import FlashInferSampler as Kind

        names = ("top_k_mask_logits", "top_p_renorm_probs")
        functions = {name: lambda values, threshold: values.clone() for name in names}
        library = SimpleNamespace(get_sampling_module=lambda: None, **functions)
        monkeypatch.setattr(filters.flashinfer, "sampling", library)
    with asynchronous_device() as device:
        sampler = Kind(NoOptions(), SamplerContext(V, SLOTS, device))
        logits = torch.zeros(len(ROWS[rows]), V, device=device)
        found = sampler.sample(logits, batch(device, ROWS[rows]))
    assert found.token_ids.shape == found.valid.shape == (len(ROWS[rows]),)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x[x[0].sum().long()],
        lambda x: x.__setitem__(x > 0, torch.zeros((), device=x.device)),
        lambda x: x.__setitem__(torch.zeros(2, dtype=torch.long, device=x.device), 1.0),
        lambda x: x.__setitem__((0, 0), 1.0),
        lambda x: x[torch.arange(2)],
        lambda x: x.copy_(torch.zeros(3)),
        lambda x: x.copy_(torch.zeros(3).pin_memory()),
        lambda x: x[:, :2].copy_(torch.zeros(3, 3, pin_memory=True)[:, :2], non_blocking=True),
        lambda x: x.copy_(
            torch.zeros(3, 3, pin_memory=True, dtype=torch.float64), non_blocking=True
        ),
        lambda x: x.copy_(torch.zeros(3, pin_memory=True), non_blocking=True),
        lambda x: torch.from_numpy(np.arange(3)).to(x.device, non_blocking=True),
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: torch.as_tensor(np.arange(3), device=x.device),
        lambda x: torch.equal(x, x),
        torch.unique,
    ],
)
def test_the_double_refuses_what_waits(wait):
    with asynchronous_device() as device:
        x = torch.zeros(3, 3, device=device)
        with pytest.raises((WouldWait, NotImplementedError, RuntimeError, TypeError)):
            wait(x)


def test_the_double_takes_what_does_not_wait():
    with asynchronous_device() as device:
        x = torch.zeros(3, 3, device=device)
        x[0].copy_(torch.zeros(3, pin_memory=True), non_blocking=True)
        x.copy_(upload(np.zeros((3, 3), np.float32), device))
        torch.zeros(3, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)
        x[0] = 1.0
        x[0, 1:] = x[0, 0]
        x[upload(np.arange(2), device)] = torch.full((), 2.0, device=device)
        torch.where(x > 0, x, -1.0).masked_fill_(x > 0, torch.inf)
