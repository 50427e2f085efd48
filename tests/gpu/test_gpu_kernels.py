"""The Triton kernels and samplers on a GPU against torch."""

from __future__ import annotations

import pkgutil

import numpy as np
import pytest
import torch
from torch.nn import functional

from octavo.core.contracts import NoOptions
from octavo.core.contracts.sampler import SamplerContext
from octavo.core.sampling_params import SamplingParams
from octavo.kernels import random
from octavo.testing.conformance.sampler import make_batch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [100, 2048, 8192])
def test_rms_norm(device, dtype, size):
    from octavo.backends.triton.norm import rms_norm

    x, weight = torch.randn(2, 33, size, device=device).to(dtype)[0], None
    weight = torch.randn(size, device=device).to(dtype)
    residual = torch.randn(33, size, device=device).to(dtype)
    total = residual + x
    got = rms_norm(x, weight, 1e-5, residual=residual)
    wanted = functional.rms_norm(total.float(), (size,), weight.float(), 1e-5).to(dtype)
    assert torch.equal(residual, total)
    torch.testing.assert_close(got, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(device, dtype):
    from octavo.backends.triton.activation import gate

    x = torch.randn(17, 2 * 1500, device=device).to(dtype)
    first, second = x.float().chunk(2, dim=1)
    wanted = (functional.silu(first).to(dtype) * second.to(dtype)).to(dtype)
    torch.testing.assert_close(gate(x), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantized_rows(device, dtype, code):
    from octavo.backends.triton.quantize import quantize_rows

    x = torch.randn(9, 3000, device=device).to(dtype)
    codes, scales = quantize_rows(x, code)
    largest = 127.0 if code == torch.int8 else torch.finfo(code).max
    # By a tensor: a GPU divides by a number as it multiplies by its inverse.
    assert torch.equal(scales, x.float().abs().amax(1) / torch.full_like(scales, largest))
    scaled = (x.float() / scales[:, None]).clamp(-largest, largest)
    wanted = scaled.round() if code == torch.int8 else scaled
    assert torch.equal(codes.float(), wanted.to(code).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("way", ["device", "to host", "from host"])
def test_copied_blocks(device, dtype, way):
    from octavo.backends.triton.block_copy import BlockCopier

    def pools(where):
        made = [torch.randn(9, 16, 2, 64).to(dtype) for _ in range(4)]
        return [p.pin_memory() if where == "cpu" != device else p.to(where) for p in made]

    source = pools("cpu" if way == "from host" else device)
    target = pools("cpu" if way == "to host" else device)
    wanted = [pool.cpu().float().clone() for pool in target]
    for pool, origin in zip(wanted, source, strict=True):
        pool[8], pool[2, :3] = origin.cpu().float()[1], origin.cpu().float()[4, :3]
    columns = (np.array(values, np.int32) for values in ([1, 4], [8, 2], [16, 3]))
    BlockCopier(torch.device(device)).copy_between(source, target, *columns)
    if device == "cuda":
        torch.cuda.synchronize()
    for got, expected in zip(target, wanted, strict=True):
        assert torch.equal(got.cpu().float(), expected)


def test_the_draw_has_the_noise_of_the_contract(device, rehearsing):
    from octavo.backends.triton.sampling import GumbelDraw

    vocab_size, rows = (500 if rehearsing else 50_000), 16
    logits = torch.randn(rows, vocab_size, device=device) * 2
    seeds = torch.randint(-(2**62), 2**62, (rows,), device=device)
    position, index = torch.arange(rows, device=device) * 37, torch.zeros_like(seeds)
    draw = GumbelDraw(rows, vocab_size, logits.device)
    got, valid = draw(logits, torch.full((rows,), 0.8, device=device), seeds, position, index)
    noise = random.gumbel(
        seeds.cpu().numpy()[:, None],
        position.cpu().numpy()[:, None],
        index.cpu().numpy()[:, None],
        np.arange(vocab_size),
    )
    scaled = logits.cpu().numpy() / np.float32(0.8)  # a GPU multiplies by the inverse of a number
    assert valid.all()
    assert got.tolist() == (scaled + noise).argmax(axis=1).tolist()


def batch(device, params, vocab_size):
    draws = [
        (SamplingParams(**values), slot + 5, slot * 11, 0) for slot, values in enumerate(params)
    ]
    return make_batch(vocab_size, draws, device)


def without_waiting(call, *args):
    """Torch raises an error when one of its own operations waits for the device."""
    if not torch.cuda.is_available():
        return call(*args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        return call(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 3.0, "top_p": 0.99},
    {"temperature": 1.2, "top_k": 500, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0.6, "min_p": 0.1},
] * 4


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
@pytest.mark.parametrize("kind", ["plain", "ties"])
def test_samplers_give_the_reference_tokens(device, rehearsing, require_flashinfer, name, kind):
    from octavo.backends.triton.sampler import TritonSampler
    from octavo.plugins.samplers.torch_sampler import TorchSampler

    vocab_size = 500 if rehearsing else 128_256
    context = SamplerContext(vocab_size, len(PARAMS), torch.device(device))
    if name == "flashinfer":
        require_flashinfer()
        from octavo.backends.flashinfer.sampler import FlashInferSampler as Other
    else:
        Other = TritonSampler
    logits = torch.randn(len(PARAMS), vocab_size, device=device) * 3
    if kind == "ties":
        logits = logits.bfloat16().float()
    sampler, rows = Other(NoOptions(), context), batch(device, PARAMS, vocab_size)
    sampler.sample(logits.clone(), rows)  # kernels are compiled, the library loads
    got = without_waiting(sampler.sample, logits.clone(), rows)
    reference = TorchSampler(NoOptions(), context)
    wanted = reference.sample(logits.clone(), batch(device, PARAMS, vocab_size))
    assert got.valid.all()
    assert got.token_ids.tolist() == wanted.token_ids.tolist()


def test_processors_edit_as_on_a_cpu_and_do_not_wait(device):
    from octavo.core.contracts.logits_processor import AttachedRequest, LogitsProcessorContext
    from octavo.plugins.logits_processors import PROVIDERS

    params = SamplingParams(
        logit_bias={3: 1.0, 7: -2.0},
        allowed_token_ids=list(range(300)),
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        presence_penalty=0.1,
        bad_words_token_ids=[[4], [5, 6]],
        min_tokens=3,
        stop_token_ids=[9],
    )
    prompt, slots, rows = np.arange(20, dtype=np.int32), np.array([4, 1]), np.array([0, 2])
    logits = torch.randn(3, 1000)

    def edited(provider, where):
        processor = pkgutil.resolve_name(provider.factory)(
            NoOptions(), LogitsProcessorContext(1000, 8, 64, torch.device(where))
        )
        mine = logits.to(where, copy=True)

        def life():
            for slot in slots.tolist():
                request = AttachedRequest(slot, slot, prompt, prompt[:0], params, (11,))
                assert processor.attach(request)
            for _ in range(2):
                processor.apply(mine, slots, rows)
                processor.accept(slots, np.array([5, 17], np.int32))
            processor.rollback(4, 1)
            processor.apply(mine, slots, rows)
            processor.detach(1)

        life() if where == "cpu" else without_waiting(life)
        return mine.cpu()

    for provider in PROVIDERS:
        torch.testing.assert_close(edited(provider, device), edited(provider, "cpu"))
