"""`octavo serve` as a process of its own, for benchmarks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from octavo.core.errors import OctavoError


class ServerError(OctavoError):
    """A server did not start; the message has its last lines."""


class ServerProcess:
    """A server on a free port of this machine. config: nested, as YAML would be; or `file`, with
    `overrides` as for `--set`. wait: until the engine is ready, else only until the port is bound.
    Raises `ServerError` when it does not start."""

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        file: str | None = None,
        overrides: tuple[str, ...] = (),
        wait: bool = True,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-bench-")
        folder = Path(self._folder.name)
        if file is None:
            file = str(folder / "config.json")
            Path(file).write_text(json.dumps(config))  # JSON is YAML
        command = [
            sys.executable,
            "-m",
            "octavo.server.command_line.main",
            "serve",
            "--config",
            file,
        ]
        for override in overrides:
            command += ["--set", override]
        command += ["--host", "127.0.0.1", "--port", "0"]
        self._errors = (folder / "stderr").open("wb")
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        try:
            self.url = self._ready() if wait else self._bound()
        except BaseException:
            self.stop()
            raise

    @property
    def _output(self) -> IO[str]:
        assert self.process.stdout is not None, "it is a pipe"
        return self.process.stdout

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def _ready(self) -> str:
        for line in self._output:
            if line.startswith("Octavo is ready on "):
                return line.split()[-1]
        raise self._failure()

    def _bound(self) -> str:
        """What is written of it: `listening on URL; ...`."""
        while self.process.poll() is None:
            found = re.search(r"listening on (http\S+);", self._said())
            if found:
                return found[1]
            time.sleep(0.02)
        raise self._failure()

    def _said(self) -> str:
        return Path(self._errors.name).read_text(errors="replace")

    def _failure(self) -> ServerError:
        self.process.wait()
        last = self._said().strip().splitlines()[-3:]
        return ServerError(f"the server did not start: {' '.join(last)}")

    def pids(self) -> dict[str, int]:
        """Processes by name: `api` and, while there is one, `engine`."""
        found = {"api": self.process.pid}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == self.process.pid:
                    found["engine"] = int(folder.name)
        return found

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds so far, by process."""
        ticks = os.sysconf("SC_CLK_TCK")
        used = {}
        for name, pid in self.pids().items():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used[name] = (int(fields[11]) + int(fields[12])) / ticks
        return used

    def stop(self) -> None:
        """End it and wait until it has ended. More than one call is harmless."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._output.close()
        self._errors.close()
        self._folder.cleanup()
