"""Every other Triton kernel in the interpreter, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional

from octavo.backends.triton.activation import gate
from octavo.backends.triton.block_copy import BlockCopier
from octavo.backends.triton.convert import from_cache, to_cache
from octavo.backends.triton.kv_write import write_kv
from octavo.backends.triton.norm import rms_norm
from octavo.backends.triton.nucleus import cut_to_nucleus
from octavo.backends.triton.quantize import quantize_rows
from octavo.backends.triton.sampling import GumbelDraw, gumbel, philox
from octavo.kernels import random
from octavo.kernels.rope import RopeTable, apply_rope
from octavo.kernels.selection import nucleus_weight, token_weights

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, of inf and NaN lanes

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ---- fp8 -----------------------------------------------------------------------------------------


@triton.jit
def read_bytes(source, target, FP8: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(target + i, from_cache(tl.load(source + i), tl.float32, FP8))


@triton.jit
def write_bytes(source, target, BLOCK: tl.constexpr, FP8: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(target + i, to_cache(tl.load(source + i), tl.uint8, FP8))


FP8 = [(torch.float8_e4m3fn, 1, 448), (torch.float8_e5m2, 2, 57344)]


@pytest.mark.parametrize(("dtype", "code", "largest"), FP8)
def test_every_byte_is_read_as_torch_reads_it(dtype, code, largest):
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.zeros(256)
    read_bytes[(1,)](codes, out, code)
    expected = codes.view(dtype).float()
    assert torch.equal(out.nan_to_num(7777), expected.nan_to_num(7777))


@pytest.mark.parametrize(("dtype", "code", "largest"), FP8)
def test_numbers_are_rounded_as_torch_rounds_them_and_saturate(dtype, code, largest):
    exact = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    halfway = (exact[1:] + exact[:-1]) / 2
    near = torch.cat((halfway.nextafter(torch.tensor(1e9)), halfway.nextafter(torch.tensor(-1e9))))
    values = torch.cat((exact, halfway, near, torch.randn(300) * 50, torch.randn(300) * 1e-5))
    values = functional.pad(values, (0, 2048 - len(values)))
    out = torch.zeros(2048, dtype=torch.uint8)
    write_bytes[(1,)](values, out, 2048, code)
    assert torch.equal(out.view(dtype).float(), values.clamp(-largest, largest).to(dtype).float())
    beyond = torch.tensor([1e6, -1e6, torch.inf, torch.nan] * 4)
    out = torch.zeros(16, dtype=torch.uint8)
    write_bytes[(1,)](beyond, out, 16, code)
    got = out.view(dtype).float()[:4]
    assert got[:3].tolist() == [largest, -largest, largest]
    assert got[3].isnan()


# ---- KV ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_are_rotated_and_written_where_slots_say(dtype, interleaved):
    cos_sin = torch.rand(50, 16)
    packed = torch.randn(5, 6, 20).to(dtype)
    k, v = packed[:, :3], packed[:, 3:, :12]
    k_cache = torch.zeros(4, 3, 8, 20, dtype=dtype).transpose(1, 2)  # heads before tokens
    v_cache = torch.zeros(4, 8, 3, 12, dtype=dtype)
    slots = torch.tensor([31, 8, 9, 0, -1])  # the last one is padding
    positions = torch.tensor([4, 40, 0, 49, 7])
    write_kv(
        k,
        v,
        k_cache,
        v_cache,
        slots,
        positions=positions,
        cos_sin=cos_sin,
        interleaved=interleaved,
    )
    cos, sin = RopeTable(cos_sin, interleaved).rows(positions)
    rotated = apply_rope(k, cos, sin, interleaved=interleaved)
    k, v, rotated, slots = k[:4], v[:4], rotated[:4], slots[:4]
    block, offset = slots // 8, slots % 8
    torch.testing.assert_close(
        k_cache[block, offset], rotated, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    assert torch.equal(v_cache[block, offset], v)
    untouched = torch.ones(4, 8, dtype=torch.bool)
    untouched[block, offset] = False
    assert not k_cache[untouched].any()
    assert not v_cache[untouched].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_blocks_are_copied_in_all_pools_at_once(dtype):
    def pools(blocks):
        keys = torch.randn(blocks, 4, 2, 6).to(dtype)
        other = torch.randn(blocks, 2, 4, 6).to(dtype).transpose(1, 2)
        return [keys, other]

    source, target = pools(5), pools(7)
    expected = [pool.clone() for pool in target]
    for pool, origin in zip(expected, source, strict=True):
        pool[6, :4], pool[2, :3], pool[0, :1] = origin[1, :4], origin[4, :3], origin[0, :1]
    columns = (np.array(values, np.int32) for values in ([1, 4, 0], [6, 2, 0], [4, 3, 1]))
    BlockCopier(CPU).copy_between(source, target, *columns)
    for got, wanted in zip(target, expected, strict=True):
        assert torch.equal(got.float(), wanted.float())


# ---- element-wise --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 64, 100])
def test_rms_norm(dtype, size):
    x, weight = torch.randn(3, size).to(dtype), torch.randn(size).to(dtype)
    expected = functional.rms_norm(x, (size,), weight, 1e-5)
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, **close)
    residual = torch.randn(3, 2 * size).to(dtype)[:, :size]
    total = residual + x
    got = rms_norm(x, weight, 1e-5, residual=residual)
    assert torch.equal(residual, total)
    torch.testing.assert_close(got, functional.rms_norm(total, (size,), weight, 1e-5), **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gate(dtype, activation):
    x = (torch.randn(3, 2 * 70) * 4).to(dtype)
    first, second = x.chunk(2, dim=1)
    active = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda y: functional.gelu(y, approximate="tanh"),
    }[activation](first)
    torch.testing.assert_close(gate(x, activation), active * second, atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_int8_are_to_the_bit_what_torch_makes(dtype):
    x = torch.randn(4, 90).to(dtype)
    x[2] = 0
    codes, scales = quantize_rows(x)
    wide = x.float()
    expected = wide.abs().amax(1) / 127
    assert torch.equal(scales, expected)
    divisor = torch.where(expected > 0, expected, 1.0)[:, None]
    assert torch.equal(codes, (wide / divisor).round().to(torch.int8))


@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_rows_in_fp8(code):
    x = torch.randn(3, 50)
    codes, scales = quantize_rows(x, code)
    largest = torch.finfo(code).max
    assert torch.equal(scales, x.abs().amax(1) / largest)
    assert torch.equal(
        codes.float(), (x / scales[:, None]).clamp(-largest, largest).to(code).float()
    )


def test_other_codes_are_refused():
    with pytest.raises(ValueError, match=r"int8, float8_e4m3fn, float8_e5m2, not torch\.int16"):
        quantize_rows(torch.ones(1, 2), torch.int16)


# ---- sampling ------------------------------------------------------------------------------------


@triton.jit
def philox_words(blocks, positions, indices, seeds, out, noise):
    i = tl.program_id(0)
    block = tl.load(blocks + i) + tl.arange(0, 2)
    w0, w1, w2, w3 = philox(block, tl.load(positions + i), tl.load(indices + i), tl.load(seeds + i))
    for lane in tl.static_range(4):
        word = w0 if lane == 0 else w1 if lane == 1 else w2 if lane == 2 else w3
        place = i * 8 + tl.arange(0, 2) * 4 + lane
        tl.store(out + place, word.to(tl.int64))
        tl.store(noise + place, gumbel(word))


def test_the_generator_gives_the_words_of_the_contract():
    vectors = random.GUMBEL_VECTORS
    columns = [
        torch.tensor([(v - 2**64 if v >= 2**63 else v) for v in column])
        for column in zip(
            *[(seed, pos, index, t >> 2) for seed, pos, index, t, *_ in vectors], strict=True
        )
    ]
    seeds, positions, indices, blocks = columns
    out = torch.zeros(len(vectors), 8, dtype=torch.int64)
    noise = torch.zeros(len(vectors), 8)
    philox_words[(len(vectors),)](blocks, positions, indices, seeds, out, noise)
    for row, (*_, token, word, value) in enumerate(vectors):
        assert int(out[row, token & 3]) == word
        assert float(noise[row, token & 3]) == np.float32(value)


def rows(num, vocab_size, temperature=1.0):
    return (
        torch.full((num,), temperature),
        torch.randint(-(2**62), 2**62, (num,)),
        torch.randint(0, 1000, (num,)),
        torch.arange(num) % 3,
    )


@pytest.mark.parametrize(("num", "vocab_size"), [(4, 3), (6, 1024), (3, 5000)])
def test_draws_equal_those_of_the_reference(num, vocab_size):
    draw = GumbelDraw(8, vocab_size, CPU)
    logits = torch.randn(num, vocab_size) * 3
    temperature, seed, position, index = rows(num, vocab_size)
    temperature[1] = 0.3
    temperature[2] = 0.0
    logits[0, 1:] = torch.where(torch.rand(vocab_size - 1) < 0.5, -torch.inf, logits[0, 1:])
    before = logits.clone()
    got, valid = draw(logits, temperature, seed, position, index)
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    noise = random.gumbel(
        seed.numpy()[:, None],
        position.numpy()[:, None],
        index.numpy()[:, None],
        np.arange(vocab_size),
    )
    noise[2] = 0
    assert got.tolist() == (scaled.numpy() + noise).argmax(axis=1).tolist()
    assert valid.all()
    assert torch.equal(logits, before)


def test_ties_go_to_the_lower_token_and_rows_without_tokens_are_told():
    logits = torch.zeros(5, 1500)
    logits[0, 700:] = -1
    logits[1] = -0.0
    logits[1, 3] = 0.0
    logits[2] = -torch.inf
    logits[3, 1200] = torch.nan
    logits[4, 9] = torch.inf
    temperature, seed, position, index = rows(5, 1500)
    got, valid = GumbelDraw(5, 1500, CPU)(logits, temperature * 0, seed, position, index)
    assert got.tolist() == [0, 0, 0, 0, 9]
    assert valid.tolist() == [True, True, False, False, True]
    got, valid = GumbelDraw(5, 1500, CPU)(logits, temperature, seed, position, index)
    assert valid.tolist() == [True, True, False, False, True]
    assert got[4] == 9


def naive_nucleus(values, weight, needed):
    """Token ids, with Python's own integers."""
    kept, mass = [], 0
    for token in sorted(range(len(values)), key=lambda t: (-values[t], t)):
        if mass >= needed:
            break
        kept.append(token)
        mass += weight[token]
    return sorted(kept)


@pytest.mark.parametrize("vocab_size", [7, 2048, 5000])
def test_the_nucleus_is_the_contracts(vocab_size):
    values = torch.randn(5, vocab_size) * 2
    values[1] = values[1].round()  # ties, on both sides of the threshold
    values[2, ::2] = -torch.inf
    values[3] = 0.0
    values[3, ::3] = -0.0
    top_p = torch.tensor([0.9, 0.97, 0.5, 0.31, 0.8])
    weight = token_weights(values, values.amax(dim=1, keepdim=True))
    needed = nucleus_weight(weight.sum(dim=1, keepdim=True), top_p)
    before, where = values.clone(), torch.tensor([True, True, True, True, False])
    cut_to_nucleus(values, weight, needed, where)
    assert torch.equal(values[4], before[4])
    for row in range(4):
        kept = (values[row] > -torch.inf).nonzero().flatten().tolist()
        wanted = naive_nucleus(before[row].tolist(), weight[row].tolist(), int(needed[row]))
        assert kept == wanted
        assert torch.equal(values[row, kept], before[row, kept])
