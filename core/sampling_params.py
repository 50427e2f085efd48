"""`SamplingParams`, under vLLM's names."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Self

import msgspec

from octavo.core.errors import RequestError
from octavo.core.structured_outputs import StructuredOutputsParams

GREEDY_EPSILON = 1e-5
"""A temperature below this is greedy: dividing logits by it would overflow."""

MAX_SEED = 2**64 - 1

MAX_N = 16384
"""Maximum number of choices of a request, each a sequence in the engine."""


_SWITCHES = (
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
    "timeline",
)


UNSUPPORTED: dict[str, str] = {}
"""Parameters of other engines, with what to do instead; `octavo.frontend.vllm` fills it."""


class _ParamsMeta(type(msgspec.Struct)):  # type: ignore[misc]
    """Adds a hint to the error for a parameter that another engine has."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        for name in UNSUPPORTED.keys() & values.keys():
            raise TypeError(f"SamplingParams has no '{name}': {UNSUPPORTED[name]}")
        return super().__call__(*args, **values)


class SamplingParams(msgspec.Struct, metaclass=_ParamsMeta, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request, validated when created and again when a request is made
    with them. None means "not set"."""

    n: int = 1  # choices
    temperature: float = 1.0  # 0 (or tiny): greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0 and -1: off
    min_p: float = 0.0  # in [0, 1], minimum probability relative to the most probable token
    presence_penalty: float = 0.0  # of output tokens, as frequency_penalty
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # of prompt and output tokens
    logit_bias: dict[int, float] | None = None  # token id to added logit
    bad_words: list[str] | None = None  # strings that may not appear
    bad_words_token_ids: list[list[int]] | None = None  # these, tokenized
    allowed_token_ids: list[int] | None = None  # nothing else may appear
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0  # no end token before
    # Number of alternatives beside the sampled token (0: only that one; -1: the whole vocabulary),
    # raw: before penalties and temperature.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None  # 64 bits; None: drawn by the engine
    skip_special_tokens: bool = True
    shown_special_token_ids: list[int] | None = None  # not skipped all the same
    spaces_between_special_tokens: bool = True
    detokenize: bool = True  # False leaves text empty
    structured_outputs: StructuredOutputsParams | None = None  # or a mapping with its keys
    extra_args: dict[str, Any] | None = None  # for plugins' logits processors, by processor name
    timeline: bool = False  # record what happens to the request (`RequestOutput.timeline`)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.top_k == -1:
            self.top_k = 0
        self._check_numbers()
        self._check_lists()
        self._check_others()
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.make(self.structured_outputs)
            if self.ignore_eos:
                raise RequestError(
                    "ignore_eos cannot be combined with structured_outputs, whose grammar decides "
                    "where the output ends",
                    param="ignore_eos",
                )

    def _check_numbers(self) -> None:
        self.n = _integer("n", self.n, 1, MAX_N)
        self.temperature = _finite("temperature", self.temperature, 0.0, 100.0)
        self.top_p = _finite("top_p", self.top_p, 0.0, 1.0, open_low=True)
        self.top_k = _integer("top_k", self.top_k, -1, note="(0 and -1 mean off)")
        self.min_p = _finite("min_p", self.min_p, 0.0, 1.0)
        self.presence_penalty = _finite("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = _finite("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = _finite(
            "repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True
        )
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, 0)
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
                param="min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                note = "(-1 means the whole vocabulary)"
                setattr(self, name, _integer(name, value, -1, note=note))
        if self.seed is not None:
            if not isinstance(self.seed, Integral) or isinstance(self.seed, bool):
                raise RequestError(f"seed must be an integer, got {self.seed!r}", param="seed")
            if not -(2**63) <= self.seed <= MAX_SEED:
                raise RequestError(f"seed must fit in 64 bits, got {self.seed}", param="seed")
            self.seed = int(self.seed) & MAX_SEED

    def _check_lists(self) -> None:
        for name in ("stop", "bad_words"):
            given = getattr(self, name)
            texts = _items(name, given, "strings")
            setattr(self, name, None if given is None else texts)
            for text in texts:
                if not isinstance(text, str) or not text:
                    raise RequestError(
                        f"{name} must be non-empty strings, got {text!r}", param=name
                    )
        for name in ("stop_token_ids", "allowed_token_ids", "shown_special_token_ids"):
            given = getattr(self, name)
            tokens = [_integer(name, token, 0) for token in _items(name, given, "token ids")]
            setattr(self, name, None if given is None else tokens)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError(
                    f"logit_bias must be a mapping of token ids to numbers, "
                    f"got {type(self.logit_bias).__name__}",
                    param="logit_bias",
                )
            self.logit_bias = {
                _integer("logit_bias", token, 0): _finite("logit_bias", bias, -100.0, 100.0)
                for token, bias in self.logit_bias.items()
            }

    def _check_others(self) -> None:
        for name in _SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool):
                if type(value).__name__ not in ("bool", "bool_"):  # NumPy's
                    raise RequestError(f"{name} must be true or false, got {value!r}", param=name)
                setattr(self, name, bool(value))
        if self.extra_args is not None and not isinstance(self.extra_args, Mapping):
            raise RequestError(
                f"extra_args must be a mapping, got {type(self.extra_args).__name__}",
                param="extra_args",
            )
        if self.bad_words_token_ids is not None:
            name = "bad_words_token_ids"
            words = _items(name, self.bad_words_token_ids, "lists of token ids")
            self.bad_words_token_ids = [
                [_integer(name, token, 0) for token in _items(name, word, "token ids")]
                for word in words
            ]

    def checked(self) -> Self:
        """A copy, validated like a new one. Raises `RequestError`."""
        return msgspec.structs.replace(self)

    def clone(self) -> SamplingParams:
        """A copy that shares nothing."""
        return copy.deepcopy(self)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature < GREEDY_EPSILON

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `RequestError` for token ids and logprobs counts beyond the vocabulary."""
        named = {
            "logit_bias": self.logit_bias or (),
            "stop_token_ids": self.stop_token_ids or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": (t for word in self.bad_words_token_ids or () for t in word),
        }
        for name, tokens in named.items():
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise RequestError(
                        f"{name} has token id {token}, expected 0 to {vocab_size - 1}", param=name
                    )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > vocab_size:
                raise RequestError(
                    f"{name} must be at most the vocabulary's size {vocab_size}, got {value}",
                    param=name,
                )


def _items(name: str, value: Any, what: str) -> list[Any]:
    """The items of a list, tuple, set or array; none for None."""
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise RequestError(
            f"{name} must be a list of {what}, got {type(value).__name__}", param=name
        )
    return list(value)


def _integer(name: str, value: Any, low: int, high: int | None = None, *, note: str = "") -> int:
    """The value as an `int`; NumPy integers are accepted."""
    if type(value) is int and low <= value <= (2**63 - 1 if high is None else high):
        return value  # as nearly always
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    most = 2**63 - 1 if high is None else high  # what arrays and messages hold
    if number is None or not low <= number <= most:
        open_end = high is None and (number is None or number < low)
        wanted = f"of at least {low}" if open_end else f"in [{low}, {most}]"
        text = f"{name} must be an integer {wanted} {note}".rstrip()
        raise RequestError(f"{text}, got {value!r}", param=name)
    return number


def _finite(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """The value as a `float` (an `int` stays one); NumPy numbers are accepted."""
    if (type(value) is float or type(value) is int) and low < value <= high:
        return value  # as nearly always
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:
        inside = False
    else:
        inside = value > low or not open_low
    if not inside:
        bracket = "(" if open_low else "["
        raise RequestError(
            f"{name} must be a number in {bracket}{low:g}, {high:g}], got {value!r}", param=name
        )
    return value if isinstance(value, int) else float(value)
