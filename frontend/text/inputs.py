"""`InputProcessor`: a prompt and sampling parameters to the requests that the engine takes."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

import msgspec
import numpy as np

from octavo.core.contracts.tokenizer import Tokenizer
from octavo.core.errors import RequestError, RequestTooLong, nearest
from octavo.core.messages import EngineRequest
from octavo.core.sampling_params import SamplingParams, check_token_ids

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; a mapping may also hold
`cache_salt`, and `prompt` beside `prompt_token_ids` as the text to report."""


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")

# generation_config.json key to SamplingParams field.
_GENERATION_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


_LONG = 256 * 2**10
"""Characters of a text that takes a tenth of a second and more to encode."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One caller's request, checked and tokenized."""

    request_id: str
    prompt: str | None
    """The text; None when token ids were given."""
    token_ids: list[int]
    sampling: SamplingParams
    """With the model's defaults where the caller gave none."""
    requests: list[EngineRequest]
    """What the engine gets: one a choice, choice 0 first."""


class InputProcessor:
    """The one place where requests are checked. Thread-safe as far as the tokenizer and
    `seed_source` are.

    max_model_len: most tokens of a sequence, prompt and output. vocab_size: rows of the model's
    embedding; no token id may reach it. seed_source: seeds of requests that give none, default
    random. generation_config: the model's sampling defaults.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        vocab_size: int | None = None,
        seed_source: Callable[[], int] | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.max_sequence_tokens = max_model_len
        """Most tokens of a sequence that the KV cache holds; known once the engine has started."""
        self.vocab_size = vocab_size or tokenizer.vocab_size
        self._seed_source = seed_source or _random_seed
        self._generation_config = dict(generation_config or {})
        self._handles = itertools.count(1)

    def default_sampling_params(self) -> SamplingParams:
        """Octavo's defaults, with what the model's generation_config.json says in their place."""
        return SamplingParams(
            **{
                field: self._generation_config[key]
                for key, field in _GENERATION_KEYS.items()
                if self._generation_config.get(key) is not None
            }
        )

    def prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str,
        priority: int = 0,
        user: str | None = None,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        strict_length: bool = False,
    ) -> PreparedRequest:
        """Check and tokenize a prompt. Raises `RequestError` and `RequestTooLong`.

        sampling: None: the model's defaults. priority: lower is sooner, under scheduler policies
        that order by it. user: who asks, for policies that share fairly. cache_salt: cached
        prefixes are shared only between equal salts. strict_length: refuse a max_tokens or
        min_tokens that does not fit, instead of generating fewer tokens.
        """
        _utf8("request_id", request_id)
        if user is not None:
            _utf8("user", user)
        sampling = self._check_sampling(sampling)
        text, ids, salt = _parse_prompt(prompt)
        salt = cache_salt if cache_salt is not None else salt
        asked = sampling.max_tokens if strict_length else None
        if ids is None and text is not None:
            token_ids = self.encode_prompt(
                text, add_special_tokens=add_special_tokens, max_tokens=asked
            )
        else:
            token_ids = self._check_ids(ids)
        if not token_ids:
            raise RequestError("the prompt is empty, expected at least one token", param="prompt")
        room = self._room(len(token_ids), asked)
        if strict_length and asked is None:
            sampling = msgspec.structs.replace(sampling, max_tokens=room)
        wanted = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        seed = self._seed_source() if sampling.seed is None else sampling.seed
        array = np.asarray(token_ids, dtype=np.int32)
        # The prompt is the same for every choice: one of them reports its logprobs.
        others = sampling
        if sampling.n > 1 and sampling.prompt_logprobs is not None:
            others = msgspec.structs.replace(sampling, prompt_logprobs=None)
        handles = [next(self._handles) for _ in range(sampling.n)]
        requests = [
            EngineRequest(
                handle=handle,
                request_id=request_id,
                token_ids=array,
                sampling=others if index else sampling,
                seed=seed,
                # The engine generates at least one token; for max_tokens 0 it is not shown.
                max_tokens=max(1, wanted),
                eos_token_ids=list(self.tokenizer.eos_token_ids),
                index=index,
                parent=handles[0] if index else None,
                priority=_priority(priority),
                user=user,
                extra_keys=[] if salt is None else [b"salt:" + _utf8("cache_salt", salt)],
            )
            for index, handle in enumerate(handles)
        ]
        return PreparedRequest(request_id, text, token_ids, sampling, requests)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, checked as a prompt's text is. A text that begins with the begin
        token, as chat templates write it, does not get another one."""
        _utf8("prompt", text)
        token_ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        begin = self.tokenizer.bos_token_id
        if add_special_tokens and begin is not None and token_ids[:2] == [begin, begin]:
            return token_ids[1:]
        return token_ids

    def fewest_tokens(self, text: str) -> int:
        """How many tokens `encode` gives at least, found without it, which would take seconds for
        a text far too long. 0: nothing is known, or the text is soon encoded."""
        if len(text) < _LONG:
            return 0
        _utf8("prompt", text)
        return max(0, self.tokenizer.fewest_tokens(text) - 1)  # `encode` may drop a begin token

    def encode_prompt(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """As `encode`. Raises `RequestTooLong`, as `check_text_length` does. max_tokens: that must
        fit, too; None: one token."""
        self.check_text_length(text, max_tokens)
        return self.encode(text, add_special_tokens=add_special_tokens)

    def check_text_length(self, text: str, max_tokens: int | None = None) -> None:
        """Raise `RequestTooLong` for a text so long that it cannot fit, without tokenizing it."""
        if least := self.fewest_tokens(text):
            self._room(least, max_tokens, at_least=True)

    def _check_ids(self, ids: Any) -> list[int]:
        if isinstance(ids, np.ndarray):
            ids = ids.tolist()
        if isinstance(ids, bytes | str) or not isinstance(ids, Sequence):
            raise RequestError(
                f"a prompt must be a string, token ids or a mapping, got {type(ids).__name__}",
                param="prompt",
            )
        if not set(map(type, ids)) <= {int}:  # a loop in C; the one below is for the rest
            for place, token in enumerate(ids):
                if isinstance(token, bool) or not isinstance(token, int | np.integer):
                    raise RequestError(
                        f"prompt_token_ids[{place}] must be an integer, got {token!r}",
                        param="prompt",
                    )
        token_ids = [int(token) for token in ids]
        check_token_ids("prompt", token_ids, self.vocab_size)
        return token_ids

    def _room(
        self, num_prompt: int, max_tokens: int | None = None, *, at_least: bool = False
    ) -> int:
        """How many tokens fit behind a prompt. Raises `RequestTooLong` where `max_tokens` (None:
        one) do not. at_least: `num_prompt` is a lower bound."""
        total = num_prompt + (1 if max_tokens is None else max_tokens)
        if total > self.max_sequence_tokens:
            limit = f"the KV cache holds {self.max_sequence_tokens} tokens of one sequence"
            if total > self.max_model_len:
                limit = f"max_model_len is {self.max_model_len}"
            raise RequestTooLong.of_prompt(
                num_prompt, limit, max_tokens=max_tokens, at_least=at_least
            )
        return self.max_sequence_tokens - num_prompt

    def _check_sampling(self, sampling: SamplingParams | None) -> SamplingParams:
        """A checked copy, with what only the model's tokenizer knows."""
        if sampling is None:
            sampling = self.default_sampling_params()
        elif isinstance(sampling, SamplingParams):
            sampling = sampling.checked()
        else:
            raise RequestError(
                f"sampling_params must be SamplingParams, got {type(sampling).__name__}"
            )
        if sampling.stop and not sampling.detokenize:
            raise RequestError("stop strings need detokenize=True", param="stop")
        for name in ("stop", "bad_words"):
            for text in getattr(sampling, name) or ():
                _utf8(name, text)
        if sampling.bad_words:
            words = [ids for word in sampling.bad_words for ids in self._bad_word(word)]
            sampling.bad_words_token_ids = words
        sampling.check_vocabulary(self.vocab_size)
        return sampling

    def _bad_word(self, word: str) -> list[list[int]]:
        """A word's token sequences at the start of a text and, after a space, inside one."""
        bare = word.lstrip() or word
        ways = [self.encode(form, add_special_tokens=False) for form in (bare, " " + bare)]
        return [ids for place, ids in enumerate(ways) if ids and ids not in ways[:place]]


def _parse_prompt(prompt: Any) -> tuple[str | None, Any, str | None]:
    """Text, token ids (not checked yet) and cache salt of a prompt in any of its forms."""
    if isinstance(prompt, str):
        return prompt, None, None
    if not isinstance(prompt, Mapping):
        return None, prompt, None
    for key in prompt:
        if key not in _PROMPT_KEYS:
            raise RequestError(
                f"unknown prompt key '{key}': {nearest(str(key), _PROMPT_KEYS)}", param="prompt"
            )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and ids is None:
        raise RequestError(
            "a prompt mapping must have 'prompt' or 'prompt_token_ids'", param="prompt"
        )
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt must be a string, got {type(text).__name__}", param="prompt")
    return text, ids, prompt.get("cache_salt")


def _priority(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"priority must be an integer, got {value!r}", param="priority")
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise RequestError(f"priority must fit into 64 bits, got {number}", param="priority")
    return number


def _utf8(name: str, text: str) -> bytes:
    if not isinstance(text, str):
        raise RequestError(f"{name} must be a string, got {type(text).__name__}", param=name)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not valid Unicode: a lone surrogate U+{ord(text[error.start]):04X} at "
            f"character {error.start}",
            param=name,
        ) from None


def _random_seed() -> int:
    return secrets.randbits(64)
