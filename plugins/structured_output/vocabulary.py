"""What a grammar engine must know of a tokenizer."""

from __future__ import annotations

from octavo.core.contracts.grammar_engine import GrammarVocabulary
from octavo.core.contracts.tokenizer import Tokenizer


def make_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> GrammarVocabulary:
    """vocab_size: rows of the model's head; rows beyond the tokenizer are never part of a text, and
    neither are special and end tokens, whatever their name spells."""
    hidden = {*tokenizer.special_ids, *tokenizer.eos_token_ids}
    known = min(vocab_size, tokenizer.vocab_size)
    tokens = [b"" if i in hidden else tokenizer.token_bytes(i) for i in range(known)]
    tokens += [b""] * (vocab_size - known)
    ends = tuple(i for i in tokenizer.eos_token_ids if 0 <= i < vocab_size)
    return GrammarVocabulary(tuple(tokens), ends)
