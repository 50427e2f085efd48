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
    port: int = Field(default=8000, ge=0, le=65535, description="Port; 0: any free port.")
    uds: str | None = Field(
        default=None, description="Path of a Unix socket to listen on instead of host and port."
    )
    ssl_certfile: str | None = Field(
        default=None,
        description="Certificate chain (PEM); enables HTTPS together with ssl_keyfile.",
    )
    ssl_keyfile: str | None = Field(default=None, description="Private key of the certificate.")
    root_path: str = Field(default="", description="Path prefix that a reverse proxy strips.")
    allowed_origins: list[str] = Field(
        default_factory=list,
        description="Origins whose web pages may call the server (CORS); `*`: all.",
    )
    api_keys: dict[str, SecretStr] = Field(
        default_factory=dict,
        description="Client name to API key. If any key is set, every route but /health, /ping and "
        "the page /dashboard requires one as a bearer token. Keys also come from "
        "`api_keys_file` and OCTAVO_API_KEYS.",
    )
    api_keys_file: str | None = Field(
        default=None, description="File with more keys, one `name: key` per line."
    )
    served_model_name: str | list[str] | None = Field(
        default=None, description="Model name (or names) that clients use. Default: model.source."
    )
    max_n: int = Field(default=128, gt=0, description="Maximum n of a request.")
    max_logprobs: int = Field(
        default=20, ge=0, description="Maximum number of alternatives for logprobs."
    )
    stream_interval: int = Field(
        default=1,
        gt=0,
        description="Tokens of a choice per stream event; the first and the last token are sent at "
        "once.",
    )
    max_body_bytes: int = Field(
        default=32 * 2**20,
        gt=0,
        description="Maximum size of a request body; larger ones are rejected with 413.",
    )
    unknown_parameters: Literal["ignore", "refuse"] = Field(
        default="ignore",
        description="Unknown request parameters: ignore (and name them in the log and in the "
        "header x-octavo-ignored-parameters), or refuse with 400.",
    )
    shutdown_timeout_s: float = Field(
        default=30.0,
        ge=0,
        description="Seconds that running requests get to finish on shutdown.",
    )
    api_workers: int = Field(
        default=1, gt=0, le=64, description="API processes that share the port and the engine."
    )
    engine_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds without a response from the engine between two steps after which it "
        "is considered hung and is killed. Must exceed the longest step.",
    )
    restart_engine: bool = Field(
        default=False,
        description="Restart an engine that has stopped unexpectedly, after 1, 2, 4 ... seconds.",
    )
    max_engine_restarts: int = Field(
        default=5,
        gt=0,
        description="Maximum number of restarts in a row; ten minutes of uptime reset the count.",
    )
    max_queued_requests: int | None = Field(
        default=None,
        gt=0,
        description="Maximum number of requests waiting for the engine; more are rejected with 503 "
        "and Retry-After. Default: no limit.",
    )
    max_queued_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Maximum number of prompt tokens waiting for the engine, likewise.",
    )
    tool_parser: ImplementationConfig | None = Field(
        default=None,
        description="Parser of tool calls in the model's output. Without one, tools are shown to "
        "the model and its answer is plain text, unless a call is required.",
    )
    trust_request_chat_template: bool = Field(
        default=False, description="Allow requests to bring their own chat template."
    )
    chat_template_timeout_s: float = Field(
        default=5.0, gt=0, description="Time limit for rendering a chat, in seconds."
    )
    chat_template_memory_bytes: int = Field(
        default=2**30, gt=0, description="Memory limit for rendering a chat, in bytes."
    )
    reasoning_parser: ImplementationConfig | None = Field(
        default=None,
        description="Parser that separates the model's reasoning from its answer. Without one both "
        "are content.",
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
        description="Prefix of all metric names, before a colon; `vllm` makes dashboards for vLLM "
        "work.",
    )
    log_stats: bool = Field(
        default=True,
        description="Log a line of statistics every 10 seconds, unless idle.",
    )
    log_requests: bool = Field(
        default=False,
        description="Log each request on arrival: id, tokens, limits, sampling.",
    )
    log_prompts: bool = Field(
        default=False,
        description="Include the prompt in these lines; prompts are logged nowhere else.",
    )


class ServiceConfig(EngineConfig):
    """The configuration of an engine behind an HTTP server."""

    routes: Once = Field(default_factory=list, description="Additional routes of the HTTP server.")
    server: ServerConfig = Field(default_factory=ServerConfig, description="The HTTP server.")
    observability: ServerObservabilityConfig = Field(
        default_factory=ServerObservabilityConfig, description="Metrics and logging."
    )


def service_config(config: EngineConfig) -> ServiceConfig:
    """What `load_config` returned, with its type."""
    assert isinstance(config, ServiceConfig), "entry point 'octavo-server' is not installed"
    return config
