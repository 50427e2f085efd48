"""The server's own sections of the configuration: `server`, `routes`, and logging of requests."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr, field_validator

from octavo.core.config.models import ImplementationConfig, Once, Section
from octavo.core.envvars import EnvVar, name_list
from octavo.engine.config import EngineConfig, ObservabilityConfig

API_KEYS = EnvVar(
    "OCTAVO_API_KEYS",
    "keys, comma-separated",
    "not set",
    "API keys of the server in addition to those of the configuration, each a key or `name:key`.",
    name_list,
    secret=True,
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
    tool_parser: ImplementationConfig | None = Field(
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
    reasoning_parser: ImplementationConfig | None = Field(
        default=None,
        description="Tells the model's reasoning from its answer. Without one both are content.",
    )

    @field_validator("served_model_name")
    @classmethod
    def _names(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value is not None and not (value and all(value)):
            raise ValueError("expected a non-empty name, or a list of them")
        return value


class ServerObservabilityConfig(ObservabilityConfig):
    """What is counted and logged, by the engine and by the server."""

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


class ServiceConfig(EngineConfig):
    """The configuration of an engine behind an HTTP server."""

    routes: Once = Field(default_factory=list, description="Further routes of the HTTP server.")
    server: ServerConfig = Field(default_factory=ServerConfig, description="The HTTP server.")
    observability: ServerObservabilityConfig = Field(
        default_factory=ServerObservabilityConfig, description="Metrics and logging."
    )


def service_config(config: EngineConfig) -> ServiceConfig:
    """What `load_config` returned, with its type."""
    assert isinstance(config, ServiceConfig), "entry point 'octavo-server' is not installed"
    return config
