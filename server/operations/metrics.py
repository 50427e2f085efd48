"""What an API process counts, and `/metrics`.

All processes of a server write into one `Board`: the engine through its observer `prometheus`, each
API process into a section of its own. So any of them shows the whole, also while the engine is busy
or dead, and counters go on when an engine or an API process is started again.
"""

from __future__ import annotations

from time import perf_counter
from types import TracebackType
from typing import Self

from octavo.core.config.models import ImplementationConfig
from octavo.plugins.observers.prometheus.board import Board
from octavo.plugins.observers.prometheus.exposition import Exposition, report_info
from octavo.server.config import ServiceConfig
from octavo.server.http.errors import ApiError
from octavo.server.process.engine import Engine, Output

OBSERVER = "prometheus"


def with_board(config: ServiceConfig, board: Board) -> ServiceConfig:
    """The configuration whose observer `prometheus` counts on this board, added where it is not."""
    found = next(
        (one for one in config.observers if one.name == OBSERVER),
        ImplementationConfig(name=OBSERVER),
    )
    shared = {"memory": board.fd, "api_workers": board.num_api}
    ours = found.model_copy(update={"options": {**found.options, **shared}})
    others = [one for one in config.observers if one.name != OBSERVER]
    return config.model_copy(update={"observers": [*others, ours]})


def board_of(config: ServiceConfig) -> Board:
    """The board that `with_board` has named, else one of this process's own."""
    for choice in config.observers:
        if choice.name == OBSERVER and choice.options.get("memory") is not None:
            return Board(choice.options["memory"], choice.options["api_workers"])
    return Board(None, 1)


class Metrics:
    """The metrics of a server, seen from one API process. worker: which one it is."""

    def __init__(
        self, llm: Engine, config: ServiceConfig, model_name: str, worker: int = 0
    ) -> None:
        self.board = board_of(config)
        self._llm, self._config, self._model_name = llm, config, model_name
        section = self.board.api(worker)
        self._numbers, at = section.numbers, section.at
        self._load = at("server_load")
        self._prompt_tokens, self._cached = at("prompt_tokens"), at("prompt_tokens_cached")
        self._generated = at("generation_tokens")
        self._ends = {reason: at("request_success", reason) for reason in SEVERITY}
        self._rejections = {
            limit: at("admission_rejections", limit) for limit in ("requests", "tokens")
        }
        self._first_token = section.histogram("time_to_first_token_seconds")
        self._between = section.histogram("inter_token_latency_seconds")
        self._latency = section.histogram("e2e_request_latency_seconds")
        self._prompt_lengths = section.histogram("request_prompt_tokens")
        self._output_lengths = section.histogram("request_generation_tokens")
        self._longest = section.histogram("request_max_num_generation_tokens")
        self._limits = section.histogram("request_params_max_tokens")
        self._choices = section.histogram("request_params_n")

    @property
    def load(self) -> int:
        """Generations under way, in all API processes."""
        return int(self.board.totals()["server_load", ""][0])

    def entered(self, change: int) -> None:
        """So many generations more are under way here."""
        self._numbers[self._load] += change

    def rejected(self, limit: str) -> None:
        """A request was refused by this limit (`requests`, `tokens`)."""
        self._numbers[self._rejections[limit]] += 1

    def request(self, num_prompt: int, n: int, max_tokens: int, arrived: float) -> Tally:
        """Follow a request. arrived: when, by `time.perf_counter`."""
        return Tally(self, num_prompt, n, max_tokens, arrived)

    def render(self, accept: str) -> tuple[bytes, str]:
        """All metrics, and their content type."""
        report = getattr(self._llm, "report", None)
        kv = self._config.kv_cache
        info = {
            **report_info({} if report is None else report.as_dict()),
            "cache_dtype": str(kv.dtype),
            "enable_prefix_caching": str(kv.prefix_caching),
            "gpu_memory_utilization": str(kv.memory_utilization),
        }
        return Exposition(
            self.board,
            prefix=self._config.observability.metrics_prefix,
            model_name=self._model_name,
            max_model_len=None if report is None else report.max_model_len,
            info=None if report is None else info,
            up=self._llm.dead_reason is None,
        ).render(accept)

    # ---- what a tally has to say -----------------------------------------------------------------

    def first_token(self, seconds: float) -> None:
        """The first token of a request has come."""
        self._first_token.observe(seconds)

    def prompt(self, num_prompt: int, num_cached: int) -> None:
        """The prompt of a request is computed."""
        self._numbers[self._prompt_tokens] += num_prompt
        self._numbers[self._cached] += num_cached

    def tokens(self, count: int) -> None:
        """Tokens of a choice have come."""
        self._numbers[self._generated] += count

    def gap(self, seconds: float, times: int) -> None:
        """The time between two tokens of a choice, `times` times."""
        self._between.observe(seconds, times)

    def ended(self, reason: str, tally: Tally, seconds: float) -> None:
        """A request has ended; what it was like counts when it came to its own end."""
        self._numbers[self._ends[reason]] += 1
        if reason in ("stop", "length"):
            self._latency.observe(seconds)
            self._prompt_lengths.observe(tally.num_prompt)
            self._output_lengths.observe(sum(tally.generated.values()))
            self._longest.observe(max(tally.generated.values(), default=0))
            self._limits.observe(tally.max_tokens)
            self._choices.observe(tally.n)


SEVERITY = ("stop", "length", "abort", "error")
"""Ends of a choice; a request ends as the last of these that one of its choices has."""

_RANK = {reason: rank for rank, reason in enumerate(SEVERITY)}


class Tally:
    """Counts one prompt with its n choices as one request, also when it ends badly. A context
    manager around its outputs. begun: whether there was one. refused: the engine did not take it,
    for the client's fault; like what the server refuses itself, it is not counted at all."""

    __slots__ = ("_arrived", "_last", "_metrics", "_open", "_worst", "begun", "generated",
                 "max_tokens", "n", "num_prompt", "refused")  # fmt: skip

    def __init__(
        self, metrics: Metrics, num_prompt: int, n: int, max_tokens: int, arrived: float
    ) -> None:
        self._metrics, self._arrived = metrics, arrived
        self.num_prompt, self.n, self.max_tokens = num_prompt, n, max_tokens
        self.generated: dict[int, int] = {}  # tokens of each choice
        self._last: dict[int, float] = {}
        self._open, self._worst = n, 0
        self.begun = self.refused = False

    def add(self, output: Output) -> None:
        """An output with what is new, as the server got it."""
        now, metrics, last = perf_counter(), self._metrics, self._last
        if not self.begun:
            self.begun = True
            metrics.prompt(self.num_prompt, output.num_cached_tokens or 0)
        for choice in output.outputs:
            count = len(choice.token_ids)
            if count:
                before = last.get(choice.index)
                if before is not None:
                    metrics.gap((now - before) / count, count)
                elif not last:
                    metrics.first_token(now - self._arrived)
                last[choice.index] = now
                self.generated[choice.index] = self.generated.get(choice.index, 0) + count
                metrics.tokens(count)
            if choice.finish_reason is not None:
                self._open -= 1
                self._worst = max(self._worst, _RANK.get(choice.finish_reason, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.refused and not self.begun:
            return
        reason = SEVERITY[self._worst]
        if isinstance(error, Exception) and not isinstance(error, ApiError):
            reason = "error"
        elif self._open > 0:
            reason = "abort"  # the client has gone, or the server stops
        self._metrics.ended(reason, self, perf_counter() - self._arrived)
