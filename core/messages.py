"""What travels between front end, engine and executor: typed, encodable without pickle.

Legend: B rows of a step's batch, R rows that sample, W tokens a row samples at most (1 today),
G KV groups, V vocabulary.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import RequestError
from octavo.core.sampling_params import SamplingParams

M = TypeVar("M")

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


# ---- front end to engine ------------------------------------------------------------------------


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sequence to generate. A request with n > 1 is n of these with one `parent`.

    handle: unique among the live requests of one engine, chosen by the front end. request_id: the
    caller's name for it. index: which of the n choices (the draw index of its random numbers).
    parent: handle of choice 0; the KV of the prompt is forked from it where that is possible.
    extra_keys: requests share cached KV only when these are equal (cache salt, adapter).
    max_tokens: resolved, at least 1. eos_token_ids: end tokens unless `sampling.ignore_eos`.
    """

    handle: int
    request_id: str
    token_ids: Int32
    sampling: SamplingParams
    seed: int
    max_tokens: int
    eos_token_ids: list[int] = []
    index: int = 0
    parent: int | None = None
    priority: int = 0
    user: str | None = None
    extra_keys: list[bytes] = []
    adapter: int = 0


# ---- engine to executor -------------------------------------------------------------------------


class AdmittedRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A sequence that gets a slot in this step: new, resumed after preemption, or forked.

    token_ids: all known tokens (prompt, and output of an earlier life). num_prompt: how many of
    them the caller sent. num_computed: leading tokens whose KV is already in the blocks. blocks:
    int32[G, n], the slot's block table. seed, index: of the random draw.
    """

    slot: int
    handle: int
    token_ids: Int32
    num_prompt: int
    num_computed: int
    blocks: Int32
    sampling: SamplingParams
    seed: int
    index: int = 0
    eos_token_ids: list[int] = []
    adapter: int = 0


class StepPlan(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All that a worker needs for one forward pass, as changes to what it already knows.

    Applied in this order: released, admitted, appended, copies; then the forward pass. Copies run
    in the order given, one after the other: a block that is swapped out, handed out again and
    filled from the host within one step is read before it is written.

    step: counts from 0. released: int32[n] slots that are free now. appended: int32[4, n] rows
    (group, slot, index in the block table, block id). copies: int32[5, n] rows (kind, group,
    source, target, tokens) with kind 0 inside the device, 1 device to host, 2 host to device.
    slots: int32[B] the batch in order, the `num_decodes` rows that compute exactly one token and
    sample come first. counts: int32[B] tokens each row computes. sample_rows: int32[R] indices into
    the batch that sample, ascending. layout: changes whenever `slots` differs from the last plan,
    so that a worker may keep what it derived from it. needs_mask: the engine will send masks for
    this step through `Executor.sample`.
    """

    step: int
    slots: Int32
    counts: Int32
    num_decodes: int
    sample_rows: Int32
    layout: int
    released: Int32
    appended: Int32
    copies: Int32
    admitted: list[AdmittedRow] = []
    needs_mask: bool = False


class LogitMasks(msgspec.Struct, kw_only=True):
    """From host logits processors. rows: int32[m] indices into the R sampling rows. bitmask:
    int32[m, ceil(V / 32)]; bit t % 32 of word t // 32 says whether token t may be sampled."""

    rows: Int32
    bitmask: Int32


class Logprobs(msgspec.Struct, kw_only=True):
    """Columns for m positions, with k alternatives each. rows: int32[m] (indices into the R
    sampling rows, or into the prompt). token_ids: int32[m, 1 + k], the chosen token first, then the
    k most probable in descending order. values: float32[m, 1 + k] natural logarithms of raw
    probabilities. ranks: int32[m] rank of the chosen token, from 1. num: int32[m] how many of the k
    a row asked for."""

    rows: Int32
    token_ids: Int32
    values: Float32
    ranks: Int32
    num: Int32


class PromptLogprobs(msgspec.Struct, kw_only=True):
    """Logprobs of prompt tokens `start` to `start + m` of one sequence; token 0 has none."""

    handle: int
    start: int
    logprobs: Logprobs


class StepResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """token_ids: int32[R, W]. counts: int32[R] valid tokens of each row, None: all W. errors: rows
    (of R) that could not be sampled, with the message; their tokens are meaningless. faults: those
    of them that failed by no doing of their request. Times are seconds spent in the worker; copy_s,
    those of copies between host and device, is part of prepare_s on a CPU, and runs beside it on
    CUDA."""

    step: int
    token_ids: Int32
    counts: Int32 | None = None
    errors: dict[int, str] = {}
    faults: list[int] = []
    logprobs: Logprobs | None = None
    prompt_logprobs: list[PromptLogprobs] = []
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    copy_s: float = 0.0


# ---- engine to front end ------------------------------------------------------------------------


class Finish(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A sequence ended. reason: `stop`, `length`, `abort` or `error`. stop_token: the stop token id
    that ended it (not for eos). error: the message, when the reason is `error`; param and code: of
    the `RequestError` that it was (`internal_error`: not the request's doing)."""

    handle: int
    reason: str
    stop_token: int | None = None
    error: str | None = None
    param: str | None = None
    code: str | None = None
    num_preemptions: int = 0


class SchedulerStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """State after a step. Blocks, queries and hits as in `KVStats`. num_swapped: sequences that
    wait with their KV in the host pool. Preemptions (num_swap_outs of them by swapping) and
    num_swap_ins are counted since start."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_evictable_blocks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_preemptions: int = 0
    num_swapped: int = 0
    num_swap_outs: int = 0
    num_swap_ins: int = 0
    num_swap_blocks: int = 0
    num_free_swap_blocks: int = 0
    host_cache_blocks: int = 0
    host_cache_used: int = 0
    host_cache_queries: int = 0
    host_cache_hits: int = 0


class EngineOutputs(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """All that one step produced, as one message.

    handles: int64[n] the sequences that got tokens. token_ids: int32[n, W]. counts: int32[n] valid
    tokens of each, None: all W. finished comes after the tokens. cached: handle to prompt tokens
    that were found in the prefix cache, sent once, when the sequence is first admitted.
    logprobs.rows index `handles`.
    """

    step: int
    handles: Int64
    token_ids: Int32
    counts: Int32 | None = None
    finished: list[Finish] = []
    cached: dict[int, int] = {}
    logprobs: Logprobs | None = None
    prompt_logprobs: list[PromptLogprobs] = []
    stats: SchedulerStats | None = None


def refused(handle: int, error: RequestError) -> Finish:
    """The end of a sequence that the engine did not take."""
    return Finish(
        handle=handle, reason="error", error=error.message, param=error.param, code=error.code
    )


def only_finished(finished: list[Finish]) -> EngineOutputs:
    """Outputs without a step: sequences that ended, and nothing else."""
    return EngineOutputs(
        step=-1,
        handles=np.empty(0, np.int64),
        token_ids=np.empty((0, 1), np.int32),
        finished=finished,
    )


# ---- encoding -----------------------------------------------------------------------------------

# An array is an extension value: its code names the dtype, its data are the number of dimensions
# (uint8), the shape (uint32 each, little endian) and the elements.
_CODES = {np.dtype(np.int32): 1, np.dtype(np.int64): 2, np.dtype(np.float32): 3}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def _encode_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype in _CODES:
        header = struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
        return msgspec.msgpack.Ext(_CODES[value.dtype], header + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot encode {type(value).__name__} in a message")


def _ext_hook(code: int, data: memoryview) -> Any:
    if code not in _DTYPES:
        raise msgspec.DecodeError(f"unknown extension code {code}")
    ndim = data[0]
    shape = struct.unpack_from(f"<{ndim}I", data, 1)
    dtype: Any = _DTYPES[code]
    return np.frombuffer(data, dtype, offset=1 + 4 * ndim).reshape(shape)


def _decode_hook(kind: Any, value: Any) -> Any:
    return value  # arrays were made by the extension hook


class Codec(Generic[M]):
    """Encodes and decodes one message type as msgpack. Decoded arrays are read-only views."""

    def __init__(self, message_type: type[M]) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_hook)
        self._decoder = msgspec.msgpack.Decoder(
            message_type, ext_hook=_ext_hook, dec_hook=_decode_hook
        )

    def encode(self, message: M) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes) -> M:
        return self._decoder.decode(data)
