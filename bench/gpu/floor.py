"""The least time of a decode step, and the arithmetic of a prompt: what measured times are held
against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def step_bytes(start: Mapping[str, Any], kv_tokens: float) -> float:
    """Bytes that a decode step must read: every weight but rows of an embedding that is no head,
    and the KV of all tokens in context. start: of an engine part, see `engines.start_facts`.
    kv_tokens: tokens in context of all rows together."""
    weights = start["weight_bytes"] - start["embedding_bytes"]
    return float(weights + start["kv_token_bytes"] * kv_tokens)


def decode_floor(num_bytes: float, bytes_per_s: float) -> float:
    """Seconds of a step that reads `num_bytes`. Arithmetic is left out: at the batch sizes that are
    measured here it takes less time than reading, on any GPU of the last generations."""
    return num_bytes / bytes_per_s


def prompt_flops(start: Mapping[str, Any], tokens: int) -> float:
    """Operations of a prompt, a multiply-add counting two: each weight of the layers once a token,
    the head once, and causal attention: 2 tokens^2 x (heads x head size) a layer."""
    layers = start["num_parameters"] - start["head_parameters"] * (1 if start["tied"] else 2)
    attention = 2 * tokens**2 * start["attention_width"] * start["num_layers"]
    return float(2 * layers * tokens + 2 * start["head_parameters"] + attention)


def hidden_share(wall_1: float, wall_2: float, device: float) -> float | None:
    """How much of the host's work is hidden with two steps in flight: 1 when a step takes what the
    device takes, 0 when it takes what it takes with one. All are seconds a step. None where the
    device is busy all the time with one step in flight already: there is nothing to hide."""
    exposed = wall_1 - device
    if exposed <= 0:
        return None
    return 1 - (wall_2 - device) / exposed
