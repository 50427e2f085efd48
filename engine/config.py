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
        description="Folder, hub id, .gguf file, or package:NAME[/FILE] for weights inside an "
        "installed Python package.",
    )
    tokenizer: str | None = Field(
        default=None, description="Where the tokenizer comes from when it is not the model's own."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit on the hub.")
    download_dir: str | None = Field(default=None, description="Folder for hub downloads.")
    dtype: DType = Field(
        default="auto",
        description="Type of weights and activations. auto: float32 on a CPU, the checkpoint's "
        "own on a GPU.",
    )
    max_model_len: int | None = Field(
        default=None,
        gt=0,
        le=2**30,
        description="Longest sequence, prompt and output, in tokens. Default: the model's own.",
    )
    quantization: ImplementationConfig = Field(
        default=AUTO,
        description="How linear layers hold their weights. auto: the checkpoint's own method, "
        "else the best that rounds nothing.",
    )
    implementation: ImplementationConfig = Field(
        default=AUTO, description="Model implementation. auto: by the checkpoint's architecture."
    )
    weight_source: ImplementationConfig = Field(
        default=AUTO, description="Reader of the weights. auto: by the form of `source`."
    )
    tokenizer_backend: ImplementationConfig = Field(
        default=AUTO, description="Tokenizer implementation. auto: by the files that are there."
    )
    chat_template: str | None = Field(
        default=None, description="Chat template, or the path of a file with one."
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = Field(
        default="auto",
        description="What the template gets for a message's content: string (text parts are joined "
        "by line breaks), openai (a list of parts), or auto (a list stays one where the template "
        "goes through the parts).",
    )
    trust_remote_code: bool = Field(
        default=False, description="Whether Python code inside a model repository may run."
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
        description="Seed for requests that give none, by order of arrival. Default: random.",
    )


class SchedulerConfig(Section):
    """Budgets and policy of the step loop."""

    policy: Annotated[ImplementationConfig, BeforeValidator(_composition)] = Field(
        default=ImplementationConfig(name="fcfs"),
        description="Order of admission, preemption and chunk sizes. A list composes: "
        "`[priority, fair]` orders classes by priority, and users fairly within a class.",
    )
    max_num_seqs: int = Field(
        default=256, gt=0, le=65536, description="Most sequences that run at once."
    )
    max_num_batched_tokens: Tokens | Auto = Field(
        default="auto",
        description="Most tokens a step computes. auto: by device; on a CPU measured at start, so "
        "that a full step takes at most half a second.",
    )
    chunked_prefill: bool = Field(
        default=True, description="Whether prompts may be computed in chunks beside decodes."
    )
    max_chunk_tokens: Tokens | None = Field(
        default=None, description="Largest chunk of one prompt. Default: the step's budget."
    )


class KVCacheConfig(Section):
    """The KV cache pool."""

    manager: ImplementationConfig = Field(
        default=ImplementationConfig(name="paged"), description="KV cache manager."
    )
    block_size: BlockSize | Auto = Field(
        default="auto", description="Tokens a block. auto: 16, or what the attention backend asks."
    )
    eviction: ImplementationConfig = Field(
        default=ImplementationConfig(name="lru"),
        description="Which cached block goes first (manager: paged).",
    )
    host_cache_bytes: int = Field(
        default=0,
        ge=0,
        le=MAX_BYTES,
        description="Host memory for cached blocks that were evicted from the device; they come "
        "back on a prefix hit (manager: paged). 0: none.",
    )
    prefix_caching: bool = Field(
        default=True, description="Whether computed blocks are reused for equal prefixes."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"] = Field(
        default="auto", description="Type of cached keys and values. auto: the model's dtype."
    )
    memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Fraction of the device's memory that weights, activations, captured graphs "
        "and pool may take together, what other processes hold counting too. On a CPU the pool is "
        "bounded further, see docs/configuration.md.",
    )
    memory_bytes: int | None = Field(
        default=None,
        gt=0,
        le=MAX_BYTES,
        description="Size of the pool in bytes, instead of by profiling.",
    )
    num_blocks: int | None = Field(
        default=None,
        gt=0,
        le=MAX_BLOCKS,
        description="Size of the pool in blocks, instead of by profiling.",
    )


class PreemptionConfig(Section):
    """What happens to a request that gives way."""

    policy: ImplementationConfig = Field(
        default=ImplementationConfig(name="recompute"),
        description="recompute or swap, victim by victim; auto: the cheaper one, as measured.",
    )
    swap_space: int | None = Field(
        default=None,
        ge=0,
        le=MAX_BYTES,
        description="Host memory in bytes for the KV of preempted sequences. Default: as much as "
        "the pool on the device, at most 4 GiB; none where the policy never swaps.",
    )


PHASES = ("prefill", "decode")
"""Keys of `attention` that choose a backend for some rows only."""


class AttentionConfig(Section):
    """Attention kernels."""

    backend: ImplementationConfig = Field(
        default=AUTO,
        description="Attention backend. auto: by device, compute capability, head sizes, dtype and "
        "KV dtype; the startup report says why.",
    )
    prefill: ImplementationConfig | None = Field(
        default=None, description="Another backend for prompts (and chunks of them)."
    )
    decode: ImplementationConfig | None = Field(
        default=None, description="Another backend for rows that compute one token each."
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
        description="CPU threads of the engine. auto: the cores that affinity and cgroup allow.",
    )


class StructuredOutputsConfig(Section):
    """Output that keeps to a JSON schema, a regular expression, choices or a grammar."""

    engine: ImplementationConfig = Field(
        default=AUTO,
        description="Grammar engine. auto: the best that is installed; none: requests with "
        "structured output are refused.",
    )
    compile_timeout_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds that compiling one grammar may take; then it is killed, and the "
        "request refused.",
    )
    compile_memory_bytes: int = Field(
        default=2 * 2**30,
        gt=0,
        description="Memory that compiling one grammar may take beyond what the process has "
        "(Linux).",
    )
    compile_processes: int = Field(
        default=4, gt=0, le=64, description="Grammars that are compiled at once; others wait."
    )
    max_grammar_bytes: int = Field(
        default=64 * 2**20, gt=0, description="Largest compiled grammar; a larger one is refused."
    )
    cache_bytes: int = Field(
        default=256 * 2**20,
        ge=0,
        description="Memory for compiled grammars that no request uses at the moment.",
    )
    preload: bool | Auto = Field(
        default="auto",
        description="Make the grammar engine ready in the background once the model is loaded, not "
        "with the first request that needs it, which then waits some seconds longer. It holds some "
        "300 MB. auto: where `engine` names one.",
    )


class ObservabilityConfig(Section):
    """What is counted and logged."""

    timelines: int = Field(
        default=0,
        ge=0,
        description="Of how many of the last requests the timeline is kept, for "
        "`/debug/requests/{id}`; 0: only of those that ask for it.",
    )
    plugin_times: bool = Field(
        default=False,
        description="Whether calls and seconds are counted by implementation (`plugin_times` among "
        "the engine's metrics, and in `bench throughput --json`); costs a microsecond a call.",
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
        default_factory=list, description="Logits processors beside the built-in ones, in order."
    )
    structured_outputs: StructuredOutputsConfig = Field(
        default_factory=StructuredOutputsConfig, description="Structured output."
    )
    observers: Once = Field(default_factory=list, description="Observers.")
    observability: ObservabilityConfig = Field(
        default_factory=ObservabilityConfig, description="Metrics and logging."
    )
    plugins: PluginsConfig = Field(default_factory=PluginsConfig, description="Plugins.")
