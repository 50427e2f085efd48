"""`octavo plugins`: list, show, check, new."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.contracts import KINDS
from octavo.core.errors import PluginNotFound, nearest
from octavo.server.command_line.config import add_config_sources, config_from_args

if TYPE_CHECKING:
    from octavo.core.plugin_loading import Registered
    from octavo.testing.check import Checked
    from octavo.testing.conformance.base import Verdict

MARKS = {"kept": "ok", "broken": "BROKEN", "not applicable": "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `octavo plugins` and of its commands."""
    add_config_sources(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="plugins_command")
    shown = commands.add_parser(
        "show", help="show options, requirements and origin of an implementation"
    )
    shown.add_argument("kind", metavar="KIND", help=f"one of {', '.join(KINDS)}")
    shown.add_argument("name", metavar="NAME", help="name of the implementation")
    checked = commands.add_parser("check", help="run the conformance suites of a distribution")
    checked.add_argument("package", metavar="PACKAGE", help="name of an installed distribution")
    new = commands.add_parser("new", help="create a working plugin package")
    new.add_argument("kind", metavar="KIND", help=f"one of {', '.join(KINDS)}")
    new.add_argument("name", metavar="NAME", help="name of the implementation, in lower case")


def main(args: argparse.Namespace) -> int:
    """Run `octavo plugins [COMMAND]`."""
    run = {None: _list, "show": _show, "check": _check, "new": _new}[args.plugins_command]
    return run(args)


def _list(args: argparse.Namespace) -> int:
    from octavo.engine.device import detect_platform
    from octavo.server.command_line.plugin_table import plugin_report, table

    config, registry = config_from_args(args)
    platform, _ = detect_platform(config.executor.device)
    report = plugin_report(registry, platform)
    print(json.dumps(report, indent=2) if args.json else "\n".join(table(report)))
    return 0


def _show(args: argparse.Namespace) -> int:
    from octavo.engine.device import detect_platform
    from octavo.server.command_line.plugin_table import details, details_text

    config, registry = config_from_args(args)
    known = registry.providers(args.kind)  # refuses an unknown kind
    if args.name not in known:
        raise PluginNotFound(f"there is no {args.kind} '{args.name}'; {nearest(args.name, known)}")
    platform, _ = detect_platform(config.executor.device)
    found = details(known[args.name], platform)
    print(json.dumps(found, indent=2) if args.json else "\n".join(details_text(found)))
    return 0


def _check(args: argparse.Namespace) -> int:
    """Exit status 1 when a promise is broken, or nothing could be checked."""
    from octavo.core.contracts import ProbeContext
    from octavo.engine.device import detect_platform
    from octavo.testing.check import check_distribution

    config, registry = config_from_args(args)
    platform, _ = detect_platform(config.executor.device)
    heading = ""

    def tell(entry: Registered, verdict: Verdict) -> None:
        nonlocal heading
        if heading != (heading := f"{entry.kind} {entry.name}"):
            print(heading)
        print(f"  {MARKS[verdict.outcome]:7} {verdict.text}", flush=True)
        if verdict.message:
            print(f"          {verdict.message}")

    progress = None if args.json else tell
    results = check_distribution(args.package, registry, ProbeContext(platform), progress)
    verdicts = [verdict for item in results for verdict in item.verdicts]
    broken = [verdict for verdict in verdicts if not verdict]
    if args.json:
        checked = [_as_dict(item) for item in results]
        print(json.dumps({"checked": checked, "broken": len(broken)}, indent=2))
    else:
        for item in results:
            if item.skipped:
                print(f"{item.entry.kind} {item.entry.name}\n  not checked: {item.skipped}")
        for verdict in broken:
            print(f"\n{verdict.promise}\n{verdict.details}", file=sys.stderr)
        print(
            f"{len(results)} implementations, {len(verdicts)} promises, {len(broken)} broken, "
            f"{sum(v.outcome == 'not applicable' for v in verdicts)} not applicable"
        )
    return 1 if broken or not verdicts else 0


def _as_dict(item: Checked) -> dict[str, Any]:
    return {
        "kind": item.entry.kind,
        "name": item.entry.name,
        "suite": item.suite,
        "skipped": item.skipped,
        "verdicts": [asdict(verdict) for verdict in item.verdicts],
    }


def _new(args: argparse.Namespace) -> int:
    from octavo.testing.new_package import write_package

    folder = write_package(args.kind, args.name, Path.cwd())
    print(f"wrote {folder}")
    print(f"next: pip install -e '{folder.name}[dev]' && octavo plugins check {folder.name}")
    return 0
