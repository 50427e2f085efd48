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
    """One sequence to generate. A request with n > 1 is n of these with one `parent`."""

    handle: int  # unique among the live requests of one engine, chosen by the front end
    request_id: str  # the caller's name for it
    token_ids: Int32
    sampling: SamplingParams
    seed: int
    max_tokens: int  # resolved, at least 1
    eos_token_ids: list[int] = []  # end tokens unless `sampling.ignore_eos`
    index: int = 0  # which of the n choices (the draw index of its random numbers)
    parent: int | None = None  # handle of choice 0, whose KV of the prompt is forked if possible
    priority: int = 0
    user: str | None = None
    # Requests share cached KV only when these are equal (cache salt, adapter).
    extra_keys: list[bytes] = []
    adapter: int = 0


# ---- engine to executor -------------------------------------------------------------------------


class AdmittedRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A sequence that gets a slot in this step: new, resumed after preemption, or forked."""

    slot: int
    handle: int
    token_ids: Int32  # all known tokens: prompt, and output before a preemption
    num_prompt: int  # of these, sent by the caller
    num_computed: int  # leading tokens whose KV is already in the blocks
    blocks: Int32  # int32[G, n], the slot's block table
    sampling: SamplingParams
    seed: int  # of the random draw, as `index`
    index: int = 0
    eos_token_ids: list[int] = []
    adapter: int = 0


class StepPlan(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All that a worker needs for one forward pass, as changes to what it already knows.

    Applied in this order: released, admitted, appended, copies; then the forward pass. Copies run
    in the order given, one after the other: a block that is swapped out, handed out again and
    filled from the host within one step is read before it is written.
    """

    step: int  # from 0
    slots: Int32  # int32[B], the batch in order
    counts: Int32  # int32[B], tokens each row computes
    num_decodes: int  # leading rows that compute exactly one token and sample
    sample_rows: Int32  # int32[R], indices into the batch, ascending
    layout: int  # changes whenever `slots` differs from the last plan
    released: Int32  # int32[n], slots that are free now
    appended: Int32  # int32[4, n], rows (group, slot, index in the block table, block id)
    # int32[5, n], rows (kind, group, source, target, tokens), kind as in `CopyKind`.
    copies: Int32
    admitted: list[AdmittedRow] = []
    needs_mask: bool = False  # the engine will send masks through `Executor.sample`


class LogitMasks(msgspec.Struct, kw_only=True):
    """From host logits processors."""

    rows: Int32  # int32[m], indices into the R sampling rows
    bitmask: Int32  # int32[m, ceil(V / 32)]; bit t % 32 of word t // 32: token t is allowed


class Logprobs(msgspec.Struct, kw_only=True):
    """Columns for m positions, with k alternatives each."""

    rows: Int32  # int32[m], indices into the R sampling rows, or into the prompt
    token_ids: Int32  # int32[m, 1 + k], the chosen token, then the k most probable, descending
    values: Float32  # float32[m, 1 + k], natural logarithms of raw probabilities
    ranks: Int32  # int32[m], rank of the chosen token, from 1
    num: Int32  # int32[m], how many of the k a row asked for


class PromptLogprobs(msgspec.Struct, kw_only=True):
    """Logprobs of prompt tokens `start` to `start + m` of one sequence; token 0 has none."""

    handle: int
    start: int
    logprobs: Logprobs


class StepResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a step computed. Times are seconds spent in the worker."""

    step: int
    token_ids: Int32  # int32[R, W]
    counts: Int32 | None = None  # int32[R], valid tokens of each row; None: all W
    errors: dict[int, str] = {}  # rows (of R) that could not be sampled; their tokens mean nothing
    faults: list[int] = []  # those of them that are not their request's fault
    logprobs: Logprobs | None = None
    prompt_logprobs: list[PromptLogprobs] = []
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    copy_s: float = 0.0  # between host and device: part of prepare_s on a CPU, beside it on CUDA


# ---- engine to front end ------------------------------------------------------------------------


class Finish(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A sequence ended."""

    handle: int
    reason: str  # `stop`, `length`, `abort` or `error`
    stop_token: int | None = None  # stop token id that ended it (not for eos)
    error: str | None = None  # message of the `RequestError`, as param and code
    param: str | None = None
    code: str | None = None  # `internal_error`: not the request's fault
    num_preemptions: int = 0


class EngineOutputs(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All that one step produced, as one message. `finished` comes after the tokens."""

    step: int
    handles: Int64  # int64[n], sequences that got tokens
    token_ids: Int32  # int32[n, W]
    counts: Int32 | None = None  # int32[n], valid tokens of each; None: all W
    finished: list[Finish] = []
    cached: dict[int, int] = {}  # handle to prompt tokens found in the prefix cache, sent once
    logprobs: Logprobs | None = None  # `rows` index `handles`
    prompt_logprobs: list[PromptLogprobs] = []


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
