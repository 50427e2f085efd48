"""Packed linear layers against float64, and bit for bit whatever the number of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.backends.cpu import native
from octavo.backends.cpu.linear import (
    Int4Method,
    Int8Method,
    PackedLinear,
    PackedMethod,
    PackedWeight,
)
from octavo.backends.cpu.options import Int4Options
from octavo.core.contracts import NoOptions
from octavo.core.contracts.quantization import QuantizationContext
from octavo.core.errors import PluginUnavailable, WeightError

KINDS = {
    "float32": native.W_F32,
    "bfloat16": native.W_BF16,
    "int8": native.W_I8,
    "int4": native.W_I4,
}
SHAPES = [(1, 1), (16, 16), (17, 15), (40, 33), (100, 64), (96, 200), (33, 576), (130, 1000)]
"""Outputs and inputs."""


def _packed(
    library: Any, kind: int, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> PackedWeight:
    packed = PackedWeight(library, kind, weight.shape[1], weight.shape[0])
    packed.pack(0, weight)
    if bias is not None:
        packed.set_bias(0, bias)
    return packed


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """x as the integer kernels see it: 8 bits in groups of 32 inputs."""
    padded = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    scale = padded.abs().amax(-1, keepdim=True) / 127
    levels = torch.where(scale > 0, padded / scale, 0).round()
    return (levels * scale).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_product_equals_float64(
    library: Any, name: str, shape: tuple[int, int], with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(shape[0] * 7 + shape[1])
    weight = torch.randn(shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator) if with_bias else None
    packed = _packed(library, KINDS[name], weight, bias)
    x = torch.randn(14, shape[1], generator=generator)
    used = packed.rows(torch.arange(shape[0])).double()
    seen = _rounded(x) if name.startswith("int") else x.double()
    expected = seen @ used.T + (bias.double() if bias is not None else 0)
    # Rounding errors grow with the sum of magnitudes; a tie in rounding x may fall either way.
    size = seen.abs() @ used.abs().T + 1
    ties = 1e-3 if name.startswith("int") else 0
    assert ((packed.multiply(x) - expected).abs() <= size * (2e-6 + ties)).all()


@pytest.mark.parametrize(
    ("name", "limit"), [("float32", 0.0), ("bfloat16", 2e-3), ("int8", 7e-3), ("int4", 9e-2)]
)
def test_stored_weights_are_close(library: Any, name: str, limit: float) -> None:
    weight = torch.randn(50, 320, generator=torch.Generator().manual_seed(1))
    packed = _packed(library, KINDS[name], weight)
    stored = packed.rows(torch.arange(50))
    assert (stored - weight).norm() <= limit * weight.norm()
    if name == "bfloat16":
        assert torch.equal(stored, weight.bfloat16().float())


def test_four_bits_reproduce_weights_that_fit_them(library: Any) -> None:
    """A checkpoint that was 4-bit in blocks of 32 (GGUF's Q4_1) loses nothing."""
    generator = torch.Generator().manual_seed(2)
    levels = torch.randint(0, 16, (32, 4, 32), generator=generator)
    levels[..., 0], levels[..., 1] = 0, 15
    scale = (torch.rand(32, 4, 1, generator=generator) * 0.1 + 0.01).half().float()
    minimum = (torch.rand(32, 4, 1, generator=generator) - 1).half().float()
    weight = (levels * scale + minimum).flatten(1)
    packed = _packed(library, native.W_I4, weight)
    assert (packed.rows(torch.arange(32)) - weight).abs().max() <= 1e-6


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("inputs", [33, 576])
def test_a_row_has_the_same_bits_in_any_company(
    library: Any, name: str, inputs: int, two_threads: None
) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(150, inputs, generator=generator)
    packed = _packed(library, KINDS[name], weight, torch.randn(150, generator=generator))
    x = torch.randn(210, inputs, generator=generator)
    whole = packed.multiply(x)
    for rows in (*range(1, 27), 97, 199):
        start = (rows * 5) % (210 - rows)
        assert torch.equal(packed.multiply(x[start : start + rows]), whole[start : start + rows])


@pytest.mark.parametrize("name", KINDS)
def test_threads_change_no_bit(library: Any, name: str) -> None:
    weight = torch.randn(300, 320, generator=torch.Generator().manual_seed(4))
    packed = _packed(library, KINDS[name], weight)
    x = torch.randn(40, 320, generator=torch.Generator().manual_seed(5))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(packed.multiply(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(other, found[0]) for other in found)


@pytest.mark.parametrize("name", KINDS)
def test_bfloat16_activations(library: Any, name: str) -> None:
    """bfloat16 in, float32 inside, bfloat16 out: the rounded result of the float32 product."""
    generator = torch.Generator().manual_seed(6)
    packed = _packed(library, KINDS[name], torch.randn(70, 100, generator=generator))
    for rows in (1, 5, 30):
        x = torch.randn(rows, 100, generator=generator).bfloat16()
        assert torch.equal(packed.multiply(x), packed.multiply(x.float()).bfloat16())


def test_instruction_sets_give_the_same_bits(library: Any) -> None:
    """One chain of fused multiply-adds an output at every vector width (plain C may not fuse)."""
    if library.octavo_isa() == b"generic":
        pytest.skip("plain C without fused multiply-add rounds twice")
    generator = torch.Generator().manual_seed(7)
    weight, x = torch.randn(64, 96, generator=generator), torch.randn(5, 96, generator=generator)
    for kind in KINDS.values():
        here = _packed(library, kind, weight).multiply(x)
        there = _packed(native.kernels(), kind, weight).multiply(x)
        assert torch.equal(here, there)


@pytest.mark.parametrize("name", KINDS)
def test_a_poisoned_row_stays_alone(library: Any, name: str) -> None:
    """NaN and infinity appear in their own row only, and do appear there."""
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(8))
    packed = _packed(library, KINDS[name], weight)
    clean = torch.randn(9, 64, generator=torch.Generator().manual_seed(9))
    dirty = clean.clone()
    dirty[3, 5], dirty[7, 40] = float("nan"), float("inf")
    expected, found = packed.multiply(clean), packed.multiply(dirty)
    assert not found[3].isfinite().any()
    assert not found[7].isfinite().any()
    others = [0, 1, 2, 4, 5, 6, 8]
    assert torch.equal(found[others], expected[others])


def test_tiny_and_zero_activations(library: Any) -> None:
    packed = _packed(library, native.W_I8, torch.randn(20, 64))
    x = torch.zeros(3, 64)
    x[1] = 1e-38
    assert torch.equal(packed.multiply(x)[[0, 1]], torch.zeros(2, 20))


def test_strided_rows(library: Any) -> None:
    packed = _packed(library, native.W_F32, torch.randn(20, 32))
    x = torch.randn(6, 96)
    assert torch.equal(packed.multiply(x[:, 32:64]), packed.multiply(x[:, 32:64].contiguous()))


def test_no_rows(library: Any) -> None:
    packed = _packed(library, native.W_F32, torch.randn(20, 32))
    assert packed.multiply(torch.empty(0, 32)).shape == (0, 20)


# ---- modules ------------------------------------------------------------------------------------


def _method(kind: type[PackedMethod], dtype: torch.dtype = torch.float32) -> PackedMethod:
    context = QuantizationContext({}, dtype, torch.device("cpu"))
    options = Int4Options() if kind is Int4Method else NoOptions()
    return kind(options, context)


@pytest.mark.parametrize("kind", [PackedMethod, Int8Method, Int4Method])
def test_fused_parts_of_odd_sizes(kind: type[PackedMethod]) -> None:
    generator = torch.Generator().manual_seed(10)
    sizes = (20, 7, 33)
    layer = _method(kind).linear("layer", 64, sizes, True)
    assert isinstance(layer, PackedLinear)
    weights = [torch.randn(size, 64, generator=generator) for size in sizes]
    biases = [torch.randn(size, generator=generator) for size in sizes]
    for part in (2, 0, 1):
        layer.load(part, "weight", weights[part])
        layer.load(part, "bias", biases[part])
    layer.finish()
    x = torch.randn(5, 64, generator=generator)
    expected = x @ torch.cat(weights).T + torch.cat(biases)
    limit = {PackedMethod: 1e-6, Int8Method: 2e-2, Int4Method: 1e-1}[kind]
    assert (layer(x) - expected).norm() <= limit * expected.norm()
    whole = _method(kind).linear("whole", 64, (60,), True)
    whole.load(0, "weight", torch.cat(weights))
    whole.load(0, "bias", torch.cat(biases))
    assert torch.equal(whole(x), layer(x))


@pytest.mark.parametrize(("bits", "kind"), [(8, native.W_I8), (4, native.W_I4)])
def test_the_head_of_a_4_bit_model(bits: Any, kind: int) -> None:
    context = QuantizationContext({}, torch.float32, torch.device("cpu"))
    method = Int4Method(Int4Options(head_bits=bits), context)
    assert method.linear("lm_head", 32, (64,), False).packed.kind == kind
    assert (
        method.linear("model.layers.0.mlp.down_proj", 32, (64,), False).packed.kind == native.W_I4
    )


def test_loading_says_what_is_wrong() -> None:
    layer = _method(PackedMethod).linear("layers.0.qkv", 8, (4, 4), False)
    with pytest.raises(
        WeightError, match=r"layers\.0\.qkv part 1: weight has shape \[4, 9\], expected"
    ):
        layer.load(1, "weight", torch.zeros(4, 9))
    with pytest.raises(WeightError, match="has no bias"):
        layer.load(0, "bias", torch.zeros(4))
    layer.load(0, "weight", torch.zeros(4, 8))
    with pytest.raises(WeightError, match="lacks weight of part 1"):
        layer.finish()


def test_float16_models_are_refused() -> None:
    with pytest.raises(PluginUnavailable, match="the model's dtype is float16"):
        _method(PackedMethod, torch.float16)


def test_wrong_input_is_refused() -> None:
    layer = _method(PackedMethod).linear("layer", 8, (4,), False)
    with pytest.raises(ValueError, match=r"expected float32 or bfloat16 \[T, 8\]"):
        layer(torch.zeros(2, 9))


def test_compiled_whole() -> None:
    """Under torch.compile the layer is one operator of a whole graph."""
    layer = _method(PackedMethod).linear("layer", 32, (16,), False)
    layer.load(0, "weight", torch.randn(16, 32))
    x = torch.randn(3, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), layer(x))
    rows = torch.compile(layer.rows, fullgraph=True, backend="eager")
    index = torch.tensor([3, 0, 3])
    assert torch.equal(rows(index), layer.rows(index))
