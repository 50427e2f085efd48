"""`octavo bench gpu`: decode steps against the memory floor, prompts, overlap, starts, comparisons.

All on one device, within a time limit; what there is no time for is named. Progress comes line by
line as it is known, so that a run that is cut off has said what it found; a table comes last, also
after Ctrl-C.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.bench.arguments import positive_float, writable
from octavo.bench.environment import machine, versions
from octavo.bench.gpu import table
from octavo.bench.gpu.budget import Outcome, Schedule
from octavo.bench.gpu.child import DeviceChild
from octavo.bench.gpu.figures import derive, told
from octavo.bench.gpu.parts import Part, full_parts, quick_parts
from octavo.bench.result_file import write_json
from octavo.core.errors import ConfigError

_HAS_CUDA = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
NO_DEVICE = 2
"""Exit status without a CUDA device."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add = parser.add_argument
    add("--seconds", type=positive_float, default=420.0, help="overall time limit in seconds (420)")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu requires --quick")
    add("--quick", action="store_true", help="tiny model and few steps, to try the command")
    add("--only", metavar="TEXT", help="run only the measurements whose name contains TEXT")
    add("--list", action="store_true", help="list the measurements in order and exit")
    add("--json", metavar="FILE", type=writable, help="write all results as JSON")


def main(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 1 when nothing was measured, 2 without a device,
    130 after Ctrl-C."""
    if args.device == "cpu" and not args.quick:
        raise ConfigError("--device cpu requires --quick")
    parts = chosen_parts(args)
    if args.list:
        for part in parts:
            print(f"{part.name:<28} {part.kind:<8} {part.estimate:4.0f} s expected")
        return 0
    run = Run(parts, args.device, args.seconds)
    if args.device == "cuda" and not _has_cuda():
        print(
            "octavo: no CUDA device is here (torch.cuda.is_available() is False); "
            "try --device cpu --quick",
            file=sys.stderr,
        )
        return NO_DEVICE
    return run.go(args.json)


def _has_cuda() -> bool:
    """Asked in a process of its own, so that this one holds nothing on the device."""
    return subprocess.run([sys.executable, "-c", _HAS_CUDA], check=False).returncode == 0


def chosen_parts(args: argparse.Namespace) -> list[Part]:
    """The parts that the command line asks for."""
    parts = quick_parts(args.device) if args.quick else full_parts()
    if args.only is None:
        return parts
    kept = [part for part in parts if args.only in part.name]
    if not kept:
        names = ", ".join(part.name for part in parts)
        raise ConfigError(f"--only {args.only}: no measurement matches; available: {names}")
    return [part for part in parts if part.kind == "facts" or part in kept]


class Run:
    """One run of the parts, told on standard output. Its time runs from when it is made."""

    def __init__(self, parts: Sequence[Part], device: str, seconds: float) -> None:
        self._parts, self._device, self._seconds = parts, device, seconds
        self._started = time.monotonic()
        self._schedule = Schedule(seconds, time.monotonic)
        self._machine: dict[str, Any] = {}

    def go(self, file: Path | None) -> int:
        """Measure, print the table, write the file. Returns the exit status."""
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` sends it
        child = DeviceChild(self._device, self._figure)
        try:
            outcomes = self._schedule.run(self._parts, child.perform, self._ended)
        finally:
            child.close()
            signal.signal(signal.SIGTERM, before)
        found = versions()
        if file is not None:
            result = {
                "benchmark": "gpu",
                "device": self._device,
                "seconds": time.monotonic() - self._started,
                "limit_s": self._seconds,
                "parts": [outcome.as_dict() for outcome in outcomes],
                "versions": found,
                "machine": machine(),
            }
            write_json(file, result)
        print("\n".join(table.lines(outcomes, found)), flush=True)
        if any(outcome.status == "interrupted" for outcome in outcomes):
            return 130
        return 0 if any(outcome.status == "done" for outcome in outcomes) else 1

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:6.1f} s] {text}", flush=True)

    def _figure(self, outcome: Outcome, path: Sequence[str]) -> None:
        if outcome.part.kind == "facts":
            self._machine = outcome.result
        derive(outcome, path, self._machine)
        for line in told(outcome, path):
            self._say(line)

    def _ended(self, outcome: Outcome) -> None:
        name = outcome.part.name
        if outcome.status == "done":
            self._say(f"{name}: done in {outcome.seconds:.1f} s")
        else:
            self._say(f"{name}: {outcome.status}: {' '.join(outcome.error.split())}")
