"""Compiles the kernels with the system's compiler on first use, and keeps the result.

One shared library of all C files in this folder, in a private folder under `OCTAVO_CACHE_DIR`,
named by a digest of the sources, the flags, the compiler and the CPU. Several processes may build
at once: one does, the others wait. OpenMP comes from the libgomp in torch's own folder when it is
there, so that the process has one pool of threads.

Imports no torch: probes run in processes that must not.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.backends import CPU_ISA
from octavo.core.contracts import Availability, ProbeContext
from octavo.core.envvars import CACHE_DIR
from octavo.core.errors import PluginUnavailable

_FOLDER = Path(__file__).parent
_TIMEOUT = 600
_WARNINGS = ("-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas")
# No -ffast-math, and products are fused only where the code says so: the order of every sum is a
# promise.
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread")

ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "native": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "generic": ("-DOCTAVO_GENERIC",),
}
"""Flags of the instruction sets of `OCTAVO_CPU_ISA`; `native` asks the compiler for this CPU's."""

_ELSEWHERE = f"make room there, or set {CACHE_DIR.name} to a folder that can be written"

_failed: dict[Path, str] = {}
"""Why a library could not be built: every part that needs it asks, one answer is enough."""

_PROBE = """
#include "simd.h"
#ifdef _OPENMP
#include <omp.h>
#endif
__attribute__((visibility("default"))) const char *octavo_probe(void) {
#ifdef _OPENMP
  return omp_get_max_threads() > 0 ? ISA_NAME : 0;
#else
  return ISA_NAME;
#endif
}
"""


@dataclass(frozen=True)
class Toolchain:
    """compiler: command line prefix. version: what it says of itself. openmp: path of the runtime
    to link, or `-fopenmp` for the compiler's own. machine: digest of the CPU's features."""

    compiler: tuple[str, ...]
    version: str
    openmp: str
    machine: str


@functools.lru_cache
def toolchain() -> Toolchain:
    """What this machine compiles with. Raises `PluginUnavailable` when there is no compiler."""
    command = tuple(shlex.split(os.environ.get("CC", ""))) or ("cc",)
    found = shutil.which(command[0])
    if found is None:
        raise PluginUnavailable(
            f"there is no C compiler: `{command[0]}` is not in PATH. Install one (Debian, Ubuntu: "
            "apt install gcc libc6-dev; Fedora: dnf install gcc), or set CC",
        )
    version = _output([found, *command[1:], "--version"])
    return Toolchain((found, *command[1:]), version, _torch_openmp() or "-fopenmp", _machine())


LOST = (
    "without the native CPU kernels, torch's operators compute everything: several times slower at "
    "few requests, and a request's logits may differ in their last bits by the company it has"
)


def probe(context: ProbeContext) -> Availability:
    """Whether the kernels can be compiled and run here: compiles a few lines, and remembers."""
    if context.platform.device != "cpu":
        return Availability(False, f"is for the CPU, the device is {context.platform.device}")
    if platform.system() not in ("Linux", "Darwin"):
        return Availability(False, f"is not built on {platform.system()}", LOST)
    try:
        tools, isa = toolchain(), CPU_ISA.get()
        if not _cached("kernels", sources(), isa).exists():
            _build("probe", {"probe.c": _PROBE.encode(), **_headers()}, tools, isa)
    except PluginUnavailable as error:
        return Availability(False, str(error), LOST)
    except OSError as error:
        return Availability(False, f"the kernel cache cannot be used: {error}; {_ELSEWHERE}", LOST)
    return Availability(True, f"native kernels by {tools.version.splitlines()[0]}")


def library(isa: str = "native", extra: Sequence[str] = ()) -> Path:
    """Path of the shared library of all kernels, built when it is not there yet. extra: further
    compiler flags. Raises `PluginUnavailable` with the compiler's message."""
    try:
        return _build("kernels", sources(), toolchain(), isa, tuple(extra))
    except OSError as error:
        raise PluginUnavailable(
            f"the kernel cache cannot be used: {error}; {_ELSEWHERE}"
        ) from error


def sources() -> dict[str, bytes]:
    """The C files and headers of the kernels by name."""
    return {path.name: path.read_bytes() for path in sorted(_FOLDER.glob("*.c"))} | _headers()


def _headers() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(_FOLDER.glob("*.h"))}


def _torch_openmp() -> str | None:
    """The libgomp that torch itself loads, found without importing torch."""
    spec = importlib.util.find_spec("torch")
    for place in (spec and spec.submodule_search_locations) or ():
        for folder in (Path(place) / "lib", Path(place).parent / "torch.libs"):
            for path in sorted(folder.glob("libgomp*.so*")):
                return str(path)
    return None


def _machine() -> str:
    """A digest that differs where `-march=native` may differ."""
    facts = [platform.system(), platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        wanted = ("flags", "Features", "model name", "CPU part", "cpu family", "model")
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        facts += [line for line in lines if line.split("\t")[0].strip() in wanted]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _flags(isa: str, extra: tuple[str, ...]) -> list[str]:
    machine = list(ISA_FLAGS[isa])
    if isa == "native":
        arm = platform.machine() in ("aarch64", "arm64")
        machine = ["-mcpu=native" if arm else "-march=native"]
    return [*_FLAGS, *_WARNINGS, *machine, *extra]


def _cached(
    name: str, files: dict[str, bytes], isa: str = "native", extra: tuple[str, ...] = ()
) -> Path:
    tools = toolchain()
    digest = hashlib.sha256()
    for part in (repr(tools), repr(_flags(isa, extra)), *sorted(files)):
        digest.update(part.encode() + b"\0")
    for key in sorted(files):
        digest.update(hashlib.sha256(files[key]).digest())
    return CACHE_DIR.get() / "kernels" / f"{name}-{isa}-{digest.hexdigest()[:32]}.so"


def _build(
    name: str,
    files: dict[str, bytes],
    tools: Toolchain,
    isa: str = "native",
    extra: tuple[str, ...] = (),
) -> Path:
    target = _cached(name, files, isa, extra)
    _private_folder(target.parent)
    if target in _failed:
        raise PluginUnavailable(_failed[target])
    if not target.exists():
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                try:
                    _compile(files, target, tools, _flags(isa, extra))
                except PluginUnavailable as error:
                    _failed[target] = str(error)
                    raise
    if target.stat().st_uid != os.getuid():
        raise PluginUnavailable(f"{target} belongs to another user and is not loaded")
    return target


def _private_folder(folder: Path) -> None:
    """Make sure that nobody else can put a library there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.getuid():
        raise PluginUnavailable(
            f"{folder} belongs to another user; set OCTAVO_CACHE_DIR to a folder of yours"
        )
    if stat.S_IMODE(state.st_mode) != 0o700:
        folder.chmod(0o700)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _compile(files: dict[str, bytes], target: Path, tools: Toolchain, flags: list[str]) -> None:
    """Compile the C files, as many at once as there are cores, link, move the library in place."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as place:
        folder = Path(place)
        for name, text in files.items():
            (folder / name).write_bytes(text)
        names = sorted((n for n in files if n.endswith(".c")), key=lambda n: -len(files[n]))
        compile_flags = [*flags, "-fopenmp", "-c"]
        if not _openmp_works(folder, tools):
            compile_flags.remove("-fopenmp")
        commands = [[*tools.compiler, *compile_flags, name, "-o", f"{name}.o"] for name in names]
        for start in range(0, len(commands), max(1, os.cpu_count() or 1)):
            _run_all(commands[start : start + max(1, os.cpu_count() or 1)], folder)
        link = [*tools.compiler, *flags, "-shared", *(f"{name}.o" for name in names)]
        if "-fopenmp" in compile_flags:
            link.append(tools.openmp)
            if tools.openmp != "-fopenmp":
                link.append(f"-Wl,-rpath,{Path(tools.openmp).parent}")
        _run_all([[*link, "-lm", "-o", "out.so"]], folder)
        (folder / "out.so").chmod(0o600)
        (folder / "out.so").replace(target)


def _openmp_works(folder: Path, tools: Toolchain) -> bool:
    """Some compilers have no OpenMP; then the kernels run on one thread."""
    (folder / "openmp.c").write_text(
        "#include <omp.h>\nint f(void) { return omp_get_num_threads(); }\n"
    )
    command = [*tools.compiler, "-fPIC", "-fopenmp", "-c", "openmp.c", "-o", "openmp.o"]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=_TIMEOUT, check=False)
    (folder / "openmp.c").unlink()
    return done.returncode == 0


def _run_all(commands: list[list[str]], folder: Path) -> None:
    """Run commands side by side; raise with the first one's message that fails."""
    running = [
        (
            command,
            subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            ),
        )
        for command in commands
    ]
    try:
        for command, process in running:
            output, _ = process.communicate(timeout=_TIMEOUT)
            if process.returncode:
                lines = [line for line in output.splitlines() if "error" in line.lower()]
                full = f"; {_ELSEWHERE}" if os.strerror(errno.ENOSPC) in output else ""
                raise PluginUnavailable(
                    f"the kernels could not be compiled: `{shlex.join(command)}` ended with "
                    f"{process.returncode}: {'; '.join(lines[:3]) or output[-500:]}{full}"
                )
    except subprocess.TimeoutExpired:
        raise PluginUnavailable(f"the kernels could not be compiled within {_TIMEOUT} s") from None
    finally:
        for _, process in running:
            if process.poll() is None:
                process.kill()
            process.communicate()


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise PluginUnavailable(f"the C compiler does not answer: {error}") from error
    return done.stdout.strip()
