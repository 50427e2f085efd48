"""Kernels compiled ahead of time, without a GPU, and what they cost: `kernels.json`.

    python -m octavo.backends.triton.ahead            compile everything, compare with the table
    python -m octavo.backends.triton.ahead --write    compile everything, write the table
    python -m octavo.backends.triton.ahead decode     only what has `decode` in its name

The launches are those of the kernels' own Python functions, called on host tensors with the launch
itself replaced, so that what is compiled is what would be run: signature, constants, divisibility,
warps. Not in the interpreter (TRITON_INTERPRET unset).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from octavo.backends.triton import launch
from octavo.backends.triton.support import FP8_CAPABILITY, interpreting
from octavo.backends.triton.variants import VARIANTS, Variant

TABLE = Path(__file__).with_name("kernels.json")
CAPABILITIES = (80, 90, 100)
SHARED_MOST = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory that a block may use, in bytes, by compute capability."""


@dataclass(frozen=True)
class Cost:
    """Of one compiled kernel: shared memory of a program and local memory of a thread (registers
    that were spilled, and arrays) in bytes, registers of a thread, warps of a program."""

    shared: int
    registers: int
    spilled: int
    warps: int


Launch = tuple[JITFunction[Any], tuple[Any, ...], dict[str, Any]]


@contextmanager
def captured(capability: int) -> Iterator[list[Launch]]:
    """Launches made inside are listed instead of run."""
    launches: list[Launch] = []

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((self, args, kwargs))

    kept = JITFunction.run, launch.converts_fp8
    native = divmod(capability, 10) >= FP8_CAPABILITY
    JITFunction.run = run
    launch.converts_fp8 = lambda device: native
    try:
        yield launches
    finally:
        JITFunction.run, launch.converts_fp8 = kept


def compile_launch(captured_launch: Launch, capability: int) -> Any:
    """The compiled kernel of a launch on a device of this capability."""
    function, args, kwargs = captured_launch
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    kwargs = {"debug": False, **kwargs}
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, options = bind(*args, **kwargs)
    options, signature, constants, attributes = function._pack_args(
        backend, kwargs, bound, specialization, options
    )
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


def cost(compiled: Any) -> Cost:
    """Read from the cubin by cuobjdump, which comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        done = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    line = next(line for line in done.stdout.splitlines() if "REG:" in line)
    fields = dict(part.split(":", 1) for part in line.split() if ":" in part)
    spilled = int(fields["STACK"]) + int(fields["LOCAL"])
    return Cost(compiled.metadata.shared, int(fields["REG"]), spilled, compiled.metadata.num_warps)


def costs(variant: Variant, capability: int) -> dict[str, Cost]:
    """By kernel, of all that a variant launches."""
    with captured(capability) as launches:
        variant.call()
    if not launches:
        raise RuntimeError(f"{variant.name} launches nothing")
    return {item[0].__name__: cost(compile_launch(item, capability)) for item in launches}


def table(wanted: Callable[[str], bool], capabilities: tuple[int, ...]) -> dict[str, Any]:
    """{`variant`: {`sm_90`: {kernel: cost}}} of the variants whose name is wanted."""
    found: dict[str, Any] = {}
    for variant in VARIANTS:
        if wanted(variant.name):
            print(variant.name, file=sys.stderr, flush=True)
            found[variant.name] = {
                f"sm_{capability}": {
                    name: asdict(each) for name, each in costs(variant, capability).items()
                }
                for capability in capabilities
            }
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m octavo.backends.triton.ahead")
    parser.add_argument("names", nargs="*", help="parts of names of variants; all when none")
    parser.add_argument("--write", action="store_true", help="write kernels.json")
    parser.add_argument("--sm", type=int, action="append", help="only this capability, as 90")
    given = parser.parse_args(arguments)
    if interpreting():
        raise SystemExit("unset TRITON_INTERPRET: kernels are compiled, not interpreted, here")
    made = table(
        lambda name: not given.names or any(part in name for part in given.names),
        tuple(given.sm or CAPABILITIES),
    )
    if given.write:
        kept = json.loads(TABLE.read_text())["kernels"] if TABLE.exists() else {}
        kept = {each.name: kept[each.name] for each in VARIANTS if each.name in kept}
        whole = {"triton": triton.__version__, "kernels": {**kept, **made}}
        TABLE.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")
        return 0
    json.dump({"triton": triton.__version__, "kernels": made}, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
