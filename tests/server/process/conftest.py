"""`octavo serve` as a process with an engine process, over an executor without a model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
import zmq

from octavo.engine.process import wire
from octavo.engine.process.folder import address
from octavo.testing.model_folder import write_model_folder

RAISE, KILL, HANG = 250, 251, 252
"""Token ids that make the engine break; `DRAW` is what every row samples: the letter a."""


def children(pid: int, word: str) -> list[int]:
    """Processes whose parent is `pid` and whose command line has `word`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text()
            parent = int(status.rpartition(")")[2].split()[1])
            if parent == pid and word in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except (OSError, ValueError):
            continue
    return sorted(found)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


PATIENCE_S = 60.0
"""A limit against hanging, however slow or busy the machine is: no test waits for time to pass."""


def until(condition: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """What `condition` returns once it is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {condition}"
        time.sleep(0.02)
    return value


class Server:
    """A running server. lines: what it has written, both streams."""

    def __init__(self, folder: Path, settings: dict[str, Any], workers: int = 1) -> None:
        # Short: a Unix socket's path has 107 bytes at most.
        self.sockets = Path(tempfile.mkdtemp(prefix="oct-"))
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(settings))
        command = ["serve", "--config", str(file), "--api-workers", str(workers)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo.server.command_line.main", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "XDG_RUNTIME_DIR": str(self.sockets),
                "OMP_NUM_THREADS": "1",
            },
        )
        self.pid = self.process.pid
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def line(self, pattern: str, seconds: float = PATIENCE_S) -> re.Match[str]:
        """Wait for a line of output."""

        def found() -> re.Match[str] | None:
            matches = (re.search(pattern, line) for line in list(self.lines))
            match = next(filter(None, matches), None)
            assert match or self.process.poll() is None or self._reader.is_alive(), self.lines
            return match

        return until(found, seconds)

    def ready(self) -> Server:
        """Wait until it answers requests."""
        self.url = self.line(r"^Octavo is ready on (\S+)$")[1]
        return self

    @property
    def engine(self) -> int:
        """Process id of the engine."""
        return until(lambda: children(self.pid, "engine.process"))[0]

    @property
    def api_workers(self) -> list[int]:
        """Process ids of the API workers, when there are several."""
        return children(self.pid, "api_worker")

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """One request, without a stream."""
        return httpx.post(self.url + path, json={"prompt": "hello", **body}, timeout=60)

    def health(self) -> httpx.Response:
        return httpx.get(f"{self.url}/health", timeout=60)

    def load(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/load", timeout=60).json()

    def metrics(self) -> dict[str, Any]:
        """The engine's own, asked as one more front end."""
        (folder,) = self.sockets.iterdir()
        outgoing, incoming = wire.to_engine(), wire.from_engine()
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(address(folder))
            dealer.send(outgoing.encode(wire.Call(1, "metrics")))
            assert dealer.poll(60_000), "the engine does not answer"
            answer = incoming.decode(dealer.recv())
        assert answer.error is None
        return answer.value

    def ended(self) -> int:
        """Wait for the end; the exit status."""
        status = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return status

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.ended()

    def assert_nothing_left(self, *pids: int) -> None:
        """Neither a process nor a socket folder stays."""
        until(lambda: not any(alive(pid) for pid in pids))
        until(lambda: not list(self.sockets.iterdir()))

    def clean_up(self) -> None:
        pids = [*children(self.pid, "engine.process"), *self.api_workers]
        self.process.kill()
        self.ended()
        assert self.process.stdout is not None
        self.process.stdout.close()
        until(lambda: not any(alive(pid) for pid in pids))
        shutil.rmtree(self.sockets)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"), max_model_len=4096)


def settings(folder: Path, executor: dict[str, Any], **server: Any) -> dict[str, Any]:
    breaks = {"raise_token": RAISE, "kill_token": KILL, "hang_token": HANG}
    return {
        "model": {"source": str(folder), "weight_source": "dummy"},
        "plugins": {"load": ["octavo.testing.instant_executor"]},
        "executor": {"kind": {"name": "instant", **breaks, **executor}},
        "kv_cache": {"num_blocks": 512},
        "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
        "server": {"port": 0, "served_model_name": "m", **server},
    }


@pytest.fixture(scope="session")
def shared(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for tests that leave it as it was. A step takes 20 ms."""
    made = settings(model_folder, {"step_s": 0.02})
    server = Server(tmp_path_factory.mktemp("shared"), made)
    try:
        yield server.ready()
    finally:
        server.clean_up()


@pytest.fixture
def start(model_folder: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """`start(workers=1, executor={...}, **server)`: servers that are cleaned up. source: another
    model folder. more: settings by section."""
    servers: list[Server] = []

    def make(
        workers: int = 1,
        executor: dict[str, Any] | None = None,
        wait: bool = True,
        source: Path = model_folder,
        more: dict[str, dict[str, Any]] | None = None,
        **server: Any,
    ) -> Server:
        place = tmp_path / f"s{len(servers)}"
        place.mkdir()
        made_of = settings(source, {"step_s": 0.02, **(executor or {})}, **server)
        for section, values in (more or {}).items():
            made_of[section] |= values
        made = Server(place, made_of, workers)
        servers.append(made)
        return made.ready() if wait else made

    yield make
    for server in servers:
        server.clean_up()


class Stream:
    """A streaming request in a socket of its own, so that it can be cut at any time."""

    def __init__(self, server: Server, **body: Any) -> None:
        host, port = server.url.removeprefix("http://").rsplit(":", 1)
        data = json.dumps({"prompt": "hello", "max_tokens": 3000, "stream": True, **body}).encode()
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self.socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(data), data)
        )
        self.received = b""

    def until(self, text: bytes) -> bytes:
        """Read until `text` has come."""
        while text not in self.received:
            data = self.socket.recv(65536)
            assert data, f"the connection ended: {self.received[-500:]!r}"
            self.received += data
        return self.received

    def rest(self) -> bytes:
        """Read until the answer has ended."""
        while not self.received.endswith(b"0\r\n\r\n"):
            data = self.socket.recv(65536)
            if not data:
                break
            self.received += data
        return self.received

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def stream() -> Iterator[Callable[..., Stream]]:
    made: list[Stream] = []

    def make(server: Server, **body: Any) -> Stream:
        made.append(Stream(server, **body))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def tools() -> Any:
    """The helpers of this module."""
    return SimpleNamespace(Server=Server, settings=settings, until=until)
