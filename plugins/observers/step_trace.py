"""Observer `step_trace`: a timeline of the engine's steps as a file that Perfetto opens.

The file is JSON in the Trace Event Format (an array of events; times in microseconds from the first
step). One track for steps as a whole, one for each phase; counters for running and waiting
sequences and for free KV blocks. Every event is written at once, and a trace whose end is missing,
because the process was killed, still opens: the format allows the closing bracket to be absent.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import Field

from octavo.core.contracts.observer import Observer, ObserverContext, StepRecord
from octavo.core.contracts.provider import Options
from octavo.core.errors import ConfigError

_STEPS, _SCHEDULE, _PREPARE, _FORWARD, _SAMPLE, _COMMIT = range(1, 7)
_TRACKS = {
    _STEPS: "steps",
    _SCHEDULE: "schedule",
    _PREPARE: "prepare",
    _FORWARD: "forward",
    _SAMPLE: "sample",
    _COMMIT: "commit",
}


class StepTraceOptions(Options):
    """Where the trace goes."""

    path: str = Field(description="Output file (overwritten).")


class StepTrace(Observer):
    """See the module."""

    def __init__(self, options: StepTraceOptions, context: ObserverContext) -> None:
        path = Path(options.path).expanduser()
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write '{options.path}': {error.strerror}", path="observers.step_trace.path"
            ) from None
        self._pid = os.getpid()
        self._origin: float | None = None
        self._file.write("[\n")
        self._first = True
        self._meta("process_name", 0, f"octavo {context.report.get('source', '')}".strip())
        for track, name in _TRACKS.items():
            self._meta("thread_name", track, name)

    def on_step(self, record: StepRecord) -> None:
        if self._origin is None:
            self._origin = record.started
        begin = (record.started - self._origin) * 1e6
        phases = (
            (_SCHEDULE, record.schedule_s),
            (_PREPARE, record.prepare_s),
            (_FORWARD, record.forward_s),
            (_SAMPLE, record.sample_s),
            (_COMMIT, record.commit_s),
        )
        facts = {
            "step": record.step,
            "tokens": record.num_tokens,
            "prefill_tokens": record.num_prefill,
            "sampled": record.num_sampled,
            "preemptions": record.num_preempted,
        }
        total = sum(seconds for _, seconds in phases) * 1e6
        name = f"step {record.step}"
        self._event(name=name, ph="X", tid=_STEPS, ts=begin, dur=total, args=facts)
        at = begin
        for track, seconds in phases:
            self._event(name=_TRACKS[track], ph="X", tid=track, ts=at, dur=seconds * 1e6, args={})
            at += seconds * 1e6
        sequences = {"running": record.num_running, "waiting": record.num_waiting}
        blocks = {"free": record.kv.num_free, "evictable": record.kv.num_evictable}
        self._event(name="sequences", ph="C", tid=_STEPS, ts=begin, args=sequences)
        self._event(name="KV blocks", ph="C", tid=_STEPS, ts=begin, args=blocks)

    def _meta(self, name: str, track: int, value: str) -> None:
        self._event(name=name, ph="M", tid=track, ts=0.0, args={"name": value})

    def _event(self, **event: Any) -> None:
        text = json.dumps({"pid": self._pid, "cat": "octavo", **event})
        self._file.write(text if self._first else ",\n" + text)
        self._first = False

    def close(self) -> None:
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()
