"""Plain linear layers: fused parts, both ways of multiplying, errors."""

from __future__ import annotations

import pytest
import torch

from octavo.backends.quantization import unquantized
from octavo.backends.quantization.none import Unquantized, multiply
from octavo.core.contracts import NoOptions, ProbeContext
from octavo.core.contracts.quantization import QuantizationContext
from octavo.core.errors import WeightError


def layer(bias=True, dtype=torch.float32):
    method = Unquantized(NoOptions(), QuantizationContext({}, dtype, torch.device("cpu")))
    return method.linear("model.qkv", 6, (4, 2, 3), bias)


def test_parts_are_fused_in_order():
    made = layer()
    weights = [torch.randn(size, 6, dtype=torch.float64) for size in (4, 2, 3)]
    biases = [torch.randn(size) for size in (4, 2, 3)]
    for part in (2, 0, 1):
        made.load(part, "weight", weights[part])
        made.load(part, "bias", biases[part])
    made.finish()
    x = torch.randn(5, 6)
    expected = torch.cat([x @ w.float().T + b for w, b in zip(weights, biases, strict=True)], 1)
    torch.testing.assert_close(made(x), expected)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 63, 64, 65])
@pytest.mark.parametrize("bias", [None, torch.arange(7.0)])
def test_either_way_of_multiplying(rows, bias):
    x, weight = torch.randn(rows, 5), torch.randn(7, 5)
    result = multiply(x, weight, bias)
    assert result.is_contiguous()
    expected = x @ weight.T + (0 if bias is None else bias)
    torch.testing.assert_close(result, expected)


def test_errors_name_the_layer():
    made = layer()
    with pytest.raises(
        WeightError, match=r"model.qkv part 1: weight has shape \[3, 6\], expected \[2, 6\]"
    ):
        made.load(1, "weight", torch.zeros(3, 6))
    made.load(0, "weight", torch.zeros(4, 6))
    with pytest.raises(WeightError, match=r"model.qkv: the checkpoint lacks .*bias of part 0"):
        made.finish()
    with pytest.raises(WeightError, match=r"model.qkv has no bias"):
        layer(bias=False).load(0, "bias", torch.zeros(4))


def test_a_quantized_checkpoint_is_not_for_it():
    assert unquantized(ProbeContext())
    answer = unquantized(
        ProbeContext(facts={"config": {"quantization_config": {"quant_method": "gptq"}}})
    )
    assert not answer
    assert "gptq" in answer.reason
