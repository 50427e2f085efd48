"""Observer `prometheus`: counts what happens in the engine. A step costs some microseconds,
however many sequences it has."""

from __future__ import annotations

from pydantic import Field

from octavo.core.contracts.observer import (
    Observer,
    ObserverContext,
    RequestRecord,
    StateRecord,
    StepRecord,
)
from octavo.core.contracts.provider import Options
from octavo.plugins.observers.prometheus.board import Board
from octavo.plugins.observers.prometheus.families import PHASES

_SINCE_START = (
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
)


class PrometheusOptions(Options):
    """The server fills in `memory` and `api_workers`."""

    port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="Port on which the engine itself serves its metrics, where there is no server "
        "(`LLM`, benchmarks). `octavo serve` has them under /metrics.",
    )
    host: str = Field(default="127.0.0.1", description="Address for `port`.")
    prefix: str = Field(default="octavo", description="Of the names, for `port`.")
    memory: int | None = Field(
        default=None, ge=0, description="File descriptor of shared memory; the server sets it."
    )
    api_workers: int = Field(default=1, gt=0, description="API processes; the server sets it.")


class PrometheusObserver(Observer):
    """See the module."""

    def __init__(self, options: PrometheusOptions, context: ObserverContext) -> None:
        self._board = Board(options.memory, options.api_workers)
        section = self._board.engine()
        self._numbers, at = section.numbers, section.at
        self._running = at("num_requests_running")
        self._waiting = at("num_requests_waiting")
        self._swapped = at("num_requests_swapped")
        self._usage = at("kv_cache_usage_perc")
        self._swap_usage = at("kv_cache_swap_usage_perc")
        self._swap_outs, self._swap_ins = at("num_swap_outs"), at("num_swap_ins")
        self._phases = [at("step_phase_seconds", phase) for phase in PHASES]
        # The engine's own counts start at 0; those here may go on from an earlier engine.
        self._since_start = [(at(name), self._numbers[at(name)]) for name in _SINCE_START]
        self._tokens = section.histogram("iteration_tokens_total")
        self._queue = section.histogram("request_queue_time_seconds")
        self._prefill = section.histogram("request_prefill_time_seconds")
        self._decode = section.histogram("request_decode_time_seconds")
        self._inference = section.histogram("request_inference_time_seconds")
        self._stop_serving = _nothing
        if options.port is not None:
            self._serve(options, context, options.port)

    def _serve(self, options: PrometheusOptions, context: ObserverContext, port: int) -> None:
        from octavo.core.errors import ConfigError
        from octavo.plugins.observers.prometheus.exposition import Exposition, report_info
        from octavo.plugins.observers.prometheus.own_port import serve

        report = context.report
        shown = Exposition(
            self._board,
            prefix=options.prefix,
            model_name=str(report.get("source", "")),
            max_model_len=report.get("max_model_len"),
            info=report_info(report),
            engine_only=True,
        )
        try:
            self._stop_serving = serve(shown, options.host, port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {options.host}:{port}: {error.strerror}",
                path="observers.prometheus.port",
            ) from None

    def on_step(self, record: StepRecord) -> None:
        numbers, kv = self._numbers, record.kv
        self._show(record)
        schedule, prepare, forward, sample, commit = self._phases
        numbers[schedule] += record.schedule_s
        numbers[prepare] += record.prepare_s
        numbers[forward] += record.forward_s
        numbers[sample] += record.sample_s
        numbers[commit] += record.commit_s
        self._tokens.observe(record.num_tokens)
        counts = (
            record.num_preempted,
            kv.prefix_queries,
            kv.prefix_hits,
            kv.host_cache_queries,
            kv.host_cache_hits,
        )
        for (at, before), count in zip(self._since_start, counts, strict=True):
            numbers[at] = before + count
        if record.preemptions:
            numbers[self._swap_outs] += sum(each.action == "swap" for each in record.preemptions)
        if record.swapped_in:
            numbers[self._swap_ins] += len(record.swapped_in)

    def on_state(self, record: StateRecord) -> None:
        self._show(record)

    def _show(self, record: StepRecord | StateRecord) -> None:
        numbers, kv = self._numbers, record.kv
        numbers[self._running] = record.num_running
        numbers[self._waiting] = record.num_waiting
        numbers[self._swapped] = record.num_swapped
        numbers[self._usage] = kv.usage
        if kv.num_swap_blocks:
            numbers[self._swap_usage] = 1 - kv.num_free_swap_blocks / kv.num_swap_blocks

    def on_request(self, record: RequestRecord) -> None:
        """The phases of a request with several choices are those of its first."""
        if record.index or record.admitted is None:
            return
        self._queue.observe(record.admitted - record.arrival)
        if record.first_token is None:
            return
        self._prefill.observe(record.first_token - record.admitted)
        if record.finish_reason in ("stop", "length"):
            self._decode.observe(record.finished - record.first_token)
            self._inference.observe(record.finished - record.admitted)

    def close(self) -> None:
        self._stop_serving()


def _nothing() -> None:
    """No port is served."""
