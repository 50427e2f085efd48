"""What vLLM has and Octavo lacks: one table, for errors and docs/from-vllm.md.

When a feature lands, delete its entry here; what it adds to the configuration goes into
`octavo.frontend.vllm.keywords`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.core.config.validation import show
from octavo.core.errors import ConfigError
from octavo.core.sampling_params import UNSUPPORTED, SamplingParams

__all__ = ["DIFFERENCES", "Difference", "SamplingParams", "table"]


@dataclass(frozen=True)
class Difference:
    """A feature that is not supported, and every name under which a caller may ask for it."""

    feature: str
    """In singular: "... is not supported"."""
    instead: str = ""
    """What to do instead; empty where there is no other way, and the feature may come."""
    methods: tuple[str, ...] = ()
    """Methods of `LLM`."""
    arguments: tuple[str, ...] = ()
    """Keyword arguments of `LLM.generate` and its like."""
    params: tuple[str, ...] = ()
    """Of `SamplingParams`."""
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keywords of `LLM(...)` and flags, with the values that mean "off" and are accepted."""
    request: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Parameters of an HTTP request, likewise."""

    @property
    def message(self) -> str:
        """`X is not supported: do Y`."""
        if self.instead:
            return f"{self.feature} is not supported: {self.instead}"
        return f"{self.feature} is not supported yet"


_OFF: tuple[Any, ...] = (False, [], {})
_N_CHOICES = "sample n choices and compare their log probabilities (logprobs=0)"

DIFFERENCES = (
    Difference(
        "LoRA",
        arguments=("lora_request",),
        settings={"enable_lora": _OFF, "lora_modules": _OFF, "max_loras": (1, *_OFF)},
        request={"lora_request": ()},
    ),
    Difference("speculative decoding", settings={"speculative_config": _OFF}),
    Difference("tensor parallelism", settings={"tensor_parallel_size": (1,)}),
    Difference("pipeline parallelism", settings={"pipeline_parallel_size": (1,)}),
    Difference("data parallelism", settings={"data_parallel_size": (1,)}),
    Difference("distributed execution", settings={"distributed_executor_backend": ("uni",)}),
    Difference("CPU offloading of weights", settings={"cpu_offload_gb": (0,)}),
    Difference(
        "choosing a tokenizer mode",
        "model.tokenizer_backend selects the tokenizer implementation",
        settings={"tokenizer_mode": ("auto",)},
    ),
    Difference(
        "beam search",
        _N_CHOICES,
        methods=("beam_search",),
        params=("use_beam_search", "length_penalty", "early_stopping"),
        request={"use_beam_search": (False,), "length_penalty": (1.0, 1)},
    ),
    Difference("best_of", _N_CHOICES, params=("best_of",), request={"best_of": (1,)}),
    Difference(
        "pooling (embedding, classification, reward models)",
        "Octavo serves text generation only; get_tokenizer().encode(text) returns token ids",
        methods=("embed", "classify", "score", "reward", "encode"),
    ),
    Difference(
        "guided_decoding",
        "use structured_outputs; structured_outputs.engine in the YAML selects the engine",
        params=("guided_decoding",),
        request=dict.fromkeys(
            (
                "guided_json",
                "guided_regex",
                "guided_choice",
                "guided_grammar",
                "guided_decoding_backend",
            ),
            (),
        ),
    ),
    Difference(
        "output_kind",
        "LLM.stream and AsyncLLM.stream yield deltas, AsyncLLM.generate all output so far, "
        "AsyncLLM.complete the final output",
        params=("output_kind",),
    ),
    Difference(
        "a logits processor per request",
        "write a logits processor plugin and enable it in the YAML; extra_args (vllm_xargs over "
        "HTTP) passes its parameters",
        params=("logits_processors",),
        request={"logits_processors": ([],)},
    ),
    Difference(
        "prompt_token_ids",
        "token ids are passed as prompts: generate([{'prompt_token_ids': [...]}])",
        arguments=("prompt_token_ids",),
    ),
    Difference(
        "truncate_prompt_tokens",
        "slice the prompt's token ids (the server has the parameter)",
        params=("truncate_prompt_tokens",),
    ),
    Difference("KV transfer", request={"kv_transfer_params": ({},)}),
    Difference("a prompt of embeddings", "pass text or token ids", request={"prompt_embeds": ()}),
)


def _by(column: str) -> dict[str, Difference]:
    return {name: item for item in DIFFERENCES for name in getattr(item, column)}


METHODS = _by("methods")
ARGUMENTS = _by("arguments")
SETTINGS = _by("settings")
REQUEST = _by("request")

UNSUPPORTED.update({name: item.instead or item.message for name, item in _by("params").items()})


def check_setting(name: str, value: Any) -> None:
    """Raise `ConfigError` when a keyword asks for something that is not supported."""
    item = SETTINGS[name]
    if value not in item.settings[name]:
        raise ConfigError(f"{name}: {item.message} (got {show(value)})")


def table() -> str:
    """The table of docs/from-vllm.md, as Markdown."""
    rows = ["| not supported | asked for by | instead |", "|---|---|---|"]
    rows += [
        f"| {item.feature} | {', '.join(_names(item))} | {item.instead} |" for item in DIFFERENCES
    ]
    return "\n".join(rows) + "\n"


def _names(item: Difference) -> Iterator[str]:
    yield from (f"`LLM.{name}`" for name in item.methods)
    yield from (f"`LLM.generate({name}=)`" for name in item.arguments)
    yield from (f"`SamplingParams({name}=)`" for name in item.params)
    yield from (f"`--{name.replace('_', '-')}`" for name in item.settings)
    yield from (f"`{name}` in a request" for name in item.request if name not in item.params)
