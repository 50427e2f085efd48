"""Structured output in the step loop: a fake worker, and the reference grammar engine."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from octavo.core.contracts import NoOptions
from octavo.core.contracts.grammar_engine import GrammarEngineContext, GrammarVocabulary
from octavo.core.contracts.logits_processor import AttachedRequest
from octavo.core.errors import RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.plugins.structured_output.compiler import GrammarCompiler, Tools
from octavo.plugins.structured_output.extension import StructuredOutput
from octavo.plugins.structured_output.grammars import REMEMBERED_S, Grammars
from octavo.plugins.structured_output.processor import GrammarProcessor
from octavo.testing.fake_engine import (
    EOS,
    Collector,
    assert_clean,
    expected,
    make_fake_engine,
    request,
)
from octavo.testing.regex_grammar import RegexGrammarEngine
from octavo.testing.step_log import StepLog

from .conftest import VOCAB_SIZE, grammars_of, text_of

PATTERN = r"[a-c]{2,5}\d{1,3}( no| yes)?"


def constrained(handle, tokens, max_tokens=20, *, regex=PATTERN, **more):
    return request(handle, tokens, max_tokens, structured_outputs={"regex": regex}, **more)


def output(collector, handle):
    tokens = collector.tokens[handle]
    assert EOS not in tokens[:-1], "the end token only ends"
    return text_of(tokens)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"num_blocks": 26, "max_num_seqs": 8},
        {"num_blocks": 26, "preemption": "swap", "num_swap_blocks": 40},
        {"budget": 8},
        {"manager": "radix"},
        {"manager": "none"},
    ],
    ids=["plain", "recompute", "swap", "chunks", "radix", "no prefix cache"],
)
def test_outputs_keep_to_their_grammar_and_others_do_not_change(structured, engine, in_flight):
    core = make_fake_engine(extensions=[structured()], in_flight=in_flight, **engine)
    free = [request(h, [h, 2, 3] * 5, 20, ignore_eos=True) for h in range(1, 6)]
    bound = [constrained(h, [h, 2, 3] * 5, regex=rf"[a-c]{{{h},60}}\d\d") for h in range(11, 17)]
    several = [
        constrained(21 + i, [9, 9, 9, 9, 9], parent=21 if i else None, index=i) for i in range(3)
    ]
    for req in [*free, *bound, *several]:
        core.add(req)
    collector = Collector(core).run()
    for req in free:
        assert collector.tokens[req.handle] == expected(req)
    for req in [*bound, *several]:
        text = output(collector, req.handle)
        pattern = req.sampling.structured_outputs.regex
        if collector.reasons[req.handle] == "stop":
            assert re.fullmatch(pattern, text), text
        else:
            assert collector.reasons[req.handle] == "length"
            assert len(collector.tokens[req.handle]) == 20
            assert set(text) <= set("abc0123456789 noyes")
    if "num_blocks" in engine:
        assert core.scheduler.num_preemptions > 0
    assert not grammars_of(core)._users
    assert_clean(core)


def test_stop_tokens_end_where_the_grammar_may_end(structured):
    core = make_fake_engine(extensions=[structured()])
    core.add(constrained(1, [1, 2], regex="a{3}b*", stop_token_ids=[50]))
    collector = Collector(core).run()
    assert collector.reasons[1] == "stop"
    assert re.fullmatch("a{3}b*", text_of([t for t in collector.tokens[1] if t not in (EOS, 50)]))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_complete_output_ends_without_an_end_token(structured, in_flight):
    core = make_fake_engine(extensions=[structured()], in_flight=in_flight)
    no_end = constrained(1, [1, 2], regex="abc1")
    no_end.eos_token_ids = []
    core.add(no_end)
    core.add(constrained(2, [1, 3], regex="abc1", min_tokens=10))
    core.add(request(3, [1, 4], 20, ignore_eos=True))
    collector = Collector(core).run()
    assert [collector.reasons[h] for h in (1, 2)] == ["stop", "stop"]
    assert [text_of(collector.tokens[h]) for h in (1, 2)] == ["abc1", "abc1"]
    assert collector.tokens[3] == expected(request(3, [1, 4], 20, ignore_eos=True))
    assert_clean(core)


@pytest.mark.parametrize("regex", ["A", "a-b"], ids=["at the start", "later"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_grammar_that_allows_nothing_fails_its_request_only(structured, regex, in_flight):
    core = make_fake_engine(extensions=[structured()], in_flight=in_flight)
    core.add(constrained(1, [1, 2], regex=regex))
    core.add(request(2, [1, 3], 20, ignore_eos=True))
    core.add(constrained(3, [1, 4], regex="a"))
    collector = Collector(core).run()
    assert collector.reasons == {1: "error", 2: "length", 3: "stop"}
    assert "allows no token" in collector.errors[1]
    assert collector.tokens[2] == expected(request(2, [1, 3], 20, ignore_eos=True))
    assert_clean(core)


def test_a_bad_grammar_fails_its_request_only_and_is_remembered(structured, gated):
    now = [0.0]
    core = make_fake_engine(extensions=[structured(clock=lambda: now[0])])
    core.add(constrained(1, [1, 2], regex="[a-"))
    core.add(constrained(2, [1, 2], regex="abc1"))
    collector = Collector(core).run()
    assert collector.reasons == {1: "error", 2: "stop"}
    assert "regex cannot be compiled" in collector.errors[1]
    core.add(constrained(3, [1, 2], regex="[a-"))
    assert Collector(core).run().errors[3] == collector.errors[1]
    assert gated.compiled == ["[a-", "abc1"]
    now[0] = REMEMBERED_S + 1
    core.add(constrained(4, [1, 2], regex="[a-"))
    Collector(core).run()
    assert gated.compiled == ["[a-", "abc1", "[a-"]


def test_requests_that_wait_for_a_grammar_take_no_slot(structured, gated):
    core = make_fake_engine(extensions=[structured()], max_num_seqs=1)
    core.add(constrained(1, [1, 2], regex="slow|abc"))
    core.add(constrained(2, [1, 2], regex="slow|abc"))
    assert gated.waiting.wait(60)
    core.add(request(3, [1, 3], 20, ignore_eos=True))
    collector = Collector(core)
    while 3 not in collector.reasons:
        collector.step()
    assert collector.tokens[3] == expected(request(3, [1, 3], 20, ignore_eos=True))
    assert collector.reasons == {3: "length"}
    assert core.has_work()
    gated.gate.set()
    collector.run()
    assert gated.compiled == ["slow|abc"]
    assert [output(collector, h) in ("slow", "abc") for h in (1, 2)] == [True, True]
    assert_clean(core)


def test_requests_that_wait_for_a_grammar_are_counted_as_waiting(structured, gated):
    log = StepLog()
    core = make_fake_engine(extensions=[structured()], observers=[("log", log)])
    core.add(constrained(1, [1], regex="slow|abc"))
    assert gated.waiting.wait(60)
    core.add(request(2, [1, 3], 4, ignore_eos=True))
    while not log.requests:
        core.step()
    assert {record.num_waiting for record in log.steps} == {1}
    gated.gate.set()
    Collector(core).run()
    assert log.steps[-1].num_waiting == 0


def test_aborted_while_its_grammar_is_compiled(structured, gated):
    core = make_fake_engine(extensions=[structured()])
    for handle in (1, 2):
        core.add(constrained(handle, [1, 2], regex="slow|abc"))
    assert gated.waiting.wait(60)
    core.abort([1])
    collector = Collector(core)
    collector.step()
    assert collector.reasons == {1: "abort"}
    gated.gate.set()
    collector.run()
    assert collector.reasons[2] == "stop"
    assert grammars_of(core).pending == 0
    assert_clean(core)


def test_equal_specifications_are_compiled_once_while_the_cache_lasts(structured, gated):
    core = make_fake_engine(extensions=[structured(cache_bytes=12)])
    for handle, regex in enumerate(("abc1", "abc1", "no", "yes", "12", "abc1", "12"), 1):
        core.add(constrained(handle, [1, 2], regex=regex))
        Collector(core).run()
    assert gated.compiled == ["abc1", "no", "yes", "12", "abc1"]


def test_without_a_grammar_engine_requests_are_refused():
    core = make_fake_engine()
    with pytest.raises(RequestError, match="no grammar engine"):
        core.add(constrained(1, [1, 2]))
    assert not core.has_work()


def test_what_can_never_fit_is_refused_before_anything_is_compiled(structured, gated):
    core = make_fake_engine(extensions=[structured()], max_model_len=96)
    with pytest.raises(RequestError, match="max_model_len is 96"):
        core.add(constrained(1, [1] * 96))
    core.add(constrained(1, [1, 2], regex="slow|abc"))
    with pytest.raises(RequestError, match="in use"):
        core.add(constrained(1, [1, 2], regex="slow|abc"))


@pytest.mark.parametrize("where", ["made", "prepare", "prepare_load"])
def test_an_engine_that_cannot_be_made_is_the_error_of_every_request(where, gated, monkeypatch):
    def fail():
        raise RequestError("no tokenizer here")

    def make_tools():
        return Tools(gated, None) if where != "made" else fail()

    if where != "made":
        monkeypatch.setattr(gated, where, fail)

    core = make_fake_engine(
        extensions=[StructuredOutput(Grammars(GrammarCompiler(make_tools)), VOCAB_SIZE)]
    )
    for handle in (1, 2):
        core.add(constrained(handle, [1, 2]))
    collector = Collector(core).run()
    assert set(collector.reasons.values()) == {"error"}
    assert "no tokenizer here" in collector.errors[2]
    core.close()


def test_an_engine_that_fails_is_not_taken_for_a_bad_grammar(structured, gated, monkeypatch):
    def broken(data):
        raise KeyError("inside")

    core = make_fake_engine(extensions=[structured()])
    monkeypatch.setattr(gated, "load", broken)
    core.add(constrained(1, [1, 2], regex="abc1"))
    assert "GatedEngine' failed: KeyError" in Collector(core).run().errors[1]
    monkeypatch.undo()
    core.add(constrained(2, [1, 2], regex="abc1"))
    assert Collector(core).run().reasons[2] == "stop"


@pytest.mark.parametrize("method", ["fill", "accept"])
def test_a_matcher_that_breaks_fails_its_sequence_only(structured, method, monkeypatch):
    from octavo.testing import regex_grammar

    original = getattr(regex_grammar._Matcher, method)

    def broken(self, argument):
        if self._grammar.pattern.pattern == "no":
            raise KeyError("inside")
        return original(self, argument)

    monkeypatch.setattr(regex_grammar._Matcher, method, broken)
    core = make_fake_engine(extensions=[structured()])
    for handle, regex in enumerate(("no", "abc1", "yes"), 1):
        core.add(constrained(handle, [handle, 2], regex=regex))
    collector = Collector(core).run()
    assert collector.reasons == {1: "error", 2: "stop", 3: "stop"}
    assert "matcher failed: KeyError: 'inside'" in collector.errors[1]
    assert_clean(core)


@pytest.mark.parametrize("method", ["fill", "accept"])
def test_a_grammar_that_holds_up_the_step_loop_ends_its_request(structured, method, monkeypatch):
    from octavo.testing import regex_grammar

    now = [0.0]
    original = getattr(regex_grammar._Matcher, method)

    def slow(self, argument):
        now[0] += 1.0 if self._grammar.pattern.pattern == "no" else 0.1
        return original(self, argument)

    monkeypatch.setattr(regex_grammar._Matcher, method, slow)
    core = make_fake_engine(extensions=[structured()])
    (masker,) = core._masks._processors
    monkeypatch.setattr(masker, "_clock", lambda: now[0])
    for handle, regex in enumerate(("no", "abc1"), 1):
        core.add(constrained(handle, [handle, 2], regex=regex))
    collector = Collector(core).run()
    assert collector.reasons == {1: "error", 2: "stop"}
    assert "too ambiguous: following it took 1.00 s" in collector.errors[1]
    assert_clean(core)


def test_following_a_long_output_again_has_a_limit():
    """After a preemption the whole output is followed at once."""
    tokens = tuple(bytes([byte]) for byte in range(97))
    engine = RegexGrammarEngine(
        NoOptions(), GrammarEngineContext(GrammarVocabulary(tokens, (EOS,)))
    )
    spec = StructuredOutputsParams(regex="[0-9]{30}")
    grammar = engine.load(engine.compile(spec))
    ticks = itertools.count()

    def attach(count, seconds_a_token):
        processor = GrammarProcessor(lambda _: grammar, 97, lambda: next(ticks) * seconds_a_token)
        params = SamplingParams(structured_outputs=spec)
        output = np.full(count, ord("7"), np.int32)
        return processor.attach(AttachedRequest(0, 1, output[:1], output, params, (EOS,)))

    assert attach(20, 0.001)
    assert attach(4, 0.2)
    with pytest.raises(RequestError, match="again after a preemption took over 1 s") as caught:
        attach(20, 0.2)
    assert caught.value.param == "structured_outputs"


def test_unconstrained_requests_never_reach_the_matcher(structured):
    core = make_fake_engine(extensions=[structured()])
    core.add(request(1, [1, 3], 20, ignore_eos=True))
    plans = []
    submit = core.executor.submit
    core.executor.submit = lambda plan: plans.append(plan) or submit(plan)
    Collector(core).run()
    assert plans
    assert not any(plan.needs_mask for plan in plans)
    assert not core._masks._slot_of


def test_specifications_are_equal_by_what_they_say():
    assert StructuredOutputsParams(json={"a": 1}) == StructuredOutputsParams(json='{"a":1}')
    assert StructuredOutputsParams(choice=["a"]) == StructuredOutputsParams(choice=("a",))
