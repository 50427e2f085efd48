"""The engine's sections of the configuration. Docs and CLI help are derived from the fields'
descriptions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from octavo.core.config.models import (
    AUTO,
    COMPOSED,
    BaseConfig,
    ImplementationConfig,
    Once,
    PluginsConfig,
    Section,
)

Auto = Literal["auto"]
Tokens = Annotated[int, Field(gt=0, le=2**24)]
"""What a step may compute: more than any model's context, and less than what overflows."""
BlockSize = Annotated[int, Field(gt=0, le=2**16)]
Threads = Annotated[int, Field(gt=0, le=4096)]
MAX_BYTES = 2**50
MAX_BLOCKS = 2**26
"""What block ids (int32) and the bookkeeping of every block, some 30 bytes, have room for."""
DType = Literal["auto", "float32", "bfloat16", "float16"]


def _composition(value: Any) -> Any:
    """A list of policies is the choice of their composition; of one, that policy."""
    if not isinstance(value, list):
        return value
    choices = [ImplementationConfig.model_validate(item) for item in value]
    if not choices:
        raise ValueError("expected a policy, or a non-empty list of them, outermost first")
    if len(choices) == 1:
        return choices[0]
    policies = [{"name": choice.name, **choice.options} for choice in choices]
    return ImplementationConfig(name=COMPOSED, options={"policies": policies})


class ModelConfig(Section):
    """Which model, and how it is held."""

    source: str = Field(
        default="",
        description="Directory, hub id, .gguf file, or package:NAME[/FILE] for weights inside an "
        "installed Python package.",
    )
    tokenizer: str | None = Field(
        default=None, description="Source of the tokenizer, if not the model's own."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit on the hub.")
    download_dir: str | None = Field(default=None, description="Directory for hub downloads.")
    dtype: DType = Field(
        default="auto",
        description="Data type of weights and activations. auto: float32 on a CPU, the "
        "checkpoint's on a GPU.",
    )
    max_model_len: int | None = Field(
        default=None,
        gt=0,
        le=2**30,
        description="Maximum sequence length (prompt and output), in tokens. Default: the model's "
        "own limit.",
    )
    quantization: ImplementationConfig = Field(
        default=AUTO,
        description="Storage of linear-layer weights. auto: the checkpoint's method, else the "
        "fastest that is lossless.",
    )
    implementation: ImplementationConfig = Field(
        default=AUTO, description="Model implementation. auto: by the checkpoint's architecture."
    )
    weight_source: ImplementationConfig = Field(
        default=AUTO, description="Reader of the weights. auto: by the form of `source`."
    )
    tokenizer_backend: ImplementationConfig = Field(
        default=AUTO, description="Tokenizer implementation. auto: by the files of the model."
    )
    chat_template: str | None = Field(
        default=None, description="Chat template, or path of a file that contains one."
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = Field(
        default="auto",
        description="Form of a message's content in the template: string (text parts joined by "
        "line breaks), openai (a list of parts), or auto (a list if the template iterates "
        "over the parts).",
    )
    trust_remote_code: bool = Field(
        default=False, description="Allow Python code from the model repository to run."
    )
    hf_overrides: dict[str, Any] = Field(
        default_factory=dict, description="Keys that replace those of the model's config.json."
    )
    generation_config: Literal["auto", "octavo"] = Field(
        default="auto",
        description="auto: sampling defaults from the model's generation_config.json; octavo: "
        "Octavo's own.",
    )
    seed: int | None = Field(
        default=None,
        description="Seed for requests without one, combined with the order of arrival. Default: "
        "random.",
    )


class SchedulerConfig(Section):
    """Budgets and policy of the step loop."""

    policy: Annotated[ImplementationConfig, BeforeValidator(_composition)] = Field(
        default=ImplementationConfig(name="fcfs"),
        description="Order of admission, preemption and chunk sizes. A list composes policies: "
        "`[priority, fair]` orders classes by priority, and users fairly within a "
        "class.",
    )
    max_num_seqs: int = Field(
        default=256, gt=0, le=65536, description="Maximum number of sequences that run at once."
    )
    max_num_batched_tokens: Tokens | Auto = Field(
        default="auto",
        description="Maximum number of tokens in a step. auto: by device; on a CPU measured at "
        "startup, so that a full step takes at most 0.5 s.",
    )
    chunked_prefill: bool = Field(
        default=True, description="Allow prompts to be computed in chunks, alongside decodes."
    )
    max_chunk_tokens: Tokens | None = Field(
        default=None,
        description="Largest chunk of a prompt, in tokens. Default: the step's budget.",
    )


class KVCacheConfig(Section):
    """The KV cache pool."""

    manager: ImplementationConfig = Field(
        default=ImplementationConfig(name="paged"), description="KV cache manager."
    )
    block_size: BlockSize | Auto = Field(
        default="auto",
        description="Tokens per block. auto: 16, or what the attention backend requires.",
    )
    eviction: ImplementationConfig = Field(
        default=ImplementationConfig(name="lru"),
        description="Eviction order of cached blocks (manager: paged).",
    )
    host_cache_bytes: int = Field(
        default=0,
        ge=0,
        le=MAX_BYTES,
        description="Host memory for cached blocks evicted from the device, in bytes; they are "
        "copied back on a prefix hit (manager: paged). 0: none.",
    )
    prefix_caching: bool = Field(
        default=True, description="Reuse computed blocks for prompts with the same prefix."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"] = Field(
        default="auto", description="Data type of cached keys and values. auto: the model's dtype."
    )
    memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Fraction of device memory for weights, activations, captured graphs and the "
        "KV cache pool together, including memory held by other processes. On a CPU the "
        "pool is limited further, see docs/configuration.md.",
    )
    memory_bytes: int | None = Field(
        default=None,
        gt=0,
        le=MAX_BYTES,
        description="Size of the pool in bytes; disables profiling.",
    )
    num_blocks: int | None = Field(
        default=None,
        gt=0,
        le=MAX_BLOCKS,
        description="Size of the pool in blocks; disables profiling.",
    )


class PreemptionConfig(Section):
    """What happens to a request that gives way."""

    policy: ImplementationConfig = Field(
        default=ImplementationConfig(name="recompute"),
        description="recompute or swap, decided per victim; auto: the cheaper one, as measured.",
    )
    swap_space: int | None = Field(
        default=None,
        ge=0,
        le=MAX_BYTES,
        description="Host memory for the KV cache of preempted sequences, in bytes. Default: the "
        "size of the pool on the device, at most 4 GiB; none where the policy never "
        "swaps.",
    )


PHASES = ("prefill", "decode")
"""Keys of `attention` that choose a backend for some rows only."""


class AttentionConfig(Section):
    """Attention kernels."""

    backend: ImplementationConfig = Field(
        default=AUTO,
        description="Attention backend. auto: by device, compute capability, head sizes, dtype and "
        "KV dtype; the startup report gives the reasons.",
    )
    prefill: ImplementationConfig | None = Field(
        default=None, description="Backend for prompts (and chunks of them), if not the same."
    )
    decode: ImplementationConfig | None = Field(
        default=None, description="Backend for rows that compute one token each, if not the same."
    )


class SamplerConfig(Section):
    """Sampling kernels."""

    backend: ImplementationConfig = Field(default=AUTO, description="Sampler.")


class GraphConfig(Section):
    """How a forward pass is launched."""

    runner: ImplementationConfig = Field(default=AUTO, description="Graph runner.")


class ExecutorConfig(Section):
    """Where the model runs."""

    kind: ImplementationConfig = Field(
        default=ImplementationConfig(name="local"), description="Executor."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Device.")
    num_threads: Threads | Auto = Field(
        default="auto",
        description="CPU threads of the engine. auto: the cores that CPU affinity and cgroup "
        "allow.",
    )


class StructuredOutputsConfig(Section):
    """Output that keeps to a JSON schema, a regular expression, choices or a grammar."""

    engine: ImplementationConfig = Field(
        default=AUTO,
        description="Grammar engine. auto: the best one installed; none: requests for structured "
        "output are rejected.",
    )
    compile_timeout_s: float = Field(
        default=10.0,
        gt=0,
        description="Time limit for compiling one grammar, in seconds; the request is then "
        "rejected.",
    )
    compile_memory_bytes: int = Field(
        default=2 * 2**30,
        gt=0,
        description="Memory limit for compiling one grammar, in bytes beyond the process's "
        "baseline (Linux).",
    )
    compile_processes: int = Field(
        default=4,
        gt=0,
        le=64,
        description="Maximum number of grammars compiled at once; others wait.",
    )
    max_grammar_bytes: int = Field(
        default=64 * 2**20,
        gt=0,
        description="Maximum size of a compiled grammar; larger ones are rejected.",
    )
    cache_bytes: int = Field(
        default=256 * 2**20,
        ge=0,
        description="Memory for compiled grammars that no running request uses.",
    )
    preload: bool | Auto = Field(
        default="auto",
        description="Load the grammar engine in the background at startup rather than with the "
        "first request that needs it, which would wait some seconds longer. Takes about "
        "300 MB. auto: if `engine` is set.",
    )


class ObservabilityConfig(Section):
    """What is counted and logged."""

    timelines: int = Field(
        default=0,
        ge=0,
        description="Number of recent requests whose timeline is kept for `/debug/requests/{id}`; "
        "0: only of requests that ask for it.",
    )
    plugin_times: bool = Field(
        default=False,
        description="Count calls and seconds per implementation (`plugin_times` among the engine's "
        "metrics, and in `bench throughput --json`); costs about a microsecond per "
        "call.",
    )


class EngineConfig(BaseConfig):
    """Every section of the engine."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="The model.")
    scheduler: SchedulerConfig = Field(
        default_factory=SchedulerConfig, description="The step loop."
    )
    kv_cache: KVCacheConfig = Field(default_factory=KVCacheConfig, description="The KV cache.")
    preemption: PreemptionConfig = Field(
        default_factory=PreemptionConfig, description="Preemption."
    )
    attention: AttentionConfig = Field(default_factory=AttentionConfig, description="Attention.")
    sampler: SamplerConfig = Field(default_factory=SamplerConfig, description="Sampling.")
    graph: GraphConfig = Field(default_factory=GraphConfig, description="Graph runner.")
    executor: ExecutorConfig = Field(default_factory=ExecutorConfig, description="Executor.")
    logits_processors: Once = Field(
        default_factory=list,
        description="Logits processors in addition to the built-in ones, in order.",
    )
    structured_outputs: StructuredOutputsConfig = Field(
        default_factory=StructuredOutputsConfig, description="Structured output."
    )
    observers: Once = Field(default_factory=list, description="Observers.")
    extensions: Once = Field(
        default_factory=list,
        description="Engine extensions in addition to the built-in ones, in order.",
    )
    observability: ObservabilityConfig = Field(
        default_factory=ObservabilityConfig, description="Metrics and logging."
    )
    plugins: PluginsConfig = Field(default_factory=PluginsConfig, description="Plugins.")
