"""What follows from measured figures, and how each is told as it comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo.bench.gpu.budget import Outcome
from octavo.bench.gpu.floor import decode_floor, hidden_share, prompt_flops, step_bytes


def derive(outcome: Outcome, path: Sequence[str], machine: Mapping[str, Any]) -> None:
    """Add to the figure that has just come what follows from it. machine: the result of the part
    `facts`, empty where there is none: ratios are left out then.

    decode: `floor_s`, `times_floor`. prompt: `tokens_per_s`, `flops_share`. overlap: `hidden` in
    the figures with two steps in flight.
    """
    start: Any = outcome.result.get("start")
    if path[0] == "decode":
        _derive_decode(outcome.result["decode"][path[1]], start, machine)
    elif path[0] == "prompt":
        found = outcome.result["prompt"][path[1]]
        tokens = int(path[1])
        found["tokens_per_s"] = tokens / found["seconds"]
        if "matmul" in machine:
            done = prompt_flops(start, tokens) / found["seconds"]
            found["flops_share"] = done / machine["matmul"]["flops_per_s"]
    elif path[0] == "steps":
        both = outcome.result["steps"][path[1]]
        _derive_decode(both[path[2]], start[path[2]], machine)
        if "2" in both:
            device = min(found["device_s"] for found in both.values())
            one, two = (both[number]["step_s"] for number in "12")
            both["2"]["hidden"] = hidden_share(one, two, device)


def _derive_decode(found: dict[str, Any], start: Any, machine: Mapping[str, Any]) -> None:
    if "memory" in machine:
        read = step_bytes(start, found["kv_tokens"])
        found["floor_s"] = decode_floor(read, machine["memory"]["bytes_per_s"])
        found["times_floor"] = found["step_s"] / found["floor_s"]


def told(outcome: Outcome, path: Sequence[str]) -> Iterator[str]:
    """Lines for the figure that has just come."""
    value = outcome.result
    for key in path:
        value = value[key]
    name = outcome.part.name
    if path[0] == "comparison":
        yield from (f"{name}: {line}" for line in value["lines"])
    elif path[0] == "start":
        yield f"{name}: {start_text(value)}"
    elif path[0] == "decode":
        yield f"{name}: batch {path[1]}: {step_text(value)}"
    elif path[0] == "prompt":
        share = f", {value['flops_share']:.0%} of the matmul rate" if "flops_share" in value else ""
        yield f"{name}: prompt of {path[1]}: {value['tokens_per_s']:,.0f} tokens/s{share}"
    elif path[0] == "steps":
        text = f"{step_text(value)}, {host_text(value)}"
        yield f"{name}: batch {path[1]}, in flight {path[2]}: {text}"
    elif path[0] == "device":
        capability = ".".join(map(str, value["capability"] or ("none",)))
        yield f"{name}: {value['name']}, capability {capability}"
    elif path[0] == "memory":
        for way in ("read", "copy"):
            each = (f"{int(k) / 2**20:.0f} MiB {v / 1e9:,.0f}" for k, v in value[way].items())
            yield f"{name}: {way} GB/s: {', '.join(each)}"
    elif path[0] == "matmul":
        rate = value["flops_per_s"] / 1e12
        yield f"{name}: matmul {value['dtype']} {value['size']}: {rate:,.1f} TFLOP/s"


def milliseconds(seconds: float) -> str:
    """Three digits that count."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.{1 if value >= 10 else 2}f}"


def step_text(value: Mapping[str, Any]) -> str:
    """A decode step in words."""
    text = f"{milliseconds(value['step_s'])} ms a step"
    if "times_floor" in value:
        text += f", {value['times_floor']:.2f} x floor of {milliseconds(value['floor_s'])} ms"
    return text


def host_text(value: Mapping[str, Any]) -> str:
    """Who spends the time of a step."""
    phases = value["phases_s"]
    text = f"device {milliseconds(value['device_s'])} ms, host " + ", ".join(
        f"{name} {milliseconds(seconds)}" for name, seconds in phases.items()
    )
    if value.get("hidden") is not None:
        text += f"; {value['hidden']:.0%} of the host's work hidden"
    return text


def start_text(value: Mapping[str, Any]) -> str:
    """What a start took."""
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in value["phases"].items())
    text = f"start {value['seconds']:.1f} s ({phases})"
    if "taken_bytes" in value:
        text += f", {value['taken_bytes'] / 2**30:.2f} GiB taken"
    return text + graphs_text(value)


def graphs_text(start: Mapping[str, Any]) -> str:
    """What captured graphs take; empty without any."""
    graphs = start["graphs"]
    if not graphs["number"]:
        return ""
    taken, estimated = (graphs[key] / 2**20 for key in ("bytes", "estimated_bytes"))
    return f", {graphs['number']} graphs {taken:.0f} MiB (estimated {estimated:.0f})"
