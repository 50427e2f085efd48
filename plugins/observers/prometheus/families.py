"""What is counted: names, types and buckets, as vLLM has them where it has the same thing.

`ENGINE` is counted in the engine process, `API` in the API processes. The order is that of the
numbers in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PHASES = ("schedule", "prepare", "forward", "sample", "commit")
REASONS = ("stop", "length", "abort", "error")

LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
STEP_TOKENS = tuple(float(2**power) for power in (0, *range(3, 15)))
TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True)
class Family:
    """One metric, without its prefix. label: a label beside those that all have, with all of its
    `values`. buckets: upper bounds of a histogram. by_context: buckets over max_model_len are not
    shown."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    doc: str
    label: str | None = None
    values: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()
    by_context: bool = False

    @property
    def width(self) -> int:
        """Numbers that it takes for one value of its label: of a histogram a count for each bucket
        and for what is above all of them, and the sum."""
        return len(self.buckets) + 2 if self.kind == "histogram" else 1


ENGINE: tuple[Family, ...] = (
    Family("num_requests_running", "gauge", "Sequences that run."),
    Family("num_requests_waiting", "gauge", "Sequences that wait to be run."),
    Family("num_requests_swapped", "gauge", "Of those that wait: with their KV on the host."),
    Family(
        "kv_cache_usage_perc",
        "gauge",
        "Fraction of the KV blocks in use, 0 to 1; cached blocks that can be evicted are free.",
    ),
    Family("kv_cache_swap_usage_perc", "gauge", "Fraction of the host blocks for swapping in use."),
    Family("num_preemptions", "counter", "Preemptions of sequences."),
    Family("num_swap_outs", "counter", "Preemptions that moved the KV to the host."),
    Family("num_swap_ins", "counter", "Sequences whose KV was brought back from the host."),
    Family("prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache."),
    Family("prefix_cache_hits", "counter", "Of those: tokens found, on the device or the host."),
    Family(
        "external_prefix_cache_queries",
        "counter",
        "Tokens not found on the device and looked up in the host's cache of evicted blocks.",
    ),
    Family("external_prefix_cache_hits", "counter", "Of those: tokens found."),
    Family(
        "iteration_tokens_total", "histogram", "Tokens computed in a step.", buckets=STEP_TOKENS
    ),
    Family("step_phase_seconds", "counter", "Time spent in each phase of a step.", "phase", PHASES),
    Family(
        "request_queue_time_seconds",
        "histogram",
        "From a request's arrival in the engine until it first runs.",
        buckets=LATENCY,
    ),
    Family(
        "request_prefill_time_seconds",
        "histogram",
        "From when a request first runs until its first token.",
        buckets=LATENCY,
    ),
    Family(
        "request_decode_time_seconds",
        "histogram",
        "From a request's first token until its last.",
        buckets=LATENCY,
    ),
    Family(
        "request_inference_time_seconds",
        "histogram",
        "From when a request first runs until its last token.",
        buckets=LATENCY,
    ),
)

API: tuple[Family, ...] = (
    Family("prompt_tokens", "counter", "Prompt tokens, once a request whatever its n."),
    Family("generation_tokens", "counter", "Generated tokens, of all choices."),
    Family("prompt_tokens_cached", "counter", "Prompt tokens found in the prefix cache."),
    Family("request_success", "counter", "Requests that ended.", "finished_reason", REASONS),
    Family(
        "admission_rejections",
        "counter",
        "Requests refused because too many wait (server.max_queued_requests, max_queued_tokens).",
        "reason",
        ("requests", "tokens"),
    ),
    Family(
        "time_to_first_token_seconds",
        "histogram",
        "From a request's arrival at the server until its first token.",
        buckets=FIRST_TOKEN,
    ),
    Family(
        "inter_token_latency_seconds",
        "histogram",
        "Between two tokens of a choice.",
        buckets=BETWEEN_TOKENS,
    ),
    Family(
        "e2e_request_latency_seconds",
        "histogram",
        "From a request's arrival at the server until its last token.",
        buckets=LATENCY,
    ),
    Family(
        "request_prompt_tokens",
        "histogram",
        "Prompt tokens of a request.",
        buckets=TOKENS,
        by_context=True,
    ),
    Family(
        "request_generation_tokens",
        "histogram",
        "Generated tokens of a request, of all choices.",
        buckets=TOKENS,
        by_context=True,
    ),
    Family(
        "request_max_num_generation_tokens",
        "histogram",
        "Generated tokens of a request's longest choice.",
        buckets=TOKENS,
        by_context=True,
    ),
    Family(
        "request_params_max_tokens",
        "histogram",
        "max_tokens of a request, or what its context leaves.",
        buckets=TOKENS,
        by_context=True,
    ),
    Family("request_params_n", "histogram", "n of a request.", buckets=CHOICES),
    Family("server_load", "gauge", "Generations under way at the server."),
)
