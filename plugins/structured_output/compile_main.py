"""`python -m octavo.plugins.structured_output.compile_main FD PARENT` compiles grammars.

It makes the grammar engine once, which is slow, and forks a child for every grammar, which is
fast: so a grammar that takes too long or too much memory is killed alone, at no cost for the next.
It has one thread, and nothing to do but to pass on answers and to watch the clock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait

from octavo.core.contracts.grammar_engine import (
    GrammarEngine,
    GrammarEngineContext,
    GrammarVocabulary,
)
from octavo.core.errors import OctavoError, RequestError
from octavo.core.structured_outputs import PARAM
from octavo.kernels import end_with_parent, ignore_signals, limit_memory
from octavo.plugins.structured_output import wire

NICENESS = 10
"""Children give way to the engine."""


@dataclass
class _Child:
    job: wire.Job
    pid: int
    answer: Connection
    deadline: float


def main(fd: int, parent: int) -> int:
    """Until the other end closes the connection."""
    ignore_signals()
    end_with_parent(parent)
    connection = Connection(fd)
    with contextlib.suppress(EOFError, OSError):
        start = wire.to_compiler.decode(connection.recv_bytes())
        assert isinstance(start, wire.Start), "the first message says what to start"
        try:
            engine = make_engine(start)
        except Exception as error:
            text = str(error)
            if not isinstance(error, OctavoError):
                text = f"{type(error).__name__}: {error}"
            connection.send_bytes(wire.encode(wire.Broken(text)))
            return 1
        Compiling(connection, start, engine).run()
    return 0


def make_engine(start: wire.Start) -> GrammarEngine:
    """The grammar engine, ready to compile."""
    from octavo.core.config.models import ImplementationConfig
    from octavo.core.registry import Registry

    registry = Registry.discover(load=start.load, disable=start.disable, only=start.only)
    choice = ImplementationConfig(name=start.name, options=start.options)
    vocabulary = GrammarVocabulary(tuple(start.tokens), tuple(start.end_token_ids))
    engine: GrammarEngine = registry.create(
        registry.select("grammar_engine", choice), GrammarEngineContext(vocabulary)
    )
    engine.prepare()
    return engine


class Compiling:
    """Jobs in, children beside each other, answers out."""

    def __init__(self, connection: Connection, start: wire.Start, engine: GrammarEngine) -> None:
        self._connection, self._start, self._engine = connection, start, engine
        self._pid = os.getpid()
        self._waiting: deque[wire.Job] = deque()
        self._children: dict[Connection, _Child] = {}

    def run(self) -> None:
        try:
            while True:
                ready = wait([self._connection, *self._children], self._patience())
                for connection in ready:
                    if connection is self._connection:
                        self._take()
                    else:
                        self._finish(connection)  # type: ignore[arg-type]
                self._kill_late_ones()
                while self._waiting and len(self._children) < self._start.processes:
                    self._fork(self._waiting.popleft())
        finally:
            for child in self._children.values():
                _kill(child.pid)

    def _patience(self) -> float | None:
        if not self._children:
            return None
        first = min(child.deadline for child in self._children.values())
        return max(0.0, first - time.monotonic())

    def _take(self) -> None:
        match wire.to_compiler.decode(self._connection.recv_bytes()):
            case wire.Job() as job:
                self._waiting.append(job)
            case wire.Drop(id=number):
                for job in [job for job in self._waiting if job.id == number]:
                    self._waiting.remove(job)
                    self._connection.send_bytes(wire.encode(wire.Dropped(number)))
            case wire.Start():
                raise AssertionError("the start comes once")

    def _fork(self, job: wire.Job) -> None:
        answer, childs_end = Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self._be_child(job, childs_end)
                status = 0
            finally:
                os._exit(status)
        childs_end.close()
        deadline = time.monotonic() + self._start.timeout_s
        self._children[answer] = _Child(job, pid, answer, deadline)

    def _be_child(self, job: wire.Job, answer: Connection) -> None:
        end_with_parent(self._pid)  # one that outlives it would compile for nobody
        self._connection.close()
        for connection in self._children:
            connection.close()
        with contextlib.suppress(OSError):
            os.nice(NICENESS)
        limit_memory(self._start.memory_bytes)
        answer.send_bytes(wire.encode(compile_one(self._engine, job, self._start.max_bytes)))

    def _finish(self, connection: Connection) -> None:
        child = self._children.pop(connection)
        try:
            data = connection.recv_bytes()
        except (EOFError, OSError):
            _kill(child.pid)
            message = (
                f"{PARAM}: the grammar cannot be compiled: its compilation ended without a result, "
                "probably for lack of memory (structured_outputs.compile_memory_bytes)"
            )
            data = wire.encode(wire.Refused(child.job.id, message))
        else:
            _kill(child.pid)
        connection.close()
        self._connection.send_bytes(data)

    def _kill_late_ones(self) -> None:
        now = time.monotonic()
        for connection, child in list(self._children.items()):
            if child.deadline <= now and not connection.poll():
                del self._children[connection]
                _kill(child.pid)
                connection.close()
                message = (
                    f"{PARAM}: the grammar takes longer than {self._start.timeout_s:g} s to compile"
                    " (structured_outputs.compile_timeout_s): simplify it"
                )
                self._connection.send_bytes(wire.encode(wire.Refused(child.job.id, message)))


def compile_one(
    engine: GrammarEngine, job: wire.Job, max_bytes: int
) -> wire.Compiled | wire.Refused:
    """The answer to a job; never raises."""
    try:
        data = engine.compile(job.spec)
        if len(data) > max_bytes:
            return wire.Refused(
                job.id,
                f"{PARAM}: the compiled grammar has {len(data)} bytes, at most {max_bytes} are "
                "taken (structured_outputs.max_grammar_bytes): simplify it",
            )
        return wire.Compiled(job.id, data)
    except RequestError as error:
        return wire.Refused(job.id, error.message)
    except MemoryError:
        return wire.Refused(job.id, f"{PARAM}: the grammar takes too much memory to compile")
    except Exception as error:
        if "bad_alloc" in str(error):  # what C++ says for MemoryError
            return wire.Refused(job.id, f"{PARAM}: the grammar takes too much memory to compile")
        name = type(engine).__name__
        return wire.Refused(
            job.id,
            f"{PARAM}: grammar engine '{name}' failed: {type(error).__name__}: {error}",
            fault=True,
        )


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
