"""Parts of self-contained HTML reports: no script, no outside resource."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { --bg: #fff; --fg: #1b1f24; --soft: #5b6570; --rule: #d9dee3; --head: #f3f5f7;
  --c0: #2563a8; --c1: #c4571b; --c2: #2c7a4b; --c3: #8a3fa0; --c4: #a3842a; --c5: #b3294e;
  --c6: #3b8f99; --c7: #5e5e5e; }
@media (prefers-color-scheme: dark) { :root { --bg: #15181c; --fg: #e6e9ec; --soft: #9aa4ae;
  --rule: #343a41; --head: #1e2329; --c0: #6ba6e8; --c1: #ee8f57; --c2: #67bd8b; --c3: #c58adb;
  --c4: #d9bb62; --c5: #ec7395; --c6: #72c7d1; --c7: #a8a8a8; } }
body { background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif;
  max-width: 1360px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 36px 0 8px; }
p { margin: 4px 0; } .soft, .empty, figcaption { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 14px; border-bottom: 1px solid var(--rule); text-align: right; }
th:first-child, td:first-child { text-align: left; white-space: pre; padding-left: 4px; }
thead th { background: var(--head); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(560px, 100%), 1fr));
  gap: 20px 32px; }
figure { margin: 0; max-width: 720px; }
figcaption { margin-bottom: 2px; } figcaption b { color: var(--fg); }
svg { width: 100%; height: auto; display: block; }
.grid { stroke: var(--rule); } .tick, .axis { fill: var(--soft); font: 12px system-ui, sans-serif; }
polyline { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
@media print { :root { --bg: #fff; --fg: #000; --soft: #444; --rule: #ccc; --head: #eee; }
  body { max-width: none; padding: 0; font-size: 11px; } figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; } }
.better { color: var(--c2); font-weight: 600; } .worse { color: var(--c5); font-weight: 600; }
.left td, .left th { text-align: left; } .verdicts td { white-space: nowrap; }
.verdicts td, .verdicts th { padding: 3px 8px; } .together { white-space: nowrap; }
.verdicts td:last-child, .verdicts th:last-child { text-align: left; white-space: normal;
  min-width: 280px; }
.note { border-left: 3px solid var(--c4); padding-left: 8px; }
.zone { fill: var(--head); } .one { stroke: var(--soft); stroke-dasharray: 3 3; }
.key { display: inline-block; width: 14px; height: 3px; margin: 0 5px 4px 14px; }
""" + "".join(
    f".c{i} {{ stroke: var(--c{i}); }} .key.c{i} {{ background: var(--c{i}); }}\n"
    f".f{i} {{ fill: var(--c{i}); }}\n"
    for i in range(8)
)


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page; `parts` come below the title."""
    head = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
    ]
    return "\n".join([*head, *parts, "</body></html>"]) + "\n"


def table_of(
    names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], kind: str = ""
) -> str:
    """A table: column names, and rows of (title, cells). kind: a CSS class."""
    return raw_table(
        names, [(title, [escape(cell) for cell in cells]) for title, cells in rows], kind
    )


def raw_table(
    names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], kind: str = ""
) -> str:
    """As `table_of`, with cells that are HTML already."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr><td>{escape(title)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
        for title, cells in rows
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def legend(names: Sequence[str]) -> str:
    """Colours of the lines of a chart."""
    return "".join(
        f'<span class="together"><span class="key c{i % 8}"></span>{escape(name)}</span> '
        for i, name in enumerate(names)
    )


def figure(title: str, what: str, key: str, drawing: str) -> str:
    """A drawing with its caption and legend."""
    caption = f"<b>{escape(title)}</b>, {escape(what)}{key}"
    return f"<figure><figcaption>{caption}</figcaption>{drawing}</figure>"


def grid(figures: Iterable[str]) -> str:
    """Figures beside each other where there is room."""
    return f'<div class="charts">{"".join(figures)}</div>'
