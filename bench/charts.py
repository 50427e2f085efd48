"""Charts as SVG text: no script, no outside resource. Colours are CSS classes of the page."""

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


def _rule(x1: float, x2: float, y1: float, y2: float, kind: str = "grid") -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


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


@dataclass(frozen=True)
class Estimate:
    """A value with its interval, None: unbounded on that side. kind: `better`, `worse` or other."""

    name: str
    value: float
    low: float | None
    high: float | None
    kind: str = ""


_COLORS = {"better": 2, "worse": 5}
_ROW, _LABEL = 22, 200


def intervals(estimates: Sequence[Estimate], zone: float = 0.0) -> str:
    """Ratios with their intervals, one a row, on a logarithmic axis around 1. zone: half width of
    the band within which a difference does not matter."""
    if not estimates:
        return '<p class="empty">nothing to plot</p>'
    bounds = [b for e in estimates for b in (e.value, e.low or e.value, e.high or e.value)]
    reach = max(math.log(1.05), *(abs(math.log(b)) for b in bounds if b > 0))
    reach = min(reach, math.log(20))
    reach *= 1.08
    height = TOP + _ROW * len(estimates) + BOTTOM

    def x(value: float) -> float:
        share = max(-1.0, min(1.0, math.log(max(value, 1e-9)) / reach))
        return _LABEL + (1 + share) / 2 * (WIDTH - _LABEL - RIGHT)

    base = height - BOTTOM
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="ratios">']
    if zone:
        left, right = x(1 - zone), x(1 + zone)
        parts.append(
            f'<rect class="zone" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" '
            f'height="{base - TOP}"/>'
        )
    for tick in _ratio_ticks(reach):
        kind = "one" if tick == 1 else "grid"
        parts.append(_rule(x(tick), x(tick), TOP, base, kind))
        parts.append(_text("tick", x(tick), base + 17, "middle", f"{tick:g}"))
    for place, estimate in enumerate(estimates):
        y = TOP + _ROW * (place + 0.5)
        color = _COLORS.get(estimate.kind, 7)
        low = _LABEL if estimate.low is None else x(estimate.low)
        high = WIDTH - RIGHT if estimate.high is None else x(estimate.high)
        parts.append(_text("tick", _LABEL - 10, y + 4, "end", estimate.name))
        parts.append(_rule(low, high, y, y, f"c{color}"))
        at = x(estimate.value)
        parts.append(f'<circle class="f{color}" cx="{at:.1f}" cy="{y:.1f}" r="4"/>')
    title = "ratio to the first side"
    parts.append(_text("axis", (_LABEL + WIDTH - RIGHT) / 2, height - 5, "middle", title))
    return "".join([*parts, "</svg>"])


def _ratio_ticks(reach: float) -> list[float]:
    """Round ratios on both sides of 1."""
    if reach > math.log(2):
        far = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
        return [tick for tick in far if abs(math.log(tick)) <= reach]
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if math.log1p(s) * 3.2 >= reach)
    near = [round(1 + k * step, 4) for k in range(-3, 4)]
    return [tick for tick in near if tick > 0 and abs(math.log(tick)) <= reach]


def _short(name: str, most: int = 28) -> str:
    """As much of a name as fits beside a bar; ends tell configurations apart."""
    return name if len(name) <= most else "…" + name[1 - most :]


def stacks(
    names: Sequence[str], parts: Sequence[str], values: Sequence[Sequence[float]], unit: str
) -> str:
    """One horizontal bar a name, made of `parts` in the palette's order. values: [name][part]."""
    most = max((sum(row) for row in values), default=0.0) or 1.0
    height = TOP + 30 * len(names) + BOTTOM
    out = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(unit)}">']
    scale = (WIDTH - _LABEL - RIGHT) / most
    base = height - BOTTOM
    for tick in ticks(0, most):
        at = _LABEL + tick * scale
        out.append(_rule(at, at, TOP, base))
        out.append(_text("tick", at, base + 17, "middle", number(tick)))
    for place, (name, row) in enumerate(zip(names, values, strict=True)):
        y, at = TOP + 30 * place + 5, float(_LABEL)
        out.append(_text("tick", _LABEL - 10, y + 14, "end", _short(name)))
        for color, (part, value) in enumerate(zip(parts, row, strict=True)):
            width = value * scale
            title = f"<title>{escape(part)}: {value:.3g}</title>"
            where = f'x="{at:.1f}" y="{y}" width="{width:.1f}" height="20"'
            out.append(f'<rect class="f{color % 8}" {where}>{title}</rect>')
            at += width
    out.append(_text("axis", (_LABEL + WIDTH - RIGHT) / 2, height - 5, "middle", unit))
    return "".join([*out, "</svg>"])


@dataclass(frozen=True)
class Point:
    """A dot of a scatter plot; good: on the front."""

    name: str
    x: float
    y: float
    good: bool = False


def scatter(points: Sequence[Point], *, x: str, y: str) -> str:
    """Dots, those on the front joined by a line. x, y: titles of the axes."""
    if not points:
        return '<p class="empty">nothing to plot</p>'
    high = max(point.x for point in points) * 1.08 or 1.0
    top = max(point.y for point in points) * 1.08 or 1.0
    scale = _Scale(0.0, high, top, log=False)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y)}">']
    parts += _axes(scale, x, percent=False)
    front = sorted((p for p in points if p.good), key=lambda p: p.x)
    line = " ".join(f"{scale.x(p.x):.1f},{scale.y(p.y):.1f}" for p in front)
    parts.append(f'<polyline class="c2" points="{line}"/>')
    for point in points:
        where = f'cx="{scale.x(point.x):.1f}" cy="{scale.y(point.y):.1f}"'
        title = f"<title>{escape(point.name)}</title>"
        parts.append(f'<circle class="f{2 if point.good else 7}" {where} r="4">{title}</circle>')
    return "".join([*parts, "</svg>"])
