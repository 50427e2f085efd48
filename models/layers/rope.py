"""Rotary position embedding: inverse frequencies of each scaling kind, and the table of cosines.

Legend: D rotated dimensions of a head, L positions. Pair i of a head is dimensions (i, i + D/2).
"""

from __future__ import annotations

import math

import torch

from octavo.models.layers.rope_config import RopeConfig


def rope_table(rope: RopeConfig, max_model_len: int, device: torch.device) -> torch.Tensor:
    """float32[max_model_len, D]: the D/2 cosines, then the D/2 sines, of each position.

    `dynamic` (NTK) is a function of the sequence's length n: beyond `max_position_embeddings` its
    base grows with n. Row p of the table is for n = p + 1, which is what transformers computes
    when it decodes token by token with a KV cache, and does not depend on how a prompt is chunked.
    It differs from transformers for a prompt that is itself longer than
    `max_position_embeddings`, where that applies the whole prompt's length to every position.
    """
    positions = torch.arange(max_model_len, dtype=torch.float32, device=device)
    frequencies, scale = _inverse_frequencies(rope, device)
    angles = positions[:, None] * frequencies
    if rope.kind == "dynamic" and max_model_len > rope.max_positions:
        late = positions[rope.max_positions :]
        angles[rope.max_positions :] = late[:, None] * _dynamic(rope, late + 1.0)
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)


def _powers(rope: RopeConfig, device: torch.device) -> torch.Tensor:
    """float32[D/2]: wavelength of each pair, over 2 pi."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32, device=device) / rope.dim
    return torch.as_tensor(rope.theta**exponents)


def _inverse_frequencies(rope: RopeConfig, device: torch.device) -> tuple[torch.Tensor, float]:
    """float32[D/2], and what multiplies cosines and sines."""
    frequencies = 1.0 / _powers(rope, device)
    if rope.kind == "linear":
        return frequencies / rope.number("factor"), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, device)
    return frequencies, 1.0


def _dynamic(rope: RopeConfig, lengths: torch.Tensor) -> torch.Tensor:
    """float32[len(lengths), D/2]: NTK-aware scaling of the base by sequence length."""
    factor = rope.number("factor")
    stretch = factor * lengths / rope.max_positions - (factor - 1.0)
    bases = rope.theta * stretch ** (rope.dim / (rope.dim - 2))
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32, device=lengths.device) / rope.dim
    return 1.0 / bases[:, None] ** exponents


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones are kept, between the two
    limits it goes over linearly."""
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    turns = rope.number("original_max_position_embeddings") * frequencies / (2.0 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / factor)


def _yarn(rope: RopeConfig, device: torch.device) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv:2309.00071, sections 3.2 to 3.4): pairs that turn often keep their frequency,
    pairs that turn seldom are interpolated, and attention is sharpened by a factor."""
    powers = _powers(rope, device)
    original = rope.number("original_max_position_embeddings")
    factor = rope.number("factor", rope.max_positions / original)
    slow = rope.number("beta_slow", 1.0) or 1.0
    fast = rope.number("beta_fast", 32.0) or 32.0

    def pair_with(turns: float) -> float:
        return rope.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(fast), pair_with(slow)
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(rope.dim // 2, dtype=torch.float32, device=device)
    interpolated = ((pairs - low) / (high - low)).clamp(0.0, 1.0)
    frequencies = interpolated / (factor * powers) + (1.0 - interpolated) / powers
    return frequencies, _yarn_scale(rope, factor)


def _yarn_scale(rope: RopeConfig, factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if rope.parameters.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.parameters.get("mscale") and rope.parameters.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)
