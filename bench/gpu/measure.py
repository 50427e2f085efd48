"""The parts, as the child process does them. Each tells its figures as soon as it has them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.bench.gpu.clocks import clock_of
from octavo.bench.gpu.engines import Rows, Tell, engine_config, running, settle

Given = Mapping[str, Any]


def do_facts(given: Given, device: str, tell: Tell) -> None:
    """given: `sizes` of memory in bytes, `dtype` and `size` of the matrices."""
    from octavo.bench.gpu import device as measured

    clock = clock_of(device)
    tell(measured.facts(device), "device")
    tell(measured.bandwidth(device, given["sizes"], clock), "memory")
    tell(measured.matmul(device, given["dtype"], given["size"], clock), "matmul")
    measured.free(device)


def do_engine(given: Given, device: str, tell: Tell) -> None:
    """Start, decode at every batch size, prompts; given: see `engine_config`, and `warm`, `steps`
    of decoding, `rounds` of each prompt."""
    with tempfile.TemporaryDirectory() as name:
        resolved, registry = settle(engine_config(given, device, Path(name)))
        with running(resolved, registry) as (engine, facts):
            tell(facts, "start")
            rows = Rows(engine, clock_of(device), given["context"])
            for batch in given["batches"]:
                rows.grow(batch)
                tell(rows.decode(given["warm"], given["steps"]).as_dict(), "decode", str(batch))
            rows.end()
            for length in given["prompts"]:
                tell({"seconds": rows.prompt(length, given["rounds"])}, "prompt", str(length))


def do_overlap(given: Given, device: str, tell: Tell) -> None:
    """Decoding with one step in flight and with two; given: as of an engine."""
    for in_flight in (1, 2):
        _fly(given, device, in_flight, tell)


def _fly(given: Given, device: str, in_flight: int, tell: Tell) -> None:
    executor = dict(given.get("executor", {}))
    executor["kind"] = {"name": "local", "max_in_flight": in_flight}
    with tempfile.TemporaryDirectory() as name:
        config = engine_config({**given, "executor": executor}, device, Path(name))
        resolved, registry = settle(config)
        with running(resolved, registry) as (engine, facts):
            tell(facts, "start", str(in_flight))
            rows = Rows(engine, clock_of(device), given["context"])
            for batch in given["batches"]:
                rows.grow(batch)
                found = rows.decode(given["warm"], given["steps"]).as_dict()
                found["busy_s"] = busy = rows.busy()
                found["device_s"] = found["computed_s"] if busy is None else busy
                tell(found, "steps", str(batch), str(in_flight))


def do_compare(given: Given, device: str, tell: Tell) -> None:
    """`octavo compare` of two engines that differ in `sides` (a name to configuration each);
    given: as of an engine, and `rounds`, `seconds`, `requests`, `input_len`, `output_len`."""
    import yaml

    from octavo.bench.compare.session import Plan, Session
    from octavo.bench.compare.sides import EngineSide
    from octavo.bench.compare.table import lines
    from octavo.bench.workloads.spec import WorkloadSpec

    plan = Plan(
        rounds=given["rounds"],
        noise_rounds=1,
        time_limit_s=given["seconds"],
        check_prompts=given["check_prompts"],
        check_samples=0,
    )
    spec = WorkloadSpec(
        num_requests=given["requests"],
        input_len=given["input_len"],
        output_len=given["output_len"],
    )
    with tempfile.TemporaryDirectory() as name:
        folder, sides = Path(name), []
        for side, config in given["sides"].items():
            resolved = engine_config({**given, **config}, device, folder)
            settle(resolved)  # what cannot be had here is said in a word
            file = folder / f"{side}.yaml"
            file.write_text(yaml.safe_dump(resolved))
            sides.append(EngineSide(side, str(file)))
        try:
            session = Session(sides, spec, plan)
            session.start()
            result = session.run()
        finally:
            for started in sides:
                started.close()
    told = {key: result[key] for key in ("headline", "rounds", "metrics", "checks", "notes")}
    tell({**told, "sides": list(given["sides"]), "lines": lines(result)}, "comparison")


PARTS = {
    "facts": do_facts,
    "engine": do_engine,
    "overlap": do_overlap,
    "compare": do_compare,
}
