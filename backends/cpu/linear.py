"""Linear layers on the native kernels, and the quantization methods made of them.

Legend: T tokens, I input features, O output features.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from typing import Any

import torch
from torch import nn

from octavo.backends.cpu import native
from octavo.backends.cpu.options import Int4Options
from octavo.backends.fused_loading import FusedLoading
from octavo.core.contracts import NoOptions
from octavo.core.contracts.quantization import QuantizationContext, QuantizationMethod
from octavo.core.errors import PluginUnavailable

_FLOAT_KINDS = {torch.float32: native.W_F32, torch.bfloat16: native.W_BF16}


class PackedWeight:
    """A matrix [O, I] in the kernels' layout, and its bias. paired: its outputs are two halves that
    an activation joins. `address` is of its `linear_t`, valid while this object lives."""

    def __init__(
        self,
        library: Any,
        kind: int,
        in_features: int,
        out_features: int,
        *,
        paired: bool = False,
    ) -> None:
        self.library, self.kind, self.paired = library, kind, paired
        self.in_features, self.out_features = in_features, out_features
        parts = 2 if paired else 1
        self._padded = -(-out_features // parts // 16) * 16 * parts
        size = library.octavo_packed_bytes(kind, in_features, out_features, paired)
        self.storage = native.aligned(size)
        self.bias: torch.Tensor | None = None
        self._struct = native.LinearStruct(
            in_features, out_features, kind, paired, self.storage.data_ptr(), None
        )
        self.address = ctypes.addressof(self._struct)

    def pack(self, first: int, weight: torch.Tensor) -> None:
        """Take the rows of `weight` [n, I] as outputs `first` to `first + n`."""
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            weight = weight.float()
        weight = weight.contiguous()
        self.library.octavo_pack(
            self.address,
            first,
            weight.shape[0],
            weight.data_ptr(),
            native.DTYPES[weight.dtype],
            self.in_features,
            torch.get_num_threads(),
        )

    def set_bias(self, first: int, bias: torch.Tensor) -> None:
        """Take the bias of outputs `first` on; others are zero until they come."""
        if self.bias is None:
            self.bias = native.aligned(self._padded, torch.float32)
            self._struct.bias = self.bias.data_ptr()
        bias = bias.float().contiguous()
        self.library.octavo_pack_bias(self.address, first, len(bias), bias.data_ptr())

    def rows(self, index: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[n, I]: the weights of the outputs int64[n], as the kernels use them."""
        index = index.contiguous()
        found = torch.empty(len(index), self.in_features, dtype=dtype)
        self.library.octavo_unpack(
            self.address,
            index.data_ptr(),
            len(index),
            found.data_ptr(),
            native.DTYPES[dtype],
            torch.get_num_threads(),
        )
        return found

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x[T, I] w^T + bias, [T, O] in x's dtype, which is float32 or bfloat16."""
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype not in _FLOAT_KINDS:
            raise ValueError(
                f"expected float32 or bfloat16 [T, {self.in_features}], got {x.dtype} "
                f"{list(x.shape)}"
            )
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        out = x.new_empty(rows, self.out_features)
        code = native.DTYPES[x.dtype]
        self.library.octavo_linear(
            self.address,
            x.data_ptr(),
            code,
            x.stride(0),
            rows,
            out.data_ptr(),
            code,
            self.out_features,
            torch.get_num_threads(),
        )
        return out


class PackedLinear(nn.Module):
    """y[T, O] = x[T, I] weight^T + bias, several matrices fused along the outputs."""

    def __init__(
        self,
        prefix: str,
        in_features: int,
        out_features: tuple[int, ...],
        bias: bool,
        *,
        kind: int,
        dtype: torch.dtype,
        library: Any,
    ) -> None:
        super().__init__()
        self.prefix, self.in_features, self.out_features = prefix, in_features, out_features
        self.dtype = dtype
        self.num_parameters = sum(out_features) * (in_features + bias)
        # Gate and up of a gated layer: a native caller may apply the activation while it stores.
        paired = len(out_features) == 2 and out_features[0] == out_features[1]
        self.packed = PackedWeight(library, kind, in_features, sum(out_features), paired=paired)
        self.handle = next(_handles)
        _weights[self.handle] = self.packed
        self._loading = FusedLoading(prefix, in_features, out_features, bias)
        # Buffers, so that the model's size in memory is known.
        self.register_buffer("storage", self.packed.storage, persistent=False)

    def load(self, part: int, kind: str, tensor: torch.Tensor) -> None:
        """Take the weight or bias of one of the fused matrices."""
        first = self._loading.take(part, kind, tensor)
        if kind == "weight":
            self.packed.pack(first, tensor)
            if isinstance(tensor, nn.Parameter):  # of the embedding, which counts it
                self.num_parameters -= tensor.numel()
        else:
            self.packed.set_bias(first, tensor)

    def finish(self) -> None:
        """All was loaded."""
        self._loading.finish()

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """[T, I] in the activations' dtype: the weights of the outputs int64[T]."""
        if torch.compiler.is_compiling():
            found: torch.Tensor = torch.ops.octavo_cpu.rows(
                index, self.handle, self.in_features, self.dtype
            )
            return found
        return self.packed.rows(index, self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            out: torch.Tensor = torch.ops.octavo_cpu.linear(
                x, self.handle, self.packed.out_features
            )
            return out
        return self.packed.multiply(x)


class PackedMethod(QuantizationMethod):
    """Weights in the activations' dtype, packed."""

    kinds = _FLOAT_KINDS

    def __init__(self, options: NoOptions, context: QuantizationContext) -> None:
        if context.dtype not in _FLOAT_KINDS:
            name = str(context.dtype).removeprefix("torch.")
            raise PluginUnavailable(
                f"the CPU kernels compute in float32 and bfloat16, the model's dtype is {name}: "
                "set model.dtype, or model.quantization: none"
            )
        self._kind, self._dtype = self.kinds[context.dtype], context.dtype
        self._library = native.kernels()

    def linear(
        self, prefix: str, in_features: int, out_features: tuple[int, ...], bias: bool
    ) -> nn.Module:
        return PackedLinear(
            prefix,
            in_features,
            out_features,
            bias,
            kind=self._kind_of(prefix),
            dtype=self._dtype,
            library=self._library,
        )

    def _kind_of(self, prefix: str) -> int:
        return self._kind


class Int8Method(PackedMethod):
    """8-bit weights, a scale for 32 inputs of an output; activations in groups of 32."""

    kinds = dict.fromkeys(_FLOAT_KINDS, native.W_I8)


class Int4Method(PackedMethod):
    """4-bit weights, scale and minimum for 32 inputs of an output; activations in groups of 32.

    The language-model head keeps 8 bits unless the options say otherwise: with the demo model it
    is 94% of what 4 bits cost in perplexity.
    """

    kinds = dict.fromkeys(_FLOAT_KINDS, native.W_I4)

    def __init__(self, options: Int4Options, context: QuantizationContext) -> None:
        super().__init__(NoOptions(), context)
        self._head_kind = native.W_I8 if options.head_bits == 8 else native.W_I4

    def _kind_of(self, prefix: str) -> int:
        return self._head_kind if prefix == "lm_head" else self._kind


# ---- as a torch operator, for torch.compile -----------------------------------------------------

_handles = itertools.count()
_weights: weakref.WeakValueDictionary[int, PackedWeight] = weakref.WeakValueDictionary()
_operators = torch.library.Library("octavo_cpu", "FRAGMENT")  # type: ignore[no-untyped-call]
_operators.define("linear(Tensor x, int weight, int out_features) -> Tensor")  # type: ignore[no-untyped-call]


_operators.define(  # type: ignore[no-untyped-call]
    "rows(Tensor index, int weight, int in_features, ScalarType dtype) -> Tensor"
)


def _linear(x: torch.Tensor, weight: int, out_features: int) -> torch.Tensor:
    return _weights[weight].multiply(x)


def _linear_fake(x: torch.Tensor, weight: int, out_features: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], out_features)


_operators.impl("linear", _linear, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("octavo_cpu::linear", _linear_fake, lib=_operators)


def _rows(index: torch.Tensor, weight: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    return _weights[weight].rows(index, dtype)


def _rows_fake(
    index: torch.Tensor, weight: int, in_features: int, dtype: torch.dtype
) -> torch.Tensor:
    return index.new_empty(index.shape[0], in_features, dtype=dtype)


_operators.impl("rows", _rows, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("octavo_cpu::rows", _rows_fake, lib=_operators)
