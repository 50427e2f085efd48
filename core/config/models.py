"""The configuration's models. Every field has a description: docs and CLI help are derived from it.

A choice of a plugin is a name, or a mapping with `name` and that implementation's own options.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from octavo.core.config.origin import Origin
from octavo.core.plain_values import plain_value

Auto = Literal["auto"]
Tokens = Annotated[int, Field(gt=0, le=2**24)]
"""What a step may compute: more than any model's context, and less than what overflows."""
BlockSize = Annotated[int, Field(gt=0, le=2**16)]
Threads = Annotated[int, Field(gt=0, le=4096)]
MAX_BYTES = 2**50
MAX_BLOCKS = 2**26
"""What block ids (int32) and the bookkeeping of every block, some 30 bytes, have room for."""
DType = Literal["auto", "float32", "bfloat16", "float16"]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        return plain_value(value, cls.model_fields[str(info.field_name)].annotation)


class Choice(BaseModel):
    """A plugin's name and its options. Written as `name`, or as `{name: ..., option: ...}`."""

    model_config = ConfigDict(frozen=True)

    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, value: Any) -> Any:
        if isinstance(value, Choice):
            return value
        if isinstance(value, str):
            return {"name": value, "options": {}}
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            if set(value) == {"name", "options"} and isinstance(value["options"], dict):
                return value
            return {
                "name": value["name"],
                "options": {key: item for key, item in value.items() if key != "name"},
            }
        raise ValueError("expected a plugin's name, or a mapping with `name` and its options")


AUTO = Choice(name="auto")
COMPOSED = "composed"
"""The scheduler policy that a list of policies stands for."""


def _once(value: list[Choice]) -> list[Choice]:
    """No implementation twice with the same options."""
    for index, choice in enumerate(value):
        if choice in value[:index]:
            raise ValueError(
                f"expected each once, but '{choice.name}' is listed twice with the same options "
                f"(items {value.index(choice)} and {index})"
            )
    return value


Once = Annotated[list[Choice], AfterValidator(_once)]


def _composition(value: Any) -> Any:
    """A list of policies is the choice of their composition; of one, that policy."""
    if not isinstance(value, list):
        return value
    choices = [Choice.model_validate(item) for item in value]
    if not choices:
        raise ValueError("expected a policy, or a list of them, the outermost first")
    if len(choices) == 1:
        return choices[0]
    policies = [{"name": choice.name, **choice.options} for choice in choices]
    return Choice(name=COMPOSED, options={"policies": policies})


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
    quantization: Choice = Field(
        default=AUTO,
        description="How linear layers hold their weights. auto: the checkpoint's own method, "
        "else the best that rounds nothing.",
    )
    implementation: Choice = Field(
        default=AUTO, description="Model implementation. auto: by the checkpoint's architecture."
    )
    weight_source: Choice = Field(
        default=AUTO, description="Reader of the weights. auto: by the form of `source`."
    )
    tokenizer_backend: Choice = Field(
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

    policy: Annotated[Choice, BeforeValidator(_composition)] = Field(
        default=Choice(name="fcfs"),
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

    manager: Choice = Field(default=Choice(name="paged"), description="KV cache manager.")
    block_size: BlockSize | Auto = Field(
        default="auto", description="Tokens a block. auto: 16, or what the attention backend asks."
    )
    eviction: Choice = Field(
        default=Choice(name="lru"), description="Which cached block goes first (manager: paged)."
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

    policy: Choice = Field(
        default=Choice(name="recompute"),
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

    backend: Choice = Field(
        default=AUTO,
        description="Attention backend. auto: by device, compute capability, head sizes, dtype and "
        "KV dtype; the startup report says why.",
    )
    prefill: Choice | None = Field(
        default=None, description="Another backend for prompts (and chunks of them)."
    )
    decode: Choice | None = Field(
        default=None, description="Another backend for rows that compute one token each."
    )


class SamplerConfig(Section):
    """Sampling kernels."""

    backend: Choice = Field(default=AUTO, description="Sampler.")


class GraphConfig(Section):
    """How a forward pass is launched."""

    runner: Choice = Field(default=AUTO, description="Graph runner.")


class ExecutorConfig(Section):
    """Where the model runs."""

    kind: Choice = Field(default=Choice(name="local"), description="Executor.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Device.")
    num_threads: Threads | Auto = Field(
        default="auto",
        description="CPU threads of the engine. auto: the cores that affinity and cgroup allow.",
    )


class StructuredOutputsConfig(Section):
    """Output that keeps to a JSON schema, a regular expression, choices or a grammar."""

    engine: Choice = Field(
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


class ServerConfig(Section):
    """The HTTP server."""

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port; 0: a free one.")
    uds: str | None = Field(
        default=None, description="Path of a Unix socket to listen on, instead of host and port."
    )
    ssl_certfile: str | None = Field(
        default=None, description="Certificate chain (PEM); with ssl_keyfile: HTTPS."
    )
    ssl_keyfile: str | None = Field(default=None, description="The certificate's private key.")
    root_path: str = Field(
        default="", description="Prefix that a proxy in front of the server takes off the path."
    )
    allowed_origins: list[str] = Field(
        default_factory=list,
        description="Origins whose web pages may call the server (CORS); `*` for all.",
    )
    api_keys: dict[str, SecretStr] = Field(
        default_factory=dict,
        description="Client name to key. When there is any, every route but /health, /ping and "
        "the page /dashboard wants one as a bearer token. Keys also come from `api_keys_file` and "
        "OCTAVO_API_KEYS.",
    )
    api_keys_file: str | None = Field(
        default=None, description="File with further keys, one `name: key` a line."
    )
    served_model_name: str | list[str] | None = Field(
        default=None, description="Name (or names) clients use. Default: model.source."
    )
    max_n: int = Field(default=128, gt=0, description="Largest n of a request.")
    max_logprobs: int = Field(default=20, ge=0, description="Most alternatives for logprobs.")
    stream_interval: int = Field(
        default=1,
        gt=0,
        description="Tokens of a choice that share one event of a stream; the first and the last "
        "token do not wait.",
    )
    max_body_bytes: int = Field(
        default=32 * 2**20, gt=0, description="Largest request body; a larger one is a 413."
    )
    unknown_parameters: Literal["ignore", "refuse"] = Field(
        default="ignore",
        description="Request parameters that nobody knows: ignored, and named in a log line and in "
        "the header x-octavo-ignored-parameters, or refused with 400.",
    )
    shutdown_timeout_s: float = Field(
        default=30.0,
        ge=0,
        description="Seconds that running requests get to finish when the server is told to stop.",
    )
    api_workers: int = Field(
        default=1, gt=0, le=64, description="API processes that share the port and the engine."
    )
    engine_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds without an answer of the engine, between two steps, after which it is "
        "taken to hang and is killed. Longer than the longest step.",
    )
    restart_engine: bool = Field(
        default=False,
        description="Whether an engine that has stopped by itself is started again, after 1, 2, 4 "
        "... seconds.",
    )
    max_engine_restarts: int = Field(
        default=5,
        gt=0,
        description="How often in a row; an engine that ran for ten minutes counts as a new one.",
    )
    max_queued_requests: int | None = Field(
        default=None,
        gt=0,
        description="Requests that may wait for the engine; one that comes when so many wait is "
        "refused with 503 and Retry-After. Default: no limit.",
    )
    max_queued_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Prompt tokens that may wait for the engine, likewise.",
    )
    tool_parser: Choice | None = Field(
        default=None,
        description="Finds tool calls in what the model writes. Without one, tools are shown to "
        "the model and its answer is text, unless a call is required.",
    )
    trust_request_chat_template: bool = Field(
        default=False, description="Whether a request may bring its own chat template."
    )
    chat_template_timeout_s: float = Field(
        default=5.0, gt=0, description="Seconds that rendering a chat may take."
    )
    chat_template_memory_bytes: int = Field(
        default=2**30, gt=0, description="Memory that rendering a chat may take."
    )
    reasoning_parser: Choice | None = Field(
        default=None,
        description="Tells the model's reasoning from its answer. Without one both are content.",
    )

    @field_validator("served_model_name")
    @classmethod
    def _names(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value is not None and not (value and all(value)):
            raise ValueError("expected a name or a list of names, none of them empty")
        return value


class ObservabilityConfig(Section):
    """What is counted and logged."""

    metrics_prefix: str = Field(
        default="octavo",
        pattern="^[a-zA-Z_][a-zA-Z0-9_]*$",
        description="What the names of all metrics begin with, before a colon; `vllm`: dashboards "
        "made for vLLM work.",
    )
    log_stats: bool = Field(
        default=True,
        description="Whether the server logs a line of statistics every 10 seconds in which "
        "something happened.",
    )
    log_requests: bool = Field(
        default=False,
        description="Whether each request is logged when it comes: id, tokens, limits, sampling.",
    )
    log_prompts: bool = Field(
        default=False, description="Whether these lines have the prompt too; nothing else does."
    )
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


class PluginsConfig(Section):
    """Which plugins are known."""

    load: list[str] = Field(
        default_factory=list,
        description="Modules (`my_package.my_plugin`) or files (`./my.py`, `./my.py:Policy`) to "
        "register beside the entry points.",
    )
    disable: list[str] = Field(
        default_factory=list, description="Distributions or entry points that are not loaded."
    )
    only: list[str] | None = Field(
        default=None,
        description="When given, only these third-party distributions or entry points are loaded.",
    )


class EngineConfig(Section):
    """The whole configuration. `origin` says which file and line a value came from."""

    _origin: Origin = PrivateAttr(default_factory=Origin)

    @property
    def origin(self) -> Origin:
        return self._origin

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
    extensions: Once = Field(
        default_factory=list, description="Engine extensions beside the built-in ones, in order."
    )
    routes: Once = Field(default_factory=list, description="Further routes of the HTTP server.")
    server: ServerConfig = Field(default_factory=ServerConfig, description="The HTTP server.")
    observability: ObservabilityConfig = Field(
        default_factory=ObservabilityConfig, description="Metrics and logging."
    )
    plugins: PluginsConfig = Field(default_factory=PluginsConfig, description="Plugins.")
