"""Grammars are compiled in a process that can be killed, and nobody else notices."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from octavo.core.contracts import NoOptions
from octavo.core.contracts.grammar_engine import GrammarEngineContext
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.plugins.structured_output import compiler as compiler_module
from octavo.plugins.structured_output import wire
from octavo.plugins.structured_output.compiler import GrammarCompiler, Tools
from octavo.plugins.structured_output.extension import StructuredOutput
from octavo.plugins.structured_output.grammars import Grammars
from octavo.testing.fake_engine import (
    Collector,
    assert_clean,
    expected,
    make_fake_engine,
    request,
)
from octavo.testing.regex_grammar import RegexGrammarEngine

from .conftest import VOCAB_SIZE, fake_vocabulary, grammars_of, text_of

ENGINE = '''
import os, signal, time
from octavo.testing.regex_grammar import RegexGrammarEngine


class Misbehaving(RegexGrammarEngine):
    """Does what the pattern says."""

    name = "misbehaving"
    isolated = True

    def compile(self, spec):
        match spec.regex:
            case "sleep":
                time.sleep(3600)
            case "spin":
                while True:
                    pass
            case "eat":
                return bytes(1 << 30)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise KeyError("inside")
            case "big":
                return b"x" * 5000
        return super().compile(spec)
'''


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    file = tmp_path_factory.mktemp("engine") / "misbehaving.py"
    file.write_text(ENGINE)
    vocabulary = fake_vocabulary()
    return wire.Start(
        load=[f"{file}:Misbehaving"],
        disable=[],
        only=None,
        name="misbehaving",
        options={},
        tokens=list(vocabulary.tokens),
        end_token_ids=list(vocabulary.end_token_ids),
        timeout_s=2.0,
        memory_bytes=256 * 2**20,
        processes=2,
        max_bytes=4096,
    )


class Here(RegexGrammarEngine):
    """Its half that loads."""

    ready_to_load = False

    def prepare(self):
        raise AssertionError("the process that compiles is made ready, not this one")

    def prepare_load(self):
        self.ready_to_load = True

    def load(self, data):
        assert self.ready_to_load
        return super().load(data)


def make(start):
    engine = Here(NoOptions(), GrammarEngineContext(fake_vocabulary()))
    return GrammarCompiler(lambda: Tools(engine, start))


@pytest.fixture(scope="module")
def compiler(start):
    made = make(start)
    yield made
    made.close()
    assert made.process_id is None


def results(compiler, *patterns):
    """What came of these, by pattern."""
    for pattern in patterns:
        compiler.submit(StructuredOutputsParams(regex=pattern))
    found = [compiler.results.get(timeout=60) for _ in patterns]
    return {result.spec.regex: result for result in found}


def gone(pid):
    deadline = time.monotonic() + 60
    with contextlib.suppress(OSError):  # no such process any more
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, f"process {pid} is still there"
            time.sleep(0.01)
    return True


def test_what_was_compiled_there_is_used_here(compiler):
    result = results(compiler, "ab[0-9]")["ab[0-9]"]
    matcher = result.grammar.matcher([7])
    assert [matcher.accept(token) for token in (8, 9, 34)] == [True] * 3
    assert matcher.complete
    assert result.size > 0


@pytest.mark.parametrize(
    ("pattern", "words", "fault"),
    [
        ("sleep", "longer than 2 s to compile", False),
        ("spin", "longer than 2 s to compile", False),
        ("eat", "too much memory", False),
        ("die", "ended without a result", False),
        ("big", "5000 bytes, at most 4096", False),
        ("raise", "'Misbehaving' failed: KeyError: 'inside'", True),
        ("[a-", "regex cannot be compiled", False),
    ],
)
def test_what_goes_wrong_is_that_grammars_alone(compiler, pattern, words, fault):
    pid = compiler.process_id
    found = results(compiler, pattern, "abc", "no")
    assert words in found[pattern].error
    assert found[pattern].fault is fault
    assert found["abc"].grammar is not None
    assert found["no"].grammar is not None
    assert compiler.process_id == pid or pid is None


def test_a_slow_grammar_holds_up_no_other(compiler):
    compiler.submit(StructuredOutputsParams(regex="sleep"))
    compiler.submit(StructuredOutputsParams(regex="abc"))
    assert compiler.results.get(timeout=60).spec.regex == "abc"
    assert "longer than" in compiler.results.get(timeout=60).error


def test_a_new_process_takes_the_place_of_one_that_was_killed(compiler):
    results(compiler, "abc")
    first = compiler.process_id
    compiler.submit(StructuredOutputsParams(regex="sleep"))
    os.kill(first, signal.SIGKILL)
    lost = compiler.results.get(timeout=60)
    assert "the process that compiles grammars ended" in lost.error
    assert lost.fault
    assert results(compiler, "abc")["abc"].grammar is not None
    assert compiler.process_id != first
    gone(first)


def test_the_end_of_a_process_costs_the_next_one_nothing(start, monkeypatch):
    """Whoever reads what a process says may come to its end when a new one has a job already."""
    made = queue.SimpleQueue()

    class Silent:
        """Ends and answers when the test says so."""

        def __init__(self, on_answer, on_end):
            self.on_answer, self.on_end, self.ended = on_answer, on_end, False
            self.sent = queue.SimpleQueue()
            self.send = self.sent.put
            made.put(self)

        def job(self):
            assert self.sent.get(timeout=60) is start
            return self.sent.get(timeout=60)

        def close(self):
            self.ended = True

    monkeypatch.setattr(compiler_module, "CompileProcess", Silent)
    compiler = make(start)
    try:
        compiler.submit(StructuredOutputsParams(regex="a"))
        first = made.get(timeout=60)
        assert first.job().spec.regex == "a"
        first.ended = True
        compiler.submit(StructuredOutputsParams(regex="b"))
        second = made.get(timeout=60)
        job = second.job()
        first.on_end("ended with status 1")
        second.on_answer(wire.Compiled(job.id, RegexGrammarEngine.compile(None, job.spec)))
        lost, found = (compiler.results.get(timeout=60) for _ in range(2))
    finally:
        compiler.close()
    assert (lost.spec.regex, lost.fault) == ("a", True)
    assert (found.spec.regex, found.error) == ("b", None)
    assert found.grammar is not None


def test_an_engine_that_cannot_be_made_there(start):
    compiler = make(msgspec.structs.replace(start, name="zork"))
    try:
        for _ in range(2):
            assert "there is no grammar_engine 'zork'" in results(compiler, "abc")["abc"].error
    finally:
        compiler.close()


def test_it_ends_with_its_parent(start, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, time\n"
        "import msgspec\n"
        "from octavo.plugins.structured_output import wire\n"
        "from octavo.plugins.structured_output.compile_process import CompileProcess\n"
        "start = wire.to_compiler.decode(open(sys.argv[1], 'rb').read())\n"
        "answers = []\n"
        "process = CompileProcess(answers.append, print)\n"
        "process.send(start)\n"
        "process.send(wire.Job(1, wire.StructuredOutputsParams(regex='sleep')))\n"
        "process.send(wire.Job(2, wire.StructuredOutputsParams(regex='abc')))\n"
        "while not answers:\n"
        "    time.sleep(0.01)\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(3600)\n"
    )
    data = tmp_path / "start"
    data.write_bytes(wire.encode(msgspec.structs.replace(start, timeout_s=600.0)))
    with subprocess.Popen(
        [sys.executable, str(script), str(data)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as parent:
        pid = int(parent.stdout.readline())
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert len(children) == 1
        parent.kill()
    assert gone(pid)
    assert gone(children[0])


def test_what_nobody_waits_for_any_more_is_left(start):
    compiler = make(msgspec.structs.replace(start, timeout_s=600.0, processes=1))
    specs = [StructuredOutputsParams(regex=regex) for regex in ("sleep", "a", "b", "c")]
    try:
        for spec in specs:
            compiler.submit(spec)
        for spec in specs:
            compiler.drop(spec)
        found = [compiler.results.get(timeout=60) for _ in specs[1:]]
    finally:
        compiler.close()
    assert [result.spec for result in found] == specs[1:]
    assert all(result.dropped and result.grammar is result.error is None for result in found)


def test_who_leaves_holds_up_nobody_and_who_comes_back_is_served(start):
    grammars = Grammars(make(msgspec.structs.replace(start, processes=1)))
    core = make_fake_engine(extensions=[StructuredOutput(grammars, VOCAB_SIZE)])
    core.add(request(1, [1, 2], structured_outputs={"regex": "sleep"}))
    for handle in (2, 3):
        core.add(request(handle, [1, 2], structured_outputs={"regex": "abc1"}))
    core.abort([2])
    core.abort([3])
    core.add(request(4, [1, 2], structured_outputs={"regex": "abc1"}))
    collector = Collector(core).run(limit=100_000)
    assert collector.reasons == {1: "error", 2: "abort", 3: "abort", 4: "stop"}
    assert text_of(collector.tokens[4]) == "abc1"
    assert grammars_of(core).pending == 0
    assert_clean(core)
    core.close()


def test_other_requests_go_on_while_a_grammar_is_compiled_and_killed(start):
    core = make_fake_engine(extensions=[StructuredOutput(Grammars(make(start)), VOCAB_SIZE)])
    control = [request(h, [h, 2, 3], 20, ignore_eos=True) for h in range(1, 4)]
    core.add(request(10, [1, 2], structured_outputs={"regex": "spin"}))
    core.add(request(11, [1, 2], structured_outputs={"regex": "abc1"}))
    for req in control:
        core.add(req)
    collector = Collector(core)
    while not {req.handle for req in control} <= set(collector.reasons):
        collector.step()
    assert 10 not in collector.reasons
    assert {req.handle: collector.tokens[req.handle] for req in control} == {
        req.handle: expected(req) for req in control
    }
    collector.run(limit=100_000)
    assert text_of(collector.tokens[11]) == "abc1"
    assert "longer than 2 s" in collector.errors[10]
    assert_clean(core)
    core.close()
