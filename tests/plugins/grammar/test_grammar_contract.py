"""What every grammar engine must do, checked token by token against a slow reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.contracts import NoOptions
from octavo.core.contracts.grammar_engine import GrammarEngineContext, GrammarVocabulary
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.testing.fake_engine import EOS
from octavo.testing.regex_grammar import RegexGrammarEngine

from .conftest import VOCAB_SIZE, fake_vocabulary

PATTERNS = (
    "abc1?",
    "[a-c]{2,5}[0-9]{1,3}( no| yes)?",
    "(ab|abc|b)*",
    "a*b+|12 (yes|no)",
    "([a-z]|[0-9]{2}){0,3}zz",
    "(yes|no)( [a-z]+)?",
    "a?",
    "(a1|1a)+ ?",
)


def words(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def masked(matcher, vocab_size=VOCAB_SIZE):
    mask = np.full(-(-vocab_size // 32), 0x5555, np.int32)
    matcher.fill(mask)
    return words(mask)


def reference(vocabulary):
    return RegexGrammarEngine(NoOptions(), GrammarEngineContext(vocabulary))


def xgrammar(vocabulary):
    pytest.importorskip("xgrammar")
    from octavo.plugins.grammar_engines.options import XGrammarOptions
    from octavo.plugins.grammar_engines.xgrammar_engine import XGrammarEngine

    made = XGrammarEngine(XGrammarOptions(), GrammarEngineContext(vocabulary))
    made.prepare()
    return made


def grammar(engine, pattern):
    return engine.load(engine.compile(StructuredOutputsParams(regex=pattern)))


@pytest.fixture(scope="module", params=[reference, xgrammar])
def pairs(request):
    """Grammars of the engine under test and of the reference, by pattern."""
    engine, slow = request.param(fake_vocabulary()), reference(fake_vocabulary())
    return {pattern: (grammar(engine, pattern), grammar(slow, pattern)) for pattern in PATTERNS}


@settings(max_examples=40)
@given(data=st.data())
def test_masks_are_the_references_wherever_the_output_goes(pairs, data):
    """Accept, rollback and fork, in any order: the mask is always that of the accepted tokens."""
    fast, slow = pairs[data.draw(st.sampled_from(PATTERNS))]
    ends = data.draw(st.sampled_from([[EOS], [EOS, 60], []]))
    states = [(fast.matcher(ends), slow.matcher(ends), [])]
    for _ in range(data.draw(st.integers(1, 14))):
        which = data.draw(st.integers(0, len(states) - 1))
        one, two, tokens = states[which]
        ended = bool(tokens) and tokens[-1] in ends
        allowed = [] if ended else masked(two)
        if not ended:
            assert masked(one) == allowed
            assert one.complete == two.complete
        match data.draw(st.sampled_from(["accept", "accept", "accept", "wrong", "back", "fork"])):
            case "accept" if allowed:
                token = data.draw(st.sampled_from(allowed))
                assert one.accept(token)
                assert two.accept(token)
                tokens.append(token)
            case "wrong":
                token = data.draw(st.integers(0, VOCAB_SIZE - 1))
                if token not in allowed:
                    assert not one.accept(token)
            case "back":
                count = data.draw(st.integers(0, len(tokens)))
                one.rollback(count)
                two.rollback(count)
                del tokens[len(tokens) - count :]
            case "fork" if len(states) < 4:
                states.append((one.fork(), two.fork(), list(tokens)))


@pytest.mark.parametrize("make", [reference, xgrammar])
@pytest.mark.parametrize("vocab_size", [31, 32, 33, 64, 97])
def test_what_is_beyond_the_vocabulary_is_never_set(make, vocab_size):
    tokens = tuple(bytes([97 + i % 26]) if i < 26 else b"" for i in range(vocab_size))
    for ends in ((), (30,)):
        engine = make(GrammarVocabulary(tokens, ends))
        made = grammar(engine, "[a-c]{1,2}")
        matcher = made.matcher(ends)
        assert masked(matcher, vocab_size) == [0, 1, 2]
        assert matcher.accept(1)
        assert masked(matcher, vocab_size) == [0, 1, 2, *ends]
        assert matcher.accept(2)
        assert masked(matcher, vocab_size) == list(ends)
        assert not matcher.accept(vocab_size)


@pytest.mark.parametrize("make", [reference, xgrammar])
def test_special_tokens_are_no_text(make):
    """A token without bytes is never allowed, even where its name would fit."""
    made = grammar(make(fake_vocabulary()), "[a-z<>|]{1,40}")
    matcher = made.matcher([EOS])
    hidden = [i for i, token in enumerate(fake_vocabulary().tokens) if not token]
    assert not set(masked(matcher)) & set(hidden)
    assert not matcher.accept(3)
    assert matcher.accept(8)
    assert set(masked(matcher)) & set(hidden) == {EOS}
