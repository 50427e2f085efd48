"""The bound of a text's tokens: never above their number, and near enough to be of use."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models
from tokenizers import normalizers as norm
from tokenizers import pre_tokenizers as pre
from tokenizers.trainers import BpeTrainer

from octavo.core.contracts import NoOptions
from octavo.core.contracts.tokenizer import TokenizerContext
from octavo.models.tokenizers.fast import FastTokenizer

CORPUS = [
    "the quick brown fox the quick brown dog é é 日本 1234 1234 " + 2 * ("-" * 64),
    "internationalization internationalization\n\n                 x                y",
] * 5


def byte_level(vocab_size: int = 400) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    alphabet = pre.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens(["<|end|>"])
    return made


def byte_fallback(**model: object) -> Tokenizer:
    """As Llama 2's."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz", "th", "the", "▁the", "▁▁", "▁▁▁▁"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁"), ("▁▁", "▁▁")]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True} | model
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    made.normalizer = norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")])
    return made


def lacking(*letters: str, **parts: object) -> Tokenizer:
    """A tokenizer that drops some bytes of a text without a word, as SmolLM2's does."""
    alphabet = [letter for letter in sorted(pre.ByteLevel.alphabet()) if letter not in letters]
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def changed(make: Callable[[], Tokenizer], **parts: object) -> Callable[[], Tokenizer]:
    def build() -> Tokenizer:
        made = make()
        for name, part in parts.items():
            setattr(made, name, part)
        return made

    return build


def with_added(**flags: bool) -> Tokenizer:
    made = byte_level()
    made.add_special_tokens([AddedToken("<|user|>", **flags)])
    made.add_tokens([AddedToken("e\u0301e\u0301", normalized=True), AddedToken("xy", **flags)])
    return made


def split(behavior: str) -> pre.PreTokenizer:
    return pre.Sequence([pre.Split(" ", behavior), pre.ByteLevel(False, use_regex=False)])


BOUNDED = {
    "byte_level": byte_level,
    "digits": changed(
        byte_level, pre_tokenizer=pre.Sequence([pre.Digits(True), pre.ByteLevel(False)])
    ),
    "nfc": changed(with_added, normalizer=norm.NFC()),
    "nfkc_lower": changed(byte_level, normalizer=norm.Sequence([norm.NFKC(), norm.Lowercase()])),
    "nfkd": changed(with_added, normalizer=norm.NFKD()),
    "split": changed(byte_level, pre_tokenizer=split("merged_with_next")),
    "swallowing": lambda: with_added(lstrip=True, rstrip=True),
    "byte_fallback": byte_fallback,
    "lacks bytes": lambda: lacking("Ā", "Ć", "ñ", "ĳ", "Á", "q"),
    "metaspace": changed(byte_fallback, normalizer=None, pre_tokenizer=pre.Metaspace()),
}
UNBOUNDED = {
    "lacks bytes": lambda: lacking("Ā", normalizer=norm.NFC()),
    "drops spaces": changed(byte_level, pre_tokenizer=split("removed")),
    "strips": changed(byte_level, normalizer=norm.Sequence([norm.NFC(), norm.Strip()])),
    "strips accents": changed(byte_level, normalizer=norm.StripAccents()),
    "replaces": changed(byte_fallback, normalizer=norm.Replace("  ", "▁")),
    "unknown": lambda: byte_fallback(byte_fallback=False),
    "words": lambda: Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
}

SPACES = st.integers(0, 60).map(lambda count: " " * count)
PIECES = st.one_of(
    st.text(max_size=6),
    SPACES,
    st.text("-=\n\t#", max_size=30),
    st.text("eεωİ\u0301\u0345\u0314\u1100\u1161\u11a8\u212b", max_size=12),
    st.sampled_from(
        [
            "\0" * 9,
            "\x04\x06",
            "\U00050000" * 3,
            "qqqqqq",
            "internationalization",
            "<|user|>",
            "<|end|>",
            "xy",
            "e\u0301e\u0301",
            "éé",
            "<0x41>",
            "ﬃ",
        ]
    ),
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def opened(made: Tokenizer) -> FastTokenizer:
    with TemporaryDirectory() as name:
        made.save(str(Path(name) / "tokenizer.json"))
        return FastTokenizer(NoOptions(), TokenizerContext(Path(name), {}, {}))


@cache
def bounded(name: str) -> FastTokenizer:
    return opened(BOUNDED[name]())


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_no_text_has_fewer(name: str, text: str) -> None:
    tokenizer = bounded(name)
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", BOUNDED)
def test_a_long_text_of_words_has_many(name: str) -> None:
    tokenizer = bounded(name)
    longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
    assert tokenizer.fewest_tokens("a longer one " * 4 * longest) >= 4


@pytest.mark.parametrize("name", UNBOUNDED)
def test_what_may_lose_text_has_no_bound(name: str) -> None:
    assert opened(UNBOUNDED[name]()).fewest_tokens("a" * 10**4) == 0


def test_letters_count_for_more_than_spaces() -> None:
    tokenizer = bounded("byte_level")
    assert tokenizer.fewest_tokens("a" * 10**5) > tokenizer.fewest_tokens(" " * 10**5) > 0
    swallowing = bounded("swallowing")
    assert swallowing.fewest_tokens(" " * 10**5) == 0 < swallowing.fewest_tokens("a" * 10**5)
