"""Types of command line arguments that several benchmarks take."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from octavo.bench.slo import Slo


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {value}")
    return value


def natural(text: str) -> int:
    """A whole number of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {value}")
    return value


def positive_float(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return value


def rate(text: str) -> float:
    """Requests a second; `inf`: all at once."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a positive number or inf, got {text}")
    return value


def fraction(text: str) -> float:
    """A number from 0 up to, and without, 1."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of [0, 1), got {text}")
    return value


def writable(text: str) -> Path:
    """A file that can be written: known before the benchmark, not after it."""
    path = Path(text)
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as exc:
        raise argparse.ArgumentTypeError(f"cannot write {text}: {exc.strerror}") from None
    if not existed:
        path.unlink()
    return path


def slo(text: str) -> Slo:
    """`ttft=2,itl=50ms`."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name, value = name.strip(), value.strip().lower()
        scale = 1e-3 if value.endswith("ms") else 1.0
        try:
            seconds = float(value.removesuffix("ms").removesuffix("s")) * scale
        except ValueError:
            seconds = -1.0
        if name not in ("ttft", "itl", "e2e") or not seconds > 0 or name in found:
            raise argparse.ArgumentTypeError(
                f"expected ttft=SECONDS,itl=SECONDS,e2e=SECONDS or some of them, got {text!r}"
            )
        found[name] = seconds
    return Slo(**found)
