"""The sides of a comparison: engines in processes of their own, servers started here, servers that
run already. All are asked for the same things."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from octavo.bench.child import Child, ChildError
from octavo.bench.compare.engine_child import call_dict
from octavo.bench.compare.rounds import round_data
from octavo.bench.load.http import HttpClient, HttpError
from octavo.bench.load.openai import (
    COMPLETIONS,
    Target,
    probe_vocabulary,
    run_calls,
    wait_ready,
)
from octavo.bench.server_process import ServerProcess
from octavo.bench.slo import Slo
from octavo.bench.workloads.calls import Call
from octavo.core.errors import OctavoError

OnTokens = Callable[[int], object]
PATIENCE_S = 30.0
"""Seconds that a running server gets to generate its first token."""


class SideError(OctavoError):
    """A side could not start, or broke; names it."""


class Side(ABC):
    """name: short and unique among the sides. facts: set by `start`; `vocab_size` is None for a
    server that takes text only."""

    name: str
    facts: dict[str, Any]

    @abstractmethod
    def start(self) -> None:
        """Be ready for rounds. Raises `SideError`."""

    @abstractmethod
    def round(
        self, calls: Sequence[Call], concurrency: int | None, slo: Slo, on_tokens: OnTokens
    ) -> dict[str, Any]:
        """Run a workload: `round_data`, and what else the side knows."""

    @abstractmethod
    def greedy(self, calls: Sequence[Call], top: int) -> list[dict[str, Any]]:
        """Per prompt `tokens`, and `top`: for each position (token, log probability), best
        first."""

    @abstractmethod
    def sample(self, calls: Sequence[Call], count: int, seed: int) -> list[dict[str, int]]:
        """Per prompt, how often each token came first of `count` draws."""

    @abstractmethod
    def close(self) -> None:
        """End what was started. More than one call is harmless."""


class EngineSide(Side):
    """An engine of a YAML file in a child process."""

    def __init__(self, name: str, file: str, overrides: Sequence[str] = ()) -> None:
        self.name, self.facts = name, {}
        self._file, self._overrides = file, list(overrides)
        self._child: Child | None = None
        self._errors: Any = None

    def start(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._child = Child("octavo.bench.compare.engine_child", output=self._errors)
        self.facts = self._ask("start", file=self._file, overrides=self._overrides)
        self.facts |= {"kind": "engine", "file": self._file}

    def _ask(self, do: str, on_tokens: OnTokens = lambda count: None, **given: Any) -> Any:
        assert self._child is not None, "it was started"
        try:
            return self._child.ask({"do": do, **given}, on_tokens)
        except ChildError as error:
            raise SideError(f"{self.name}: {error}") from None
        except EOFError:
            end = self._last_words()
            raise SideError(f"{self.name}: the engine's process ended with {end}") from None

    def _last_words(self) -> str:
        assert self._child is not None, "it was started"
        how = self._child.how_it_ended()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-3:]
        return how + (f": {' '.join(last)}" if last else "")

    def round(
        self, calls: Sequence[Call], concurrency: int | None, slo: Slo, on_tokens: OnTokens
    ) -> dict[str, Any]:
        given = [call_dict(call) for call in calls]
        limits = {"ttft": slo.ttft, "itl": slo.itl, "e2e": slo.e2e}
        data: dict[str, Any] = self._ask(
            "round", on_tokens, calls=given, concurrency=concurrency, slo=limits
        )
        return data

    def greedy(self, calls: Sequence[Call], top: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask(
            "greedy", calls=list(map(call_dict, calls)), top=top
        )
        return found

    def sample(self, calls: Sequence[Call], count: int, seed: int) -> list[dict[str, int]]:
        given = list(map(call_dict, calls))
        found: list[dict[str, int]] = self._ask("sample", calls=given, count=count, seed=seed)
        return found

    def close(self) -> None:
        if self._child is not None:
            # The process is in a session of its own: Ctrl-C has not reached it.
            interrupted = isinstance(sys.exception(), KeyboardInterrupt)
            self._child.close(patience_s=0 if interrupted else 30)
            self._child = None
            self._errors.close()


class ServerSide(Side):
    """A server: one that runs at `url`, or one that is started from a YAML file."""

    def __init__(
        self,
        name: str,
        *,
        url: str | None = None,
        file: str | None = None,
        overrides: Sequence[str] = (),
        model: str | None = None,
        api_key: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.name, self.facts = name, {}
        self._url, self._file, self._overrides = url, file, tuple(overrides)
        self._model, self._api_key, self._vocab_size = model, api_key, vocab_size
        self._server: ServerProcess | None = None
        self._runner: asyncio.Runner | None = None
        self._client: HttpClient | None = None

    def start(self) -> None:
        if self._file is not None:
            self._server = ServerProcess(file=self._file, overrides=self._overrides)
            self._url = self._server.url
        assert self._url is not None, "a server has a url or a file"
        self._runner = asyncio.Runner()
        self._client = HttpClient(self._url, api_key=self._api_key)
        try:
            listed, path = self._runner.run(wait_ready(self._client, PATIENCE_S))
            model = self._model or listed
            vocab_size = self._vocab_size
            if vocab_size is None and path == COMPLETIONS:
                vocab_size = self._runner.run(probe_vocabulary(self._client, model))
        except OctavoError as error:
            raise SideError(f"{self.name}: {error}") from None
        self._target = Target(self._client, model, path, tokens=vocab_size is not None)
        self.facts = {"vocab_size": vocab_size, "kind": "server", "url": self._url, "model": model}
        if self._file is not None:
            self.facts |= {"config": _resolved(self._file, self._overrides), "file": self._file}
            del self.facts["url"]

    def _run(self, work: Any) -> Any:
        assert self._runner is not None, "start comes first"
        try:
            return self._runner.run(work)
        except HttpError as error:
            raise SideError(f"{self.name}: {error}") from None

    def round(
        self, calls: Sequence[Call], concurrency: int | None, slo: Slo, on_tokens: OnTokens
    ) -> dict[str, Any]:
        self._reset()
        pids = [] if self._server is None else list(self._server.pids().values())
        for pid in pids:
            with suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")
        answers, seconds = self._run(run_calls(self._target, calls, concurrency, on_tokens))
        data = round_data(answers, seconds, slo)
        if pids:
            data["peak_memory"] = sum(map(_peak, pids))
        return data

    def _reset(self) -> None:
        """An empty prefix cache, where the server has a way to ask for it."""
        assert self._client is not None, "start comes first"
        with suppress(SideError):
            self._run(self._client.json("POST", "/reset_prefix_cache"))

    def greedy(self, calls: Sequence[Call], top: int) -> list[dict[str, Any]]:
        found = []
        for call in calls:
            _, body = self._target.request(call)
            body = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
            body |= {"logprobs": top, "temperature": 0, "return_tokens_as_token_ids": True}
            if "messages" in body:
                body["prompt"] = call.as_text
                del body["messages"]
            assert self._client is not None, "start comes first"
            answer = self._run(self._client.json("POST", COMPLETIONS, body))
            logprobs = answer["choices"][0].get("logprobs") or {}
            tops = [
                sorted(((_token(t), v) for t, v in at.items()), key=lambda pair: -pair[1])
                for at in logprobs.get("top_logprobs") or ()
            ]
            tokens = [_token(t) for t in logprobs.get("tokens") or ()]
            found.append({"tokens": tokens, "top": tops})
        return found

    def sample(self, calls: Sequence[Call], count: int, seed: int) -> list[dict[str, int]]:
        found = []
        for number, call in enumerate(calls):
            _, body = self._target.request(call)
            body = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
            body |= {"max_tokens": 1, "temperature": 1.0, "seed": seed + number, "n": count}
            body |= {"logprobs": 0, "return_tokens_as_token_ids": True}
            assert self._client is not None, "start comes first"
            answer = self._run(self._client.json("POST", COMPLETIONS, body))
            counts: dict[str, int] = {}
            for choice in answer["choices"]:
                names = (choice.get("logprobs") or {}).get("tokens") or [choice["text"]]
                token = str(_token(names[0]))
                counts[token] = counts.get(token, 0) + 1
            found.append(counts)
        return found

    def close(self) -> None:
        if self._runner is not None:
            if self._client is not None:
                self._runner.run(self._client.close())
            self._runner.close()
            self._runner = None
        if self._server is not None:
            self._server.stop()
            self._server = None


def _token(name: str) -> int | str:
    """`token_id:N` as a number; a server that does not know the wish gives texts."""
    return int(name[9:]) if name.startswith("token_id:") else name


def _peak(pid: int) -> int:
    """Largest resident memory of a process since it was last reset."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _resolved(file: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The resolved configuration of a server that was started from a file."""
    from octavo.bench.compare.differences import flat_config
    from octavo.engine.resolve import resolve
    from octavo.frontend.config import load_config
    from octavo.server.command_line.config import registry_from_config

    config = load_config(file, overrides=overrides)
    return flat_config(resolve(config, registry_from_config(config)).config)


def names_of(files: Sequence[str], urls: Sequence[str]) -> list[str]:
    """Short names, distinct: stems of files, hosts of URLs."""
    given = [os.path.splitext(os.path.basename(f))[0] for f in files]
    given += [url.split("//")[-1].rstrip("/") for url in urls]
    return [
        name if given.count(name) == 1 else f"{name} ({number})"
        for number, name in enumerate(given, start=1)
    ]
