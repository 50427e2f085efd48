"""Line charts as SVG text: no script, no outside resource. Colours are CSS classes of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 40


@dataclass(frozen=True)
class Line:
    """name: as in the legend. color: index of the palette. x, y: its points."""

    name: str
    color: int
    x: Sequence[float]
    y: Sequence[float]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two, about `count` of them: steps of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 between them where there are few."""
    begin, end = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1,) if end - begin > 4 else (1, 2, 5)
    values = [f * 10.0**p for p in range(begin, end + 1) for f in factors]
    return [v for v in values if low * 0.999 <= v <= high * 1.001]


def number(value: float) -> str:
    """For an axis."""
    if value == 0:
        return "0"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{value / scale:g}{unit}"
    return f"{value:.4g}"


@dataclass(frozen=True)
class _Scale:
    """From values to pixels. x runs from `low` to `high`, y from 0 to `top`."""

    low: float
    high: float
    top: float
    log: bool

    def x(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            share = math.log(value / low) / math.log(high / low)
        else:
            share = (value - low) / (high - low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return TOP + (1 - min(value, self.top) / self.top) * (HEIGHT - TOP - BOTTOM)


def chart(
    lines: Sequence[Line], *, x: str, y: str, percent: bool = False, log: bool = False
) -> str:
    """One chart. x, y: titles of the axes. percent: y is a fraction, the axis ends at 100%.
    log: x is logarithmic (values of 0 are left out)."""
    lines = [_positive(line) if log else line for line in lines]
    xs = [value for line in lines for value in line.x]
    ys = [value for line in lines for value in line.y]
    if not xs:
        return '<p class="empty">nothing to plot</p>'
    low, high = (min(xs), max(xs)) if log else (0.0, max(xs))
    if high <= low:
        high = low * 10 if log else low + 1
    scale = _Scale(low, high, 1.0 if percent else max(ys) * 1.05 or 1.0, log)
    return "".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y)}">',
            *_axes(scale, x, percent),
            *[_polyline(line, scale) for line in lines],
            "</svg>",
        ]
    )


def _axes(scale: _Scale, title: str, percent: bool) -> list[str]:
    base, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in ticks(0, scale.top):
        at = scale.y(tick)
        parts.append(_rule(LEFT, right, at, at))
        label = f"{tick:.0%}" if percent else number(tick)
        parts.append(_text("tick", LEFT - 6, at + 4, "end", label))
    steps = log_ticks if scale.log else ticks
    for tick in steps(scale.low, scale.high):
        at = scale.x(tick)
        parts.append(_rule(at, at, base, base + 4))
        parts.append(_text("tick", at, base + 17, "middle", number(tick)))
    parts.append(_text("axis", (LEFT + right) / 2, HEIGHT - 5, "middle", title))
    return parts


def _rule(x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _text(kind: str, x: float, y: float, anchor: str, text: str) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {where}>{escape(text)}</text>'


def _polyline(line: Line, scale: _Scale) -> str:
    pairs = zip(line.x, line.y, strict=True)
    points = " ".join(f"{scale.x(a):.1f},{scale.y(b):.1f}" for a, b in pairs)
    title = f"<title>{escape(line.name)}</title>"
    return f'<polyline class="c{line.color % 8}" points="{points}">{title}</polyline>'


def _positive(line: Line) -> Line:
    pairs = [(a, b) for a, b in zip(line.x, line.y, strict=True) if a > 0]
    return Line(line.name, line.color, [a for a, _ in pairs], [b for _, b in pairs])
