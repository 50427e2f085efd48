"""Tensors of a GGUF file under Hugging Face's names, shapes and order of rows. No torch."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import UnsupportedModel, WeightError
from octavo.models.weight_sources.gguf_format import GGUFTensor
from octavo.models.weight_sources.gguf_metadata import GGUF
from octavo.models.weight_sources.safetensors_files import TensorHeader

_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_KEPT = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
_KEPT_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_IN_METADATA = {"rope_freqs.weight"}


def convertible(file: GGUF) -> list[GGUFTensor]:
    """The tensors that become weights, in the file's order. Raises `WeightError` for a name that
    has no counterpart."""
    tensors = [tensor for tensor in file.tensors.values() if tensor.name not in _IN_METADATA]
    for tensor in tensors:
        hugging_face_name(file, tensor.name)
    return tensors


def hugging_face_name(file: GGUF, name: str) -> str:
    match = _NAME.fullmatch(name)
    if match is not None:
        block, kind, suffix = match.groups()
        if block is None and kind in _GLOBAL:
            return f"{_GLOBAL[kind]}.{suffix}"
        if block is not None and kind in _BLOCK:
            return f"model.layers.{block}.{_BLOCK[kind]}.{suffix}"
    raise WeightError(f"{file.path}: tensor '{name}' has no place in a {file.architecture} model")


def tensor_header(file: GGUF, tensor: GGUFTensor) -> TensorHeader:
    dtype = _KEPT.get(tensor.kind, "F32")
    return TensorHeader(hugging_face_name(file, tensor.name), dtype, tensor.shape)


def content(file: GGUF, tensor: GGUFTensor) -> NDArray[Any]:
    """The contiguous values: float32, or as they are when they are floats of 16 bits (bfloat16 as
    uint16)."""
    from gguf import GGMLQuantizationType, dequantize
    from gguf.quants import quant_shape_to_byte_shape

    values: NDArray[Any]
    if tensor.kind in _KEPT:
        values = tensor.data.view(_KEPT_DTYPES[tensor.kind]).reshape(tensor.shape)
    else:
        kind = GGMLQuantizationType[tensor.kind]
        raw = tensor.data.reshape(quant_shape_to_byte_shape(tensor.shape, kind))
        try:
            values = dequantize(raw, kind)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{file.path}: {tensor.name} is of type {tensor.kind}, which the gguf library "
                "cannot dequantize"
            ) from error
    heads = _permuted_heads(file, tensor.name)
    return np.ascontiguousarray(_unpermute(values, heads) if heads else values)


def _permuted_heads(file: GGUF, name: str) -> int:
    """Heads whose rows llama.cpp interleaved for its rope of adjacent pairs; 0: none."""
    if file.architecture != "llama":
        return 0
    if ".attn_q." in name:
        return int(file.own("attention.head_count"))
    if ".attn_k." in name:
        return int(file.own("attention.head_count_kv", file.own("attention.head_count")))
    return 0


def _unpermute(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of a head from (pair, half) order back to (half, pair)."""
    shape = values.shape
    pairs = shape[0] // heads // 2
    return values.reshape(heads, pairs, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
