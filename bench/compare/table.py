"""What `octavo compare` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.bench.compare.analysis import explain

Result = Mapping[str, Any]
MARKS = {"better": "+", "worse": "-", "different": "~"}


def short(value: Any) -> str:
    """A configuration's value in a few characters."""
    text = "-" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def difference_lines(result: Result) -> list[str]:
    """What differs between the sides."""
    names = [side["name"] for side in result["sides"]]
    if not result["differences"]:
        return ["the sides do not differ: " + ", ".join(names)]
    rows = [(key, [short(v) for v in values]) for key, values in result["differences"]]
    return ["what differs:", *_grid([("", names), *rows])]


def _grid(rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Aligned columns; the first row holds their heads, a column without one is text."""
    heads = rows[0][1]
    first = max(len(title) for title, _ in rows)
    widths = [max(len(cells[i]) for _, cells in rows) for i in range(len(heads))]
    out = []
    for title, cells in rows:
        padded = [
            cell.rjust(width) if head else cell
            for head, cell, width in zip(heads, cells, widths, strict=True)
        ]
        out.append(f"  {title:<{first}}  {'  '.join(padded)}".rstrip())
    return out


def value_text(value: float, row: Result) -> str:
    """A metric's value in its unit."""
    scaled = value * row["scale"]
    digits = 0 if abs(scaled) >= 1000 else 1 if abs(scaled) >= 10 else 3
    unit = f" {row['unit']}" if row["unit"] else ""
    return f"{scaled:,.{digits}f}{unit}"


def estimate_text(row: Result) -> tuple[str, str]:
    """The ratio (or difference) and its interval."""
    if row["kind"] == "ratio":
        ends = [f"{row[end]:.3f}" if row[end] is not None else "?" for end in ("low", "high")]
        return f"{row['estimate']:.3f}", f"[{ends[0]}, {ends[1]}]"
    scale = row["scale"]
    ends = [f"{row[end] * scale:+.3g}" if row[end] is not None else "?" for end in ("low", "high")]
    return f"{row['estimate'] * scale:+.3g}", f"[{ends[0]}, {ends[1]}]"


def noise_text(row: Result) -> str:
    """How far two rounds of the first side lie apart."""
    if row["noise"] is None:
        return ""
    if row["kind"] == "ratio":
        return f"{row['noise']:.1%}"
    return f"{row['noise'] * row['scale']:.3g}"


def check_lines(result: Result) -> list[str]:
    """What the output checks found."""
    out = []
    for check in result["checks"]:
        name = result["sides"][check["side"]]["name"]
        greedy, sampled = check["greedy"], check["sampled"]
        if greedy is not None:
            out += _greedy_lines(name, greedy)
        if sampled is not None:
            out.append(
                f"sampled outputs of {name}: {sampled['draws']} draws a prompt, p = "
                f"{sampled['p']:.3f}, total variation {sampled['distance']:.2f}: "
                f"{_sampled_text(sampled)}"
            )
    return out


def _sampled_text(sampled: Result) -> str:
    if sampled["verdict"] == "different":
        return "another distribution"
    if sampled["verdict"] == "too few":
        return "none shown, but so few draws need not show any difference (--check-samples)"
    return f"no difference; one of {sampled['shown_distance']:.2f} or more would have been shown"


def _greedy_lines(name: str, greedy: Result) -> list[str]:
    if "why" in greedy:
        return [f"greedy outputs of {name}: {greedy['verdict']} ({greedy['why']})"]
    out = [
        f"greedy outputs of {name}: {greedy['num_identical']} of {len(greedy['prompts'])} identical"
        f"; log probabilities of equal tokens differ by at most {greedy['noise']:.2g}"
    ]
    for number, prompt in enumerate(greedy["prompts"]):
        if prompt["verdict"] != "identical":
            out.append(f"  prompt {number}: {prompt_text(prompt)}")
    return out


def prompt_text(prompt: Result) -> str:
    """The first difference of a prompt in words."""
    word = "rounding" if prompt["verdict"] == "rounding" else "MORE THAN ROUNDING"
    if prompt["verdict"] == "unknown":
        word = "NOT EXPLAINED"
    if "why" in prompt:
        word += f" ({prompt['why']})"
    if "at" not in prompt:
        return word
    if "first_token" not in prompt:
        return f"token {prompt['at']}: {word}"
    text = f"token {prompt['at']}: {prompt['first_token']!r} against {prompt['other_token']!r}"
    if prompt.get("first_margin") is not None and prompt.get("other_margin") is not None:
        text += f", margins {prompt['first_margin']:.2g} and {prompt['other_margin']:.2g}"
    return f"{text}: {word}"


def lines(result: Result) -> list[str]:
    """The whole result."""
    names = [side["name"] for side in result["sides"]]
    out = [
        result["headline"],
        f"{result['rounds']} rounds in turns, {result['noise_rounds']} A/A rounds of {names[0]}; "
        "ratios with 95% intervals; all verdicts together err with at most 5%",
    ]
    for number, name in enumerate(names[1:], start=1):
        rows = [row for row in result["metrics"] if row["side"] == number]
        if len(names) > 2:
            out.append(f"{name} against {names[0]}")
        heads = (names[0], name, "ratio", "95%", "A/A noise", "")
        cells = [(row["title"], _cells(row)) for row in rows]
        out += _grid([("", heads), *cells])
    out += check_lines(result)
    out += [f"note: {note}" for note in result["notes"]]
    return out


def _cells(row: Result) -> list[str]:
    estimate, ends = estimate_text(row)
    mark = MARKS.get(row["verdict"], " ")
    return [
        value_text(row["first"], row),
        value_text(row["other"], row),
        estimate,
        ends,
        noise_text(row),
        f"{mark} {explain(row)}",
    ]
