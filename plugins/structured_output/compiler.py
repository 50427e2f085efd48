"""`GrammarCompiler`: specifications in, grammars out, beside the step loop."""

from __future__ import annotations

import functools
import itertools
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.contracts.grammar_engine import Grammar, GrammarEngine
from octavo.core.errors import OctavoError, RequestError
from octavo.core.structured_outputs import PARAM, StructuredOutputsParams
from octavo.plugins.structured_output import wire
from octavo.plugins.structured_output.compile_process import Answer, CompileProcess

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Result:
    """Either a grammar, with the number of bytes that it was loaded from, or an error, or neither
    when compilation was dropped. fault: whether the error is not the specification's."""

    spec: StructuredOutputsParams
    grammar: Grammar | None = None
    size: int = 0
    error: str | None = None
    fault: bool = False
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class _Drop:
    spec: StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class Tools:
    """What compiling takes. start: the first message to the process that compiles; None when the
    engine compiles in this one."""

    engine: GrammarEngine
    start: wire.Start | None


class GrammarCompiler:
    """make_tools: called once, on a thread of its own, with the first specification (or by
    `preload`); what it raises is the error of every specification.

    Results come to `results`, in any order, one a `submit`.
    """

    def __init__(self, make_tools: Callable[[], Tools]) -> None:
        self.results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._make_tools = make_tools
        self._jobs: queue.SimpleQueue[StructuredOutputsParams | _Drop | None] = queue.SimpleQueue()
        # By job: the process that has it (by number, from 1), and what it compiles.
        self._open: dict[int, tuple[int, StructuredOutputsParams]] = {}
        self._spawned = 0
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process: CompileProcess | None = None
        self._broken: str | None = None
        self._closed = False

    def preload(self) -> None:
        """Start what compiles now."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="octavo-grammar", daemon=True)
            self._thread.start()

    def submit(self, spec: StructuredOutputsParams) -> None:
        """Compile a specification."""
        self.preload()
        self._jobs.put(spec)

    def drop(self, spec: StructuredOutputsParams) -> None:
        """Nobody waits for a specification that was submitted. It comes to `results` all the same:
        dropped, or with what became of it when it had begun."""
        self._jobs.put(_Drop(spec))

    def close(self) -> None:
        """Stop; nothing more comes to `results`. More than one call is harmless."""
        with self._lock:
            self._closed = True
            process = self._process
        self._jobs.put(None)
        if process is not None:
            process.close()
        if self._thread is not None:
            self._thread.join()

    @property
    def process_id(self) -> int | None:
        """Of the process that compiles, while there is one."""
        return None if self._process is None or self._process.ended else self._process.pid

    # ---- on the compiler's thread ----------------------------------------------------------------

    def _run(self) -> None:
        tools: Tools | None = None
        problem = ""
        try:
            tools = self._make_tools()
            if tools.start is not None:
                self._spawn(tools, tools.start)
            else:
                tools.engine.prepare()
            if not self._closed:
                tools.engine.prepare_load()  # meanwhile the process that compiles starts
        except Exception as error:
            if not isinstance(error, OctavoError):
                logger.exception("the grammar engine cannot be made")
            tools, problem = None, f"the grammar engine cannot be made: {error}"
        while (spec := self._jobs.get()) is not None:
            if isinstance(spec, _Drop):
                self._leave(spec.spec)
            elif tools is None:
                self._refuse(spec, problem, fault=True)
            elif tools.start is None:
                self._here(tools.engine, spec)
            else:
                self._there(tools, tools.start, spec)

    def _here(self, engine: GrammarEngine, spec: StructuredOutputsParams) -> None:
        try:
            data = engine.compile(spec)
        except Exception as error:
            self._refuse(spec, *_message(engine, error))
        else:
            self._load(engine, spec, data)

    def _there(self, tools: Tools, start: wire.Start, spec: StructuredOutputsParams) -> None:
        if self._broken is not None:
            self._refuse(spec, self._broken, fault=True)
            return
        if self._process is None or self._process.ended:
            self._spawn(tools, start)
        process, number = self._process, next(self._ids)
        if process is None:  # closed meanwhile
            return
        spawned = self._spawned
        with self._lock:
            self._open[number] = spawned, spec
        process.send(wire.Job(number, spec))
        if process.ended:  # it ended before it saw the job, and may have said so already
            self._ended(spawned, "ended")

    def _leave(self, spec: StructuredOutputsParams) -> None:
        with self._lock:
            numbers = [number for number, (_, each) in self._open.items() if each == spec]
        for number in numbers:
            if self._process is not None:
                self._process.send(wire.Drop(number))

    def _spawn(self, tools: Tools, start: wire.Start) -> None:
        def answered(answer: Answer) -> None:
            self._answered(tools.engine, answer)

        with self._lock:
            if self._closed:
                return
            self._spawned += 1
            ended = functools.partial(self._ended, self._spawned)
            process = self._process = CompileProcess(answered, ended)
        process.send(start)

    # ---- on the thread that reads the process's answers ------------------------------------------

    def _answered(self, engine: GrammarEngine, answer: Answer) -> None:
        if isinstance(answer, wire.Broken):
            self._broken = f"{PARAM}: the grammar engine cannot be made: {answer.message}"
            logger.error("%s", self._broken)
            return
        with self._lock:
            _, spec = self._open.pop(answer.id)
        if isinstance(answer, wire.Compiled):
            self._load(engine, spec, answer.data)
        elif isinstance(answer, wire.Dropped):
            self.results.put(Result(spec, dropped=True))
        else:
            self._refuse(spec, answer.message, fault=answer.fault)

    def _ended(self, spawned: int, how: str) -> None:
        """A process has ended. What a later one has got since then is not lost."""
        with self._lock:
            lost = [job for job, (number, _) in self._open.items() if number == spawned]
            specs = [self._open.pop(job)[1] for job in lost]
            closed = self._closed
        if closed:
            return
        if self._broken is None:
            logger.warning("the process that compiles grammars %s", how)
        for spec in specs:
            text = f"{PARAM}: the process that compiles grammars {how}"
            self._refuse(spec, self._broken or text, fault=True)

    # ---- results ---------------------------------------------------------------------------------

    def _load(self, engine: GrammarEngine, spec: StructuredOutputsParams, data: bytes) -> None:
        try:
            grammar = engine.load(data)
        except Exception as error:
            self._refuse(spec, *_message(engine, error))
        else:
            self.results.put(Result(spec, grammar, len(data)))

    def _refuse(self, spec: StructuredOutputsParams, message: str, fault: bool = False) -> None:
        self.results.put(Result(spec, error=message, fault=fault))


def _message(engine: GrammarEngine, error: Exception) -> tuple[str, bool]:
    """For the caller, and whether it is the engine's fault."""
    if isinstance(error, RequestError):
        return error.message, False
    name = type(engine).__name__
    return f"{PARAM}: grammar engine '{name}' failed: {type(error).__name__}: {error}", True
