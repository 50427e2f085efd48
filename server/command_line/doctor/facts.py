"""Facts of the machine: processor, memory, compiler, devices, packages, caches."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octavo.core import envvars
from octavo.core.byte_sizes import size
from octavo.core.errors import OctavoError
from octavo.engine.device import cgroup_cpus, cpu_threads

State = Literal["ok", "note", "bad"]
FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "asimd", "bf16", "sve")
REQUIRED = ("torch", "numpy", "pydantic", "msgspec", "starlette", "uvicorn", "zmq", "tokenizers")
OPTIONAL = {
    "transformers": "transformers",
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "xgrammar": "xgrammar",
    "ray": "ray",
}
_DISTRIBUTIONS = {"zmq": "pyzmq"}
LEAST_FILES = 4096
LEAST_DISK = 2 * 2**30


@dataclass(frozen=True)
class Fact:
    """state: `bad` is what Octavo cannot run with; `note` what may surprise."""

    section: str
    name: str
    value: str
    state: State = "ok"


def machine_facts() -> list[Fact]:
    """Processor, memory, operating system."""
    threads, why = cpu_threads()
    model, flags = _processor()
    facts = [
        Fact("machine", "system", platform.platform()),
        Fact("machine", "python", f"{platform.python_version()} at {sys.executable}"),
        Fact("machine", "processor", model),
        Fact("machine", "instructions", ", ".join(flags) or "none of those that kernels look for"),
        Fact("machine", "cores", f"{threads} to use ({why}) of {os.cpu_count()}"),
    ]
    quota = cgroup_cpus()
    if quota is not None and quota < 1:
        facts.append(Fact("machine", "cgroup", f"only {quota:g} of a core", "note"))
    from octavo.engine.worker.memory import free_host_memory

    facts.append(Fact("machine", "free memory", size(free_host_memory())))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limited = soft != resource.RLIM_INFINITY and soft < LEAST_FILES
    facts.append(
        Fact(
            "machine",
            "open files",
            f"at most {soft}" + (": each connection takes one, see ulimit -n" if limited else ""),
            "note" if limited else "ok",
        )
    )
    return facts


def _processor() -> tuple[str, list[str]]:
    """Name, and the instruction sets that kernels look for."""
    name, flags = platform.processor() or platform.machine(), set()
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        if key.strip() in ("flags", "Features"):
            flags = set(value.split())
    return name, [flag for flag in FLAGS if flag in flags]


def compiler_facts() -> list[Fact]:
    """The C compiler that the native kernels need."""
    from octavo.backends.cpu.build import toolchain

    try:
        tools = toolchain()
    except OctavoError as error:
        return [Fact("compiler", "C compiler", str(error), "note")]
    first = tools.version.splitlines()[0]
    return [
        Fact("compiler", "C compiler", f"{first} ({' '.join(tools.compiler)})"),
        Fact("compiler", "OpenMP", tools.openmp),
    ]


def device_facts() -> list[Fact]:
    """GPUs, their driver, and what torch makes of them."""
    driver = Path("/proc/driver/nvidia/version")
    facts = []
    if driver.exists():
        facts.append(Fact("devices", "NVIDIA driver", driver.read_text().splitlines()[0].strip()))
    else:
        facts.append(Fact("devices", "NVIDIA driver", "none"))
    facts += [Fact("devices", f"GPU {line.partition(',')[0]}", line) for line in _nvidia_smi()]
    if importlib.util.find_spec("torch") is None:
        return facts
    import torch

    if torch.version.cuda is None:
        state: State = "note" if driver.exists() else "ok"
        facts.append(Fact("devices", "torch", f"{torch.__version__}, built without CUDA", state))
    elif not torch.cuda.is_available():
        text = f"{torch.__version__} for CUDA {torch.version.cuda}, finds no device"
        facts.append(Fact("devices", "torch", text, "note" if driver.exists() else "ok"))
    else:
        facts.append(Fact("devices", "torch", f"{torch.__version__} for CUDA {torch.version.cuda}"))
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            major, minor = torch.cuda.get_device_capability(index)
            facts.append(
                Fact(
                    "devices",
                    f"cuda:{index}",
                    f"{torch.cuda.get_device_name(index)}, capability {major}.{minor}, "
                    f"{size(free)} of {size(total)} free",
                )
            )
    return facts


def _nvidia_smi() -> list[str]:
    """What the driver's tool says of each device; nothing where it is absent or hangs."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = "--query-gpu=index,name,driver_version,memory.total,compute_cap"
    try:
        done = subprocess.run(
            [command, query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def package_facts() -> list[Fact]:
    """Versions of what Octavo needs and can use."""
    facts = []
    for module in REQUIRED:
        version = _version(_DISTRIBUTIONS.get(module, module), module)
        state: State = "ok" if version else "bad"
        facts.append(Fact("packages", module, version or "not installed", state))
    for module, distribution in OPTIONAL.items():
        version = _version(distribution, module)
        facts.append(Fact("packages", module, version or "not installed (optional)"))
    return facts


def _version(distribution: str, module: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def cache_facts() -> list[Fact]:
    """Where converted weights and compiled kernels go."""
    try:
        folder = envvars.CACHE_DIR.get()
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except (OctavoError, OSError) as error:
        return [Fact("caches", envvars.CACHE_DIR.name, str(error), "bad")]
    if not os.access(folder, os.W_OK):
        return [Fact("caches", envvars.CACHE_DIR.name, f"{folder} cannot be written", "bad")]
    state: State = "ok" if free > LEAST_DISK else "note"
    return [Fact("caches", envvars.CACHE_DIR.name, f"{folder}, {size(free)} free", state)]


def all_facts() -> list[Fact]:
    """Of every section."""
    return [
        *machine_facts(),
        *compiler_facts(),
        *device_facts(),
        *package_facts(),
        *cache_facts(),
    ]


def as_dicts(facts: list[Fact]) -> list[dict[str, Any]]:
    """As plain data."""
    return [vars(fact) for fact in facts]
