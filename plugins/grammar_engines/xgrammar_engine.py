"""Engine `xgrammar`: https://github.com/mlc-ai/xgrammar. Imports torch (xgrammar does).

Compiled grammars travel as xgrammar's own JSON text, which holds no vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.grammar_engine import (
    Grammar,
    GrammarEngine,
    GrammarEngineContext,
    GrammarMatcher,
    GrammarVocabulary,
)
from octavo.core.errors import RequestError
from octavo.core.structured_outputs import PARAM, StructuredOutputsParams
from octavo.plugins.grammar_engines import ebnf
from octavo.plugins.grammar_engines.json_schema import prepared_schema
from octavo.plugins.grammar_engines.options import XGrammarOptions

_NOISE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")


class XGrammarEngine(GrammarEngine):
    """xgrammar is imported by `prepare` and `prepare_load`, not before."""

    def __init__(self, options: XGrammarOptions, context: GrammarEngineContext) -> None:
        self._options, self._vocabulary = options, context.vocabulary
        self._info: Any = None
        self._compiler: Any = None

    def prepare(self) -> None:
        import xgrammar

        self._compiler = xgrammar.GrammarCompiler(
            self._tokenizer_info(), max_threads=1, cache_enabled=False
        )

    def compile(self, spec: StructuredOutputsParams) -> bytes:
        try:
            compiled = self._compiled(spec)
        except (RuntimeError, ValueError) as error:  # xgrammar's own errors are RuntimeErrors
            if isinstance(error, RequestError):
                raise
            raise RequestError(
                f"{PARAM}: {spec.kind} cannot be compiled: {_plain(error)}",
                param=f"{PARAM}.{spec.kind}",
            ) from None
        data: str = compiled.serialize_json()
        return data.encode()

    def _compiled(self, spec: StructuredOutputsParams) -> Any:
        compiler, fixed = self._compiler, spec.disable_any_whitespace
        match spec.kind:
            case "json":
                assert spec.json is not None, "the kind says so"
                return compiler.compile_grammar(self._json_grammar(spec.json, fixed))
            case "json_object":
                return compiler.compile_grammar(self._json_grammar('{"type": "object"}', fixed))
            case "regex":
                return compiler.compile_regex(spec.regex)
            case "choice":
                assert spec.choice is not None, "the kind says so"
                return compiler.compile_grammar(ebnf.choice(spec.choice))
            case "grammar":
                return compiler.compile_grammar(spec.grammar)
            case _:
                assert spec.structural_tag is not None, "the kind says so"
                tag = self._tag(json.loads(spec.structural_tag), fixed)
                return compiler.compile_structural_tag(tag)

    def _tag(self, value: Any, fixed: bool) -> Any:
        """A part of a structural tag, in which JSON schemas are as bounded, and unsupported ones as
        refused, as a schema by itself."""
        if isinstance(value, list):
            return [self._tag(item, fixed) for item in value]
        if not isinstance(value, dict):
            return value
        if "json_schema" not in value:
            return {name: self._tag(item, fixed) for name, item in value.items()}
        text = json.dumps(value["json_schema"])
        if set(value) == {"type", "json_schema"} and value["type"] == "json_schema":
            return {"type": "grammar", "grammar": self._json_grammar(text, fixed)}
        schema, patterns = prepared_schema(text)
        if patterns:
            raise RequestError(f"{PARAM}: patterns are not supported in {value.get('type')!r:.40}")
        bounded = {**value, "json_schema": schema}
        if value.get("type") == "json_schema":
            bounded.setdefault("max_whitespace_cnt", self._options.max_whitespace)
        return bounded

    def _json_grammar(self, text: str, fixed: bool) -> str:
        """fixed: one line, with the separators of `json.dumps`."""
        import xgrammar

        def convert(pattern: str) -> str:
            return str(xgrammar.Grammar.from_regex(pattern))

        schema, patterns = prepared_schema(text)
        grammar = xgrammar.Grammar.from_json_schema(
            schema,
            any_whitespace=not fixed,
            max_whitespace_cnt=None if fixed else self._options.max_whitespace,
        )
        return ebnf.tightened(str(grammar), patterns, convert)

    def prepare_load(self) -> None:
        self._tokenizer_info()

    def load(self, data: bytes) -> Grammar:
        import xgrammar

        compiled = xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._tokenizer_info())
        return _Grammar(compiled, self._vocabulary)

    def _tokenizer_info(self) -> Any:
        """The vocabulary as xgrammar holds it. It wants an end token: where the tokenizer has none,
        that is an id beyond the vocabulary."""
        if self._info is None:
            import xgrammar

            tokens, ends = self._vocabulary.tokens, self._vocabulary.end_token_ids
            self._info = xgrammar.TokenizerInfo(
                [*tokens, b""],
                vocab_type=xgrammar.VocabType.RAW,
                vocab_size=len(tokens) + 1,
                stop_token_ids=list(ends) or [len(tokens)],
            )
        return self._info


class _Grammar(Grammar):
    def __init__(self, compiled: Any, vocabulary: GrammarVocabulary) -> None:
        self._compiled, self._vocabulary = compiled, vocabulary

    def matcher(self, end_token_ids: Sequence[int]) -> GrammarMatcher:
        import xgrammar

        vocab_size = len(self._vocabulary.tokens)
        ends = list(end_token_ids) or [vocab_size]
        matcher = xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=ends)
        # xgrammar lets its own end tokens through where others take their place.
        never = frozenset(self._vocabulary.end_token_ids) - frozenset(ends)
        return _Matcher(matcher, vocab_size, never)


class _Matcher(GrammarMatcher):
    def __init__(self, matcher: Any, vocab_size: int, never: frozenset[int]) -> None:
        self._matcher, self._vocab_size, self._never = matcher, vocab_size, never
        self._mask = np.empty((1, -(-(vocab_size + 1) // 32)), np.int32)

    def accept(self, token_id: int) -> bool:
        if token_id >= self._vocab_size or token_id in self._never:
            return False
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def fork(self) -> GrammarMatcher:
        return _Matcher(self._matcher.fork(), self._vocab_size, self._never)

    def fill(self, bitmask: NDArray[np.int32]) -> None:
        self._matcher.fill_next_token_bitmask(self._mask)
        words = -(-self._vocab_size // 32)
        bitmask[:] = self._mask[0, :words]
        beyond = self._vocab_size % 32
        if beyond:  # what lies behind the vocabulary, the stand-in for an end token among it
            bitmask[-1] &= (1 << beyond) - 1
        for token in self._never:
            bitmask.view(np.uint32)[token // 32] &= ~np.uint32(1 << (token % 32))

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_completed())


def _plain(error: Exception) -> str:
    """xgrammar's message without time, file and line of its source."""
    return _NOISE.sub("", str(error).strip()).strip()[:1000]
