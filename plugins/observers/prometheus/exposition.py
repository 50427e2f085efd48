"""From the numbers on a `Board` to Prometheus's text format, by prometheus-client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as open_text
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from octavo.plugins.observers.prometheus.board import Board
from octavo.plugins.observers.prometheus.families import API, ENGINE, Family

OPEN = "application/openmetrics-text"
_BASE = ("model_name", "engine")


class Exposition(Collector):
    """A collector of prometheus-client over a board.

    prefix: of all names, before a colon. info: labels of `cache_config_info`, none: not shown.
    engine_only: whether what API processes count is left out. up: whether the engine runs; without
    one nothing runs or waits.
    """

    def __init__(
        self,
        board: Board,
        *,
        prefix: str,
        model_name: str,
        max_model_len: int | None = None,
        info: Mapping[str, str] | None = None,
        engine_only: bool = False,
        up: bool = True,
    ) -> None:
        self._board, self._prefix, self._model_name = board, prefix, model_name
        self._limit, self._info = max_model_len, info
        self._families = ENGINE if engine_only else ENGINE + API
        self._up = up

    def render(self, accept: str) -> tuple[bytes, str]:
        """All metrics, and their content type: OpenMetrics where an Accept header names it, else
        text. prometheus-client would choose too, but it fails for `version=abc`, and writes
        underscores for colons where Prometheus before version 3 asks for OpenMetrics."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        if any(OPEN in item and "version=0." not in item for item in accept.split(",")):
            body: bytes = open_text(registry, escaping=ALLOWUTF8)  # type: ignore[no-untyped-call]
            return body, f"{OPEN}; version=1.0.0; charset=utf-8"
        return generate_latest(registry), "text/plain; version=0.0.4; charset=utf-8"

    def collect(self) -> Iterator[Metric]:
        totals = self._board.totals()
        for family in self._families:
            rows = ((value, totals[family.name, value]) for value in family.values)
            yield self._metric(family, rows)
        if self._info:
            info = GaugeMetricFamily(
                f"{self._prefix}:cache_config_info",
                "Configuration of the KV cache, as labels.",
                labels=[*self._info, "engine"],
            )
            info.add_metric([*self._info.values(), "0"], 1)
            yield info

    def _metric(self, family: Family, rows: Iterable[tuple[str, list[float]]]) -> Metric:
        name = f"{self._prefix}:{family.name}"
        labels = [*_BASE, family.label] if family.label else list(_BASE)
        made: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
        if family.kind == "histogram":
            made = HistogramMetricFamily(name, family.doc, labels=labels)
            for _, numbers in rows:
                made.add_metric(
                    [self._model_name, "0"], list(self._buckets(family, numbers)), numbers[-1]
                )
            return made
        kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        made = kind(name, family.doc, labels=labels)
        for value, (number,) in rows:
            shown = 0.0 if family.kind == "gauge" and family in ENGINE and not self._up else number
            made.add_metric([self._model_name, "0", value][: len(labels)], shown)
        return made

    def _buckets(self, family: Family, numbers: list[float]) -> Iterator[tuple[str, float]]:
        """Upper bound and cumulative count of each bucket."""
        cumulative = list(accumulate(numbers[:-1]))
        for bound, count in zip(family.buckets, cumulative, strict=False):
            if family.by_context and self._limit is not None and bound > self._limit:
                break
            yield floatToGoString(bound), count  # type: ignore[no-untyped-call]
        yield "+Inf", cumulative[-1]


def report_info(report: Mapping[str, Any]) -> dict[str, str]:
    """Labels of `cache_config_info` that a startup report knows."""
    return {
        "block_size": str(report.get("block_size", "")),
        "num_gpu_blocks": str(report.get("num_blocks", "")),
        "num_cpu_blocks": str(
            report.get("num_swap_blocks", 0) + report.get("num_host_cache_blocks", 0)
        ),
        "kv_bytes": str(report.get("kv_bytes", "")),
        "max_model_len": str(report.get("max_model_len", "")),
    }
