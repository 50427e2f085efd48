"""`octavo serve` as a process; and one with a tiny model of random weights: real scheduling, KV
cache, sampling, and greedy answers that others' mistakes would change."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

from octavo.testing.model_folder import write_model_folder

CONTEXT, BLOCKS = 128, 104
MAX_N, MAX_BODY = 8, 1 << 20
SETTINGS: dict[str, Any] = {
    "model": {"weight_source": {"name": "dummy", "seed": 3}, "dtype": "float32"},
    "executor": {"device": "cpu", "num_threads": 1},
    "kv_cache": {"num_blocks": BLOCKS, "block_size": 16},
    "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 48},
    "routes": ["server_info"],
    "server": {
        "served_model_name": "tiny",
        "max_n": MAX_N,
        "max_logprobs": 5,
        "max_body_bytes": MAX_BODY,
    },
}

CONTROL = {
    "prompt": "the quick brown fox",
    "temperature": 0,
    "max_tokens": 12,
    "ignore_eos": True,
    "return_token_ids": True,
    "logprobs": 1,
}
"""A request whose answer must not change, whatever came before it."""


class ServeProcess:
    """A server with the given arguments, on a free port. lines: what it has written, both
    streams."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "octavo.server.command_line.main",
                "serve",
                "--port",
                "0",
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.lines: list[str] = []
        self.url = ""
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._listening.wait(120)
        if not self.url:
            self.stop()
            raise AssertionError(f"the server did not start: {self.lines}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if found := re.fullmatch(r"Octavo is ready on (http://127\.0\.0\.1:\d+)\n", line):
                self.url = found[1]
                self._listening.set()
        self._listening.set()

    def stop(self) -> int:
        """End it and wait; its exit status."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait(10)
            self._reader.join(10)
            assert self.process.stdout is not None
            self.process.stdout.close()


class RealServer(ServeProcess):
    """Over the tiny model. client: of httpx, with the server's URL as its base."""

    def __init__(self, folder: Path) -> None:
        model = write_model_folder(folder / "model", max_model_len=CONTEXT)
        settings = SETTINGS | {"model": SETTINGS["model"] | {"source": str(model)}}
        self.vocab: int = json.loads((model / "config.json").read_text())["vocab_size"]
        (folder / "engine.yaml").write_text(yaml.safe_dump(settings))
        super().__init__("--config", str(folder / "engine.yaml"))
        self.client = httpx.Client(base_url=self.url, timeout=60)
        self.expected = self._control()

    def _control(self) -> Any:
        answer = self.client.post("/v1/completions", json=CONTROL)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    def check_control(self) -> None:
        """The control request is answered as at the start."""
        assert self.process.poll() is None, self.lines[-20:]
        assert self._control() == self.expected

    def info(self) -> dict[str, Any]:
        """What the route `server_info` says."""
        return self.client.get("/server_info").json()

    def idle(self) -> dict[str, Any]:
        """The engine's metrics, once nothing runs and all blocks are free again."""
        deadline = time.monotonic() + 60
        while True:
            metrics = self.info()["metrics"]
            load = self.client.get("/load").json()["server_load"]
            free = metrics["num_free_blocks"] + metrics["num_evictable_blocks"]
            busy = load + metrics["num_running"] + metrics["num_waiting"]
            if not busy and free == metrics["num_blocks"]:
                return metrics
            assert time.monotonic() < deadline, (load, metrics)
            time.sleep(0.05)

    def rss(self) -> dict[int, int]:
        """Resident bytes of API and engine process."""
        (engine,) = (
            int(folder.name) for folder in Path("/proc").glob("[0-9]*") if self._is_engine(folder)
        )
        pages = {pid: Path(f"/proc/{pid}/statm").read_text() for pid in (self.process.pid, engine)}
        size = os.sysconf("SC_PAGE_SIZE")
        return {pid: int(text.split()[1]) * size for pid, text in pages.items()}

    def _is_engine(self, folder: Path) -> bool:
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            ours = parent == self.process.pid  # so are those that render chat templates
            return ours and b"octavo.engine.process" in (folder / "cmdline").read_bytes()
        except (OSError, ValueError):
            return False

    def stop(self) -> int:
        if hasattr(self, "client"):
            self.client.close()
        return super().stop()
