"""The table at the end: everything that was found, in about forty lines of a hundred columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo.bench.gpu.budget import Outcome
from octavo.bench.gpu.figures import graphs_text, milliseconds

WIDTH = 100
METRICS = {"output_tokens_per_s": "tokens/s", "ttft_p50": "ttft p50", "itl_p50": "itl p50"}
MARKS = {"better": "+", "worse": "-", "different": "~"}


def lines(outcomes: Sequence[Outcome], versions: Mapping[str, str]) -> list[str]:
    """The whole table."""
    by_kind: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.status != "skipped":
            by_kind.setdefault(outcome.part.kind, []).append(outcome)
    out = ["=" * WIDTH]
    for outcome in by_kind.get("facts", ()):
        out += _facts(outcome, versions)
    out += _engines(by_kind.get("engine", ()))
    for outcome in by_kind.get("overlap", ()):
        out += _overlap(outcome)
    for outcome in by_kind.get("compare", ()):
        out += _comparison(outcome)
    left = [outcome.part.name for outcome in outcomes if outcome.status == "skipped"]
    if left:
        out += _wrapped(f"skipped: {'; '.join(left)}")
    return [line[:WIDTH].rstrip() for line in out]


def _error(outcome: Outcome) -> str:
    """Why it came no further, in one line; empty when it is done."""
    return f"error: {' '.join(outcome.error.split())}" if outcome.error else ""


def _facts(outcome: Outcome, versions: Mapping[str, str]) -> Iterator[str]:
    found = outcome.result
    device = found.get("device", {})
    capability = ".".join(map(str, device.get("capability") or ()))
    names = ("torch", "triton", "flashinfer-python")
    shown = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    yield f"{device.get('name', 'device ?')}{f' (sm {capability})' if capability else ''}; {shown}"
    rates = []
    if "memory" in found:
        for way in ("read", "copy"):
            rates.append(f"{way} {max(found['memory'][way].values()) / 1e9:,.0f} GB/s")
    if "matmul" in found:
        rate = found["matmul"]["flops_per_s"] / 1e12
        rates.append(f"matmul {found['matmul']['dtype']} {rate:,.1f} TFLOP/s")
    yield ", ".join([*rates, *([_error(outcome)] if outcome.error else [])])


# ---- engines -------------------------------------------------------------------------------------


def _engines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One row an engine: decode steps, prompts, start."""
    if not outcomes:
        return
    batches = _union(outcomes, "batches")
    prompts = _union(outcomes, "prompts")
    context = outcomes[0].part.given["context"]
    yield f"decode: ms a step and times its floor, context {context}"
    yield "prompts: 1000 tokens/s and share of the matmul rate; start: s"
    head = f"{'model attention runner':<30}"
    head += "".join(f"{f'batch {batch}':>13}" for batch in batches)
    yield head + "".join(f"{f'{n} tokens':>12}" for n in prompts) + f"{'start':>6}"
    previous = ""
    order = list(dict.fromkeys(outcome.part.given["model"] for outcome in outcomes))
    for outcome in sorted(outcomes, key=lambda o: order.index(o.part.given["model"])):
        model = outcome.part.given["model"]
        if model != previous:
            yield from _floors(outcomes, model, batches)
            previous = model
        yield _engine_row(outcome, batches, prompts)


def _union(outcomes: Sequence[Outcome], key: str) -> list[int]:
    return sorted({n for outcome in outcomes for n in outcome.part.given[key]})


def _floors(outcomes: Sequence[Outcome], model: str, batches: Sequence[int]) -> Iterator[str]:
    """The floor's own row, by the first engine of the model that has one."""
    cells: list[str] = []
    for batch in batches:
        floors = [
            outcome.result.get("decode", {}).get(str(batch), {}).get("floor_s")
            for outcome in outcomes
            if outcome.part.given["model"] == model
        ]
        known = [floor for floor in floors if floor is not None]
        cells.append(f"{milliseconds(known[0])}{'':7}" if known else "")
    if any(cells):
        yield f"{f'{model} floor':<30}" + "".join(f"{cell:>13}" for cell in cells)


def _engine_row(outcome: Outcome, batches: Sequence[int], prompts: Sequence[int]) -> str:
    found, given = outcome.result, outcome.part.given
    row = f"{outcome.part.name:<30}"
    for batch in batches:
        if batch not in given["batches"]:
            row += f"{'-':>13}"
        elif (value := found.get("decode", {}).get(str(batch))) is None:
            return f"{row}  {_error(outcome)}"
        else:
            times = _times(value["times_floor"]) if "times_floor" in value else ""
            row += f"{milliseconds(value['step_s']):>6} {times:>6}"
    for length in prompts:
        if length not in given["prompts"]:
            row += f"{'-':>12}"
        elif (value := found.get("prompt", {}).get(str(length))) is None:
            return f"{row}  {_error(outcome)}"
        else:
            share = f"{value['flops_share']:.0%}" if "flops_share" in value else ""
            row += f"{value['tokens_per_s'] / 1e3:>7.1f} {share:>4}"
    start = f"{found['start']['seconds']:>6.1f}" if "start" in found else ""
    return f"{row}{start}  {_error(outcome)}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 100 else f"{ratio:.0f}x"


# ---- the others ----------------------------------------------------------------------------------


def _overlap(outcome: Outcome) -> Iterator[str]:
    """Steps with one and two in flight, and what the start with graphs of all sizes took."""
    name = outcome.part.name
    for batch, both in outcome.result.get("steps", {}).items():
        text = f"{name} batch {batch}:"
        for number, found in both.items():
            text += f" in flight {number} {milliseconds(found['step_s'])} ms,"
        found = both[max(both)]
        device = min(found["device_s"] for found in both.values())
        phases = found["phases_s"]
        host = " ".join(milliseconds(seconds) for seconds in phases.values())
        hidden = found.get("hidden")
        text += f" device {milliseconds(device)},"
        text += f" hidden {'?' if hidden is None else f'{hidden:.0%}'}"
        yield text
        yield f"  host ms: {' '.join(phases)}: {host}"
    starts = outcome.result.get("start", {})
    if starts:
        yield _start(name, next(iter(starts.values())))
    if outcome.error:
        yield from _wrapped(f"{name}: {_error(outcome)}")[:2]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _start(name: str, start: Mapping[str, Any]) -> str:
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in start["phases"].items())
    return f"  start {start['seconds']:.1f} s: {phases}{graphs_text(start)}"


def _comparison(outcome: Outcome) -> Iterator[str]:
    name, result = outcome.part.name, outcome.result.get("comparison")
    if result is None:
        yield from _wrapped(f"{name}: {_error(outcome)}")[:2]
        return
    first, other = result["sides"]
    yield f"{name}: {other} against {first}, ratios with 95% intervals, {result['rounds']} rounds"
    cells = []
    for row in result["metrics"]:
        if row["metric"] in METRICS:
            ends = ["?" if row[end] is None else f"{row[end]:.2f}" for end in ("low", "high")]
            mark = MARKS.get(row["verdict"], "")
            title = METRICS[row["metric"]]
            cells.append(f"{title} {row['estimate']:.3f} [{', '.join(ends)}]{mark}")
    for check in result["checks"]:
        greedy = check["greedy"]
        if greedy is not None and greedy["prompts"]:
            same = f"{greedy['num_identical']} of {len(greedy['prompts'])}"
            cells.append(f"greedy outputs {same} equal, logprobs within {greedy['noise']:.2g}")
    whole = ", ".join(cell.replace(" ", "\xa0") for cell in cells)  # lines end between cells
    yield from (line.replace("\xa0", " ") for line in _wrapped(f"  {whole}"))
