"""What became of the GPU tests: each failure when it happens, a table last, whatever happens.

An error of the device (an address outside of memory, a failed assertion of a kernel) leaves a
process nothing but errors. The tests that have not run yet then go on in a new one, which takes the
place of this one; likewise after a test that takes too long, as one that hangs in the driver does.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict

import pytest

WIDTH = 100
GRACE_S = 20.0
"""After the time limit: for the test that runs when it ends."""
MOST_RESTARTS = 8
RESUME = "OCTAVO_GPU_TESTS_RESUME"
"""Where the file of the process before is. No option: pytest would look for tests beside it."""


def _gpu(nodeid):
    return "gpu/" in nodeid


class Outcome:
    """A plugin of pytest. What it knows travels to the next process by a file."""

    def __init__(self, config):
        self._config = config
        self._results = defaultdict(Counter)
        self._failures, self._skips = {}, {}
        self._done, self._restarts = [], 0
        self._started = time.monotonic()  # the machine's: the next process knows it too
        self._running, self._since = None, 0.0
        self._lost = None
        self._terminal = os.dup(1)  # not what pytest puts in its place while a test runs
        self._over = threading.Event()
        self._resume(os.environ.pop(RESUME, None))
        self._interrupt = signal.signal(signal.SIGTERM, signal.default_int_handler)
        self._watch = threading.Thread(target=self._watched, daemon=True)
        self._watch.start()

    # ---- from one process to the next -----------------------------------------------------------

    def _resume(self, file):
        if not file:
            return
        with open(file) as stream:
            state = json.load(stream)
        os.unlink(file)
        for name, counts in state["results"].items():
            self._results[name].update(counts)
        self._failures, self._skips = state["failures"], state["skips"]
        self._done, self._started = state["done"], state["started"]
        self._restarts = state["restarts"] + 1

    def _go_on(self, why):
        """The tests that are left run in a new process in place of this one."""
        self._say(f"\n{why}: the other tests go on in a new process")
        state = {
            "results": self._results,
            "failures": self._failures,
            "skips": self._skips,
            "done": self._done,
            "started": self._started,
            "restarts": self._restarts,
        }
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as stream:
            json.dump(state, stream)
        given = self._config.invocation_params
        os.environ[RESUME] = stream.name
        os.chdir(given.dir)
        signal.setitimer(signal.ITIMER_REAL, 0)  # pytest-timeout's would end the next process
        os.dup2(self._terminal, 1)
        os.closerange(3, 4096)  # the driver's files too: the device forgets this process
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *map(str, given.args)])

    def _say(self, text):
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.flush()
        os.write(self._terminal, f"{text}\n".encode())

    # ---- while tests run ------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        done = set(self._done)
        gone = [item for item in items if item.nodeid in done]
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item.nodeid not in done]

    def pytest_runtest_setup(self, item):
        limit = self._config.getoption("gpu_seconds")
        if item.path.parent.name == "gpu" and time.monotonic() - self._started > limit:
            pytest.skip(f"the {limit:.0f} s of --gpu-seconds are over")

    def pytest_runtest_logstart(self, nodeid):
        self._since, self._running = time.monotonic(), nodeid

    def pytest_runtest_logreport(self, report):
        if not _gpu(report.nodeid) or (report.when != "call" and report.outcome == "passed"):
            return
        name, _, case = report.nodeid.rpartition("::")[2].partition("[")
        self._results[name][report.outcome] += 1
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            self._failed(name, case, crash.message if crash else "")
            self._say(f"\n{str(report.longrepr)[-3000:]}")
            self._lost = self._lost or _lost_device()
        elif report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            self._skips.setdefault(name, report.longrepr[2].removeprefix("Skipped: "))

    def _failed(self, name, case, message):
        message = " ".join(message.split())
        message = f"[{case} {message}" if case else message
        self._failures.setdefault(name, message)
        self._say(f"\nFAILED after {self._seconds():.0f} s: {name} {message}"[:400])

    def pytest_runtest_logfinish(self, nodeid):
        self._running = None
        self._done.append(nodeid)
        if self._lost and self._restarts < MOST_RESTARTS:
            self._go_on(f"the device is lost ({self._lost})")

    def _seconds(self):
        return time.monotonic() - self._started

    def _watched(self):
        """In a thread of its own, which runs while another waits for the device."""
        whole = self._config.getoption("gpu_seconds") + GRACE_S
        each = self._config.getoption("gpu_test_seconds")
        while not self._over.wait(0.5):
            running = self._running
            if running is None or not _gpu(running):
                continue
            taken = time.monotonic() - self._since
            late = self._seconds() > whole
            if not late and taken <= each:
                continue
            faulthandler.dump_traceback(self._terminal)
            name, _, case = running.rpartition("::")[2].partition("[")
            self._results[name]["failed"] += 1
            self._failed(name, case, f"ran for {taken:.0f} s and did not end")
            self._done.append(running)
            if late or self._restarts >= MOST_RESTARTS:
                self._say("\n".join(self._table()))
                os._exit(1)
            self._go_on("a test takes too long")

    # ---- at the end -----------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        self._over.set()
        passed = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if self._failures and session.exitstatus in passed:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED  # of a process before

    def pytest_unconfigure(self, config):
        """After everything that pytest itself says."""
        self._over.set()
        self._watch.join()
        signal.signal(signal.SIGTERM, self._interrupt)
        if self._results:
            self._say("\n".join(self._table()))
        os.close(self._terminal)

    def _table(self):
        rehearsing = self._config.getoption("gpu_device") == "cpu"
        where = _device_name() or ("a CPU (rehearsal)" if rehearsing else None)
        if where is None:
            return ["no CUDA device is here: tests/gpu was skipped"]
        lines = ["=" * WIDTH]
        for name, counts in self._results.items():
            skipped = name in self._skips and not counts["passed"] and not counts["failed"]
            why = f": {self._skips[name]}" if skipped else ""
            lines.append(f"{name:<50} {_counts(counts)}{why}"[:WIDTH])
            if name in self._failures:
                lines.append(f"  {self._failures[name]}"[:WIDTH])
        import torch

        total = sum(self._results.values(), Counter())
        lines.append(
            f"{where}, torch {torch.__version__}: {_counts(total)}, {self._seconds():.0f} s"
        )
        return lines


def _counts(counts):
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count)


def _device_name():
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _lost_device():
    """Why the device is of no use to this process any more; None: it still is."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        torch.cuda.synchronize()
    except Exception as error:
        return str(error).partition("\n")[0]
    return None
