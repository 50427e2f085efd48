"""The arithmetic of `octavo plan`. Sizes are bytes of one device, times are seconds.

Legend: n devices share a model by tensor parallelism: heads, MLP and vocabulary are divided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.core.contracts.executor import DeviceMemory
from octavo.core.errors import ConfigError, ModelError
from octavo.core.hf_config import text_config
from octavo.engine.builder import DEFAULT_BUDGET
from octavo.engine.capacity import no_room, too_long
from octavo.engine.model_facts import quantization_method
from octavo.models.families.config import decoder_config, tensor_shapes
from octavo.plugins.executors.accelerators import Accelerator
from octavo.plugins.executors.model_size import ModelSize, bits, model_size
from octavo.plugins.executors.step_cost import StepShape
from octavo.plugins.logits_processors.table_sizes import tables_bytes

SCALE_BITS = {"int8": 16 / 32, "int4": 32 / 32, "fp8": 0.0}
"""Bits a weight for scales (and minima), beside the weight's own, of methods that quantize on
load: a scale, or a scale and a minimum, of 16 bits for 32 weights."""
PACKED = ("packed", "int8", "int4")
"""Methods that hold the head as they hold a layer (in 8 bits where layers have 4). A head that is
tied to the embedding is that too."""
GROUP = 128  # of GPTQ and AWQ checkpoints that do not say
_OTHER_GROUPS = 16 + 4  # bits of scale and zero point a group
_SAMPLED_ROWS = 256


@dataclass(frozen=True)
class PlanRequest:
    """What is asked for. quantization: Octavo's name. devices: number of equal ones."""

    dtype: str
    kv_dtype: str
    quantization: str
    max_model_len: int
    max_num_seqs: int
    block_size: int
    utilization: float
    devices: int = 1
    max_num_batched_tokens: int | None = None


@dataclass(frozen=True)
class Capacity:
    """Of each device. params: of the whole model. tables: of logits processors. kv_per_token: with
    the device's share of the heads. blocks: 0 where the weights do not fit. memory: see
    `WorkerReport`. exact: whether parameters were counted from the shapes of every tensor.
    undivided: why so many devices cannot share the model."""

    params: int
    weights: int
    activations: int
    tables: int
    kv_per_token: int
    pool: int
    blocks: int
    tokens: int
    concurrency: float
    longest: int
    block_bytes: int
    memory: DeviceMemory | None
    exact: bool
    size: ModelSize
    undivided: str | None = None

    @property
    def fits(self) -> bool:
        """Whether a sequence of `max_model_len` tokens has room."""
        return self.undivided is None and self.concurrency >= 1

    def problem(self, request: PlanRequest) -> str | None:
        """Why it does not fit, in the words of an engine's start."""
        if self.fits or self.undivided is not None:
            return self.undivided
        if self.memory is not None and not self.blocks:
            return no_room(self.memory, self.block_bytes)
        needed = -(-request.max_model_len // request.block_size) * self.block_bytes
        return too_long(request.max_model_len, needed, self.pool, self.longest)


def parameters(config: Mapping[str, Any], size: ModelSize) -> tuple[int, int, bool]:
    """(all parameters, those of the layers' matrices, whether that is exact)."""
    try:
        shapes = tensor_shapes(decoder_config(config))
    except ModelError:
        return size.num_parameters, size.layer_params, False
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    linear = [n for n, shape in shapes.items() if len(shape) == 2 and ".layers." in n]
    return sum(counts.values()), sum(counts[name] for name in linear), True


def weight_bits(config: Mapping[str, Any], request: PlanRequest) -> float:
    """Bits of a linear layer's weight, scales included: the checkpoint's quantization, else what
    is asked for."""
    section = config.get("quantization_config") or {}
    method = quantization_method(config)
    if method is not None:
        own = section.get("bits") or section.get("w_bit")
        if "fp8" in method:
            return 8.0
        if isinstance(own, int):
            group = section.get("group_size") or section.get("q_group_size") or GROUP
            return own + (_OTHER_GROUPS / group if group > 0 else 0.0)
        raise ConfigError(
            f"the checkpoint is quantized with '{method}', whose memory use is unknown"
        )
    if request.quantization in SCALE_BITS:
        return bits(request.quantization) + SCALE_BITS[request.quantization]
    return float(bits(request.dtype))


def capacity(
    config: Mapping[str, Any],
    request: PlanRequest,
    memory: int,
    device: str,
    pool: int | None = None,
) -> Capacity:
    """memory: of one device. pool: bytes of the KV pool, where another rule than the device's
    memory says (a CPU)."""
    size = model_size(config, request.dtype, request.kv_dtype, "none")
    count, linear, exact = parameters(config, size)
    per_weight = weight_bits(config, request)
    n = request.devices
    held = linear * per_weight + (count - linear) * bits(request.dtype)
    if request.quantization in PACKED and quantization_method(config) is None:
        head_bits = {"packed": per_weight}.get(request.quantization, 8 + SCALE_BITS["int8"])
        held += size.head_params * (head_bits - bits(request.dtype))
    weights = math.ceil(held / 8 / n)
    heads = -(-size.num_kv_heads // n)
    kv = size.num_layers * 2 * heads * size.head_size * bits(request.kv_dtype) // 8
    budget = request.max_num_batched_tokens or DEFAULT_BUDGET.get(device, 2048)
    activations = _activations(size, request, budget)
    block = kv * request.block_size
    useful = request.max_num_seqs * -(-request.max_model_len // request.block_size)
    shares, tables = None, 0
    if pool is None:
        tables = tables_bytes(request.max_num_seqs, request.max_model_len, size.vocab_size)
        shares = DeviceMemory(memory, request.utilization, weights, activations, tables=tables)
        pool = shares.pool
    blocks = min(pool // block, useful)
    tokens = blocks * request.block_size
    per_sequence = -(-request.max_model_len // request.block_size)
    return Capacity(
        params=count,
        weights=weights,
        activations=activations,
        tables=tables,
        kv_per_token=kv,
        pool=blocks * block,
        blocks=blocks,
        tokens=tokens,
        concurrency=blocks / per_sequence,
        longest=min(tokens, request.max_model_len),
        block_bytes=block,
        memory=shares,
        exact=exact,
        size=replace(size, weight_bits=max(1, round(per_weight))),
        undivided=undivided(config, size, n),
    )


def undivided(config: Mapping[str, Any], size: ModelSize, devices: int) -> str | None:
    """What n devices cannot divide evenly, in words: query heads, the MLP's inner width, and KV
    heads, of which several devices may hold the same one. The vocabulary is padded.

    As tensor parallelism is usually done: Shoeybi et al., Megatron-LM, 2019, section 3."""
    text, n = text_config(config), devices
    odd = []
    if size.num_heads % n:
        odd.append(f"{size.num_heads} query heads")
    if size.num_kv_heads % n and n % size.num_kv_heads:
        odd.append(f"{size.num_kv_heads} KV heads")
    for key in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        width = text.get(key)
        if isinstance(width, int) and width % n:
            odd.append(f"{key} {width}")
    if not odd:
        return None
    return f"{n} devices cannot divide evenly: {', '.join(odd)}"


def _activations(size: ModelSize, request: PlanRequest, budget: int) -> int:
    """A rough bound of a step's peak: hidden states, the MLP's and attention's inner rows, and
    float32 logits."""
    width = bits(request.dtype) // 8
    inner = 0
    if size.hidden:
        inner = 2 * size.mlp_params // (3 * size.hidden) or 2 * size.hidden
    heads = (size.num_heads + 2 * size.num_kv_heads) * size.head_size
    row = (4 * size.hidden + (inner + heads) // request.devices) * width
    logits = min(request.max_num_seqs, _SAMPLED_ROWS) * size.vocab_size * 4 // request.devices
    return budget * row + logits


def step_floor(
    size: ModelSize, device: Accelerator, request: PlanRequest, shape: StepShape
) -> float:
    """Seconds below which no step of this shape can be: every weight and the context's keys and
    values are read once at the full bandwidth, and computed at the full rate."""
    read = size.read_bytes(shape.tokens) + size.head_params * size.other_bits / 8
    read += shape.context * size.kv_bytes_per_token
    work = 2.0 * shape.tokens * size.active_params + 2.0 * shape.sampled * size.head_params
    work += 4.0 * size.num_heads * size.head_size * size.num_layers * (shape.pairs or shape.context)
    rate = device.flops_of(request.dtype)
    return max(read / device.memory_bandwidth, work / rate) / request.devices


def decode_shape(batch: int, context: int) -> StepShape:
    """A step in which `batch` sequences of `context` tokens decode."""
    return StepShape(0, batch, batch, batch * context, 0)


def prefill_shape(tokens: int) -> StepShape:
    """A whole prompt in one step."""
    return StepShape(tokens, 0, 1, tokens, tokens * (tokens + 1) // 2)


def least_devices(
    config: Mapping[str, Any], request: PlanRequest, memory: int, device: str
) -> int | None:
    """With how many devices, up to 64, that can divide the model a sequence of `max_model_len` has
    room."""
    counts = range(1, 65)
    fitting = (
        n for n in counts if capacity(config, replace(request, devices=n), memory, device).fits
    )
    return next(fitting, None)
