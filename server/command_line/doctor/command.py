"""`octavo doctor`: the command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.contracts import KINDS
from octavo.engine.device import detect_platform
from octavo.server.command_line.config import add_config_sources, config_from_args
from octavo.server.command_line.doctor.facts import Fact, all_facts, as_dicts
from octavo.server.command_line.doctor.self_test import self_test
from octavo.server.command_line.plugin_table import plugin_report

PARTS = ("attention_backend", "sampler", "graph_runner", "quantization", "executor")
MARKS = {"ok": "  ", "note": "? ", "bad": "! "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add_config_sources(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--no-self-test", action="store_true", help="skip running a tiny model (10 s)"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 1 when something is missing or does not work."""
    config, registry = config_from_args(args)
    facts = all_facts()
    platform, why = detect_platform(config.executor.device)
    facts.append(Fact("devices", "chosen by auto", f"{platform.device} ({why})"))
    report = plugin_report(registry, platform)
    test = None if args.no_self_test else self_test()
    bad = [fact for fact in facts if fact.state == "bad"]
    healthy = not bad and (test is None or test["ok"])
    if args.json:
        result = {"healthy": healthy, "facts": as_dicts(facts), **report, "self_test": test}
        print(json.dumps(result, indent=2))
    else:
        print("\n".join(lines(facts, report, test, healthy)))
    return 0 if healthy else 1


def lines(
    facts: Sequence[Fact],
    report: Mapping[str, Any],
    test: Mapping[str, Any] | None,
    healthy: bool,
) -> list[str]:
    """For people. `?` marks what may surprise, `!` what does not work."""
    out = []
    width = max(len(fact.name) for fact in facts)
    for section in dict.fromkeys(fact.section for fact in facts):
        out.append(section)
        for fact in facts:
            if fact.section == section:
                out.append(f"{MARKS[fact.state]}{fact.name:<{width}}  {fact.value}")
    for kind in PARTS:
        out.append(KINDS[kind].name.replace("_", " ") if kind in KINDS else kind)
        rows = [row for row in report["plugins"] if row["kind"] == kind]
        for row in sorted(rows, key=lambda r: (not r["available"], -r["rank"], r["name"])):
            state = "yes" if row["available"] else "no"
            reason = f": {row['reason']}" if row["reason"] else ""
            out.append(f"  {row['name']:<{width}}  {state}{reason}")
    for failure in report["failures"]:
        out.append(f"? plugin not loaded: {failure['where']} {failure['message']}")
    out += _test_lines(test, width)
    out.append("everything that is needed is here and works" if healthy else "NOT HEALTHY, see !")
    return out


def _test_lines(test: Mapping[str, Any] | None, width: int) -> list[str]:
    if test is None:
        return ["self-test: left out"]
    out = [f"self-test on a tiny model ({test['seconds']:.1f} s)"]
    if test.get("error"):
        out.append(f"! {test['error']}")
    for part in test["parts"]:
        mark, text = ("  ", "works") if part["ok"] else ("! ", part["error"])
        if part["ok"]:
            chosen = ", ".join(f"{k.split('_')[0]} {v}" for k, v in part["chosen"].items())
            text += f" in {part['seconds']:.2f} s ({chosen})"
        out.append(f"{mark}{'attention ' + part['backend']:<{width}}  {text}")
    return out
