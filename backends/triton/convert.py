"""Device functions that several kernels share: fp8 from and to bytes, rope, soft cap.

`FP8` says how 8-bit floats are held: 0, in a dtype that the device converts (or they are no 8-bit
floats at all); E4M3 or E5M2, as bytes, converted here by integer arithmetic, for devices before
compute capability 8.9 and for the interpreter, whose own conversion does not round.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3 = tl.constexpr(1)
E5M2 = tl.constexpr(2)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def from_e4m3(byte):
    """float16 of e4m3 bytes (uint8): exponent and mantissa moved into place are 2^8 too small."""
    wide = byte.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def from_e5m2(byte):
    """float16 of e5m2 bytes (uint8), which are its upper half."""
    return (byte.to(tl.uint16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def to_fp8(
    value,
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Bytes (uint8) of float32 with this many bits of mantissa and this bias of the exponent: to
    nearest even, what is too large becomes LARGEST."""
    bits = value.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    absolute = bits & 0x7FFFFFFF
    size = tl.minimum(absolute.to(tl.float32, bitcast=True), LARGEST)
    size_bits = size.to(tl.uint32, bitcast=True)
    # Normal numbers: round the mantissa, and change the bias of the exponent from 127.
    gone: tl.constexpr = 23 - MANTISSA
    half: tl.constexpr = (1 << (gone - 1)) - 1
    rounded = (size_bits + half + ((size_bits >> gone) & 1)) >> gone
    normal = rounded - ((127 - BIAS) << MANTISSA)
    # Below 2^(1 - BIAS) numbers are multiples of 2^(1 - BIAS - MANTISSA). A sum with 2^23 times
    # that is rounded to such a multiple, which then is the low end of its bits.
    magic: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    least: tl.constexpr = (128 - BIAS) << 23
    unit = (tl.zeros_like(size_bits) + magic).to(tl.float32, bitcast=True)
    small = (size + unit).to(tl.uint32, bitcast=True) - magic
    code = tl.where(size_bits < least, small, normal)
    code = tl.where(absolute > 0x7F800000, 0x7F, code)
    return (sign | code).to(tl.uint8)


@triton.jit
def from_cache(value, dtype: tl.constexpr, FP8: tl.constexpr):
    """What was loaded from a KV cache, in the dtype that is computed with."""
    if FP8 == E4M3:
        return from_e4m3(value).to(dtype)
    elif FP8 == E5M2:
        return from_e5m2(value).to(dtype)
    else:
        return value.to(dtype)


@triton.jit
def to_cache(value, dtype: tl.constexpr, FP8: tl.constexpr):
    """float32 as a KV cache holds it. dtype: of the cache's elements."""
    if FP8 == E4M3:
        return to_fp8(value, 448.0, 3, 7)
    elif FP8 == E5M2:
        return to_fp8(value, 57344.0, 2, 15)
    else:
        return value.to(dtype)


@triton.jit
def rope_pair(d, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """For dimensions d of a head: the dimension that d is paired with, the pair's number, and the
    sign of the sine's term."""
    if INTERLEAVED:
        partner = d ^ 1
        pair = d // 2
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    else:
        half: tl.constexpr = ROPE // 2
        first = d < half
        partner = tl.where(first, d + half, d - half)
        pair = tl.where(first, d, d - half)
        sign = tl.where(first, -1.0, 1.0)
    rotated = d < ROPE
    return tl.where(rotated, partner, d), tl.where(rotated, pair, 0), sign


@triton.jit
def rotate(x, partner, cos, sin, sign, rotated):
    """float32: x and its partner's value turned by an angle where `rotated`, else x."""
    wide = x.to(tl.float32)
    turned = wide * cos + partner.to(tl.float32) * (sin * sign)
    return tl.where(rotated, turned, wide)


@triton.jit
def soft_capped(logits, CAP: tl.constexpr):
    """CAP * tanh(logits / CAP)."""
    return CAP * (1.0 - 2.0 / (tl.exp(logits * (2.0 / CAP)) + 1.0))
