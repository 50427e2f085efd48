"""What every grammar engine promises."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from octavo.core.contracts.grammar_engine import (
    Grammar,
    GrammarEngine,
    GrammarEngineContext,
    GrammarMatcher,
    GrammarVocabulary,
)
from octavo.core.errors import RequestError
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.testing.conformance.base import ConformanceSuite, NotApplicable

SPECIAL = b""
END, STOP = 96, 97
TOKENS: tuple[bytes, ...] = (
    *(bytes([byte]) for byte in range(32, 127)),
    SPECIAL,
    SPECIAL,  # an end token
    SPECIAL,  # a stop token
    b"ab",
    b"yes",
    b"may",
    b"be",
    b"no",
    b"\xc3",
    b"\xa9",
    b"\xc3\xa9",
)
"""The vocabulary of the suite; its size is no multiple of 32."""

LANGUAGES: dict[str, tuple[StructuredOutputsParams, frozenset[bytes]]] = {
    "a choice": (
        StructuredOutputsParams(choice=("yes", "no", "maybe")),
        frozenset((b"yes", b"no", b"maybe")),
    ),
    "choices with a common beginning": (
        StructuredOutputsParams(choice=("a", "ab", "abb", "b")),
        frozenset((b"a", b"ab", b"abb", b"b")),
    ),
    "a choice beyond ASCII": (
        StructuredOutputsParams(choice=("é!", "e")),
        frozenset(("é!".encode(), b"e")),
    ),
    "a regular expression": (
        StructuredOutputsParams(regex="(ab|ac)d?"),
        frozenset((b"ab", b"ac", b"abd", b"acd")),
    ),
    "an EBNF grammar": (
        StructuredOutputsParams(grammar='root ::= "a" rest\nrest ::= "b" | "no"'),
        frozenset((b"ab", b"ano")),
    ),
    "a JSON schema": (
        StructuredOutputsParams(json='{"enum": ["a", 12]}', disable_any_whitespace=True),
        frozenset((b'"a"', b"12")),
    ),
}
"""Specifications, and all texts that keep to each."""


class GrammarEngineSuite(ConformanceSuite):
    """Subclass it with `provider`, or override `make` (a `GrammarEngine` for the context).

    A kind of specification that the engine refuses with `RequestError` is left out; one at least
    must be taken. refuses_everything: for an engine that is there to refuse.
    """

    kind = "grammar_engine"
    refuses_everything: ClassVar[bool] = False

    def engine(self) -> GrammarEngine:
        """The engine under test, prepared."""
        made = self.make(GrammarEngineContext(GrammarVocabulary(TOKENS, (END,))))
        assert isinstance(made, GrammarEngine), f"make returned {type(made).__name__}"
        made.prepare()
        made.prepare_load()
        return made

    def grammars(self) -> Iterable[tuple[str, Grammar, frozenset[bytes]]]:
        """What the engine takes of `LANGUAGES`."""
        if self.refuses_everything:
            raise NotApplicable("this engine is there to refuse")
        engine, found = self.engine(), 0
        for name, (spec, language) in LANGUAGES.items():
            try:
                data = engine.compile(spec)
            except RequestError:
                continue
            assert isinstance(data, bytes), f"compile gave {type(data).__name__}"
            found += 1
            yield name, engine.load(data), language
        assert found, "the engine takes no specification of the suite"

    @staticmethod
    def allowed(matcher: GrammarMatcher) -> set[int]:
        """Tokens of a mask that was full of ones and one that was full of zeros."""
        words = -(-len(TOKENS) // 32)
        ones, zeros = (np.full(words, value, np.int32) for value in (-1, 0))
        matcher.fill(ones)
        matcher.fill(zeros)
        assert np.array_equal(ones, zeros), "fill leaves words as they were"
        bits = np.unpackbits(ones.view(np.uint8), bitorder="little")
        assert not bits[len(TOKENS) :].any(), "bits behind the vocabulary are set"
        return set(np.flatnonzero(bits).tolist())

    @staticmethod
    def expected(text: bytes, language: Iterable[bytes], ends: Sequence[int]) -> set[int]:
        """The tokens that keep a member of the language possible."""
        members = [member for member in language if member.startswith(text)]
        found = {
            token
            for token, piece in enumerate(TOKENS)
            if piece and any(member.startswith(text + piece) for member in members)
        }
        return found | (set(ends) if text in members else set())

    # ---- masks ------------------------------------------------------------------------------

    def test_masks_allow_what_keeps_the_output_possible(self) -> None:
        """On every path to every text of a small language the mask has exactly the tokens that keep
        some text possible, and end tokens where one is complete."""
        for name, grammar, language in self.grammars():
            paths = [(b"", grammar.matcher((END, STOP)))]
            while paths:
                text, matcher = paths.pop()
                wanted = self.expected(text, language, (END, STOP))
                got = self.allowed(matcher)
                assert got == wanted, (
                    f"{name}, after {text!r}: allows {sorted(got - wanted)} too many and "
                    f"{sorted(wanted - got)} too few"
                )
                assert matcher.complete == (text in language), f"{name}: complete after {text!r}"
                for token in sorted(wanted - {END, STOP}):
                    following = matcher.fork()
                    assert following.accept(token), f"{name}: {text!r} + {TOKENS[token]!r} refused"
                    paths.append((text + TOKENS[token], following))

    def test_accept_agrees_with_the_mask(self) -> None:
        """accept takes exactly the tokens of the mask, and a refused token changes nothing."""
        for name, grammar, language in self.grammars():
            matcher = grammar.matcher((END,))
            wanted = self.allowed(matcher)
            for token in range(len(TOKENS)):
                taken = matcher.fork().accept(token)
                assert taken == (token in wanted), f"{name}: accept({token}) gave {taken}"
            refused = next(token for token in range(len(TOKENS)) if token not in wanted)
            assert not matcher.accept(refused), f"{name}: a forbidden token was taken"
            assert self.allowed(matcher) == wanted, f"{name}: a refused token changed the state"
            assert language, name

    def test_nothing_follows_an_end_token(self) -> None:
        """An end token is taken where the output may end, and nothing is taken after it."""
        for name, grammar, language in self.grammars():
            matcher = grammar.matcher((END,))
            assert not matcher.accept(END) or b"" in language, f"{name}: it ends before it begins"
            self._spell(matcher, min(language, key=len), name)
            assert matcher.complete, f"{name}: a whole text is not complete"
            assert matcher.accept(END), f"{name}: a whole text may not end"
            taken = [token for token in range(len(TOKENS)) if matcher.fork().accept(token)]
            assert not taken, f"{name}: after the end it takes {taken}"

    def test_without_end_tokens_nothing_ends(self) -> None:
        """A matcher that was given no end token never allows one."""
        for name, grammar, language in self.grammars():
            matcher = grammar.matcher(())
            self._spell(matcher, min(language, key=len), name)
            assert not self.allowed(matcher) & {END, STOP}, f"{name}: it allows an end token"

    # ---- state ------------------------------------------------------------------------------

    def test_rollback_undoes_accept(self) -> None:
        """Tokens taken back, the end token included, leave no trace."""
        for name, grammar, language in self.grammars():
            text = max(language, key=len)
            matcher = grammar.matcher((END,))
            states = [self.allowed(matcher)]
            tokens = [TOKENS.index(bytes([byte])) for byte in text]
            for token in tokens:
                matcher.accept(token)
                states.append(self.allowed(matcher))
            matcher.accept(END)
            matcher.rollback(1)
            for back in range(1, len(tokens) + 1):
                assert self.allowed(matcher) == states[-back], (
                    f"{name}: the mask is another than before, with {back} tokens taken back"
                )
                matcher.rollback(1)
            self._spell(matcher, text, name)
            matcher.rollback(len(tokens))
            assert self.allowed(matcher) == states[0], (
                f"{name}: after all was taken back at once the mask is another than at first"
            )

    def test_forks_go_their_own_way(self) -> None:
        """What a fork accepts does not show in the matcher it came from, nor the other way."""
        for name, grammar, language in self.grammars():
            matcher = grammar.matcher((END,))
            first, fork = self.allowed(matcher), matcher.fork()
            self._spell(fork, max(language, key=len), name)
            assert self.allowed(matcher) == first, f"{name}: the fork changed its origin"
            late = fork.fork()
            late.rollback(1)
            assert fork.complete, f"{name}: a rollback of a fork changed its origin"

    def test_matchers_of_one_grammar_are_independent(self) -> None:
        """Two requests with one grammar do not disturb each other."""
        for name, grammar, language in self.grammars():
            one, two = grammar.matcher((END,)), grammar.matcher((STOP,))
            before = self.allowed(two)
            self._spell(one, max(language, key=len), name)
            assert self.allowed(two) == before, f"{name}: matchers share their state"
            self._spell(two, min(language, key=len), name)
            assert STOP in self.allowed(two), f"{name}: its own end token is not allowed"
            assert END not in self.allowed(two), f"{name}: another request's end token is allowed"

    def test_compiled_grammars_load_again_and_again(self) -> None:
        """What compile gave can be loaded several times, also by another engine object."""
        if self.refuses_everything:
            raise NotApplicable("this engine is there to refuse")
        first, second = self.engine(), self.engine()
        for name, (spec, language) in LANGUAGES.items():
            try:
                data = first.compile(spec)
            except RequestError:
                continue
            for engine in (first, second, second):
                matcher = engine.load(data).matcher((END,))
                assert self.allowed(matcher) == self.expected(b"", language, (END,)), name

    # ---- mistakes ---------------------------------------------------------------------------

    def test_mistakes_are_the_callers(self) -> None:
        """What cannot be compiled raises RequestError with a message, and nothing else."""
        engine = self.engine()
        for spec in (
            StructuredOutputsParams(regex="(unclosed"),
            StructuredOutputsParams(regex="[z-a]"),
            StructuredOutputsParams(grammar="this is no grammar ::="),
            StructuredOutputsParams(json='{"type": "no such type"}'),
        ):
            try:
                engine.compile(spec)
            except RequestError as error:
                if not str(error):
                    raise AssertionError(f"{spec} is refused without a message") from error
            except Exception as error:
                raise AssertionError(f"{spec} raised {error!r}, expected RequestError") from error
            else:
                raise AssertionError(f"{spec} was compiled")

    @staticmethod
    def _spell(matcher: GrammarMatcher, text: bytes, name: str) -> None:
        for place, byte in enumerate(text):
            taken = matcher.accept(TOKENS.index(bytes([byte])))
            assert taken, f"{name}: {text!r} is refused at byte {place}"
