from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.contracts.tokenizer import Tokenizer
from octavo.frontend.text.detokenizer import TokenTable
from octavo.testing.byte_tokenizer import ByteTokenizer

PLAIN = ByteTokenizer()
TABLE = TokenTable(PLAIN)
TOKENS = st.lists(st.integers(0, PLAIN.vocab_size - 1), max_size=40)
REPLACEMENT = "\ufffd"


class WindowTokenizer(ByteTokenizer):
    """Puts a space between special tokens and the rest: text is not joined bytes."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        runs: list[tuple[bool, list[int]]] = []
        for token in token_ids:
            special = token in self.special_ids
            if special and skip_special_tokens:
                continue
            if special or not runs or runs[-1][0]:
                runs.append((special, []))
            runs[-1][1].append(token)
        return " ".join(
            super(WindowTokenizer, self).decode(run, skip_special_tokens=False) for _, run in runs
        )


class LeadingSpaceTokenizer(ByteTokenizer):
    """Decodes as a SentencePiece decoder does: a text loses its first space."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = super().decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text[1:] if text.startswith(" ") else text


def in_context(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], skip: bool
) -> str:
    """The truth: what decoding the output adds to decoding the prompt."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode([*prompt, *output], skip_special_tokens=skip)
    return whole[len(before) :]


def pieces(
    table: TokenTable, prompt: Sequence[int], output: Sequence[int], skip: bool
) -> list[str]:
    detokenizer = table.detokenizer(prompt, skip_special_tokens=skip)
    return [*(detokenizer.feed(token) for token in output), detokenizer.flush()]


@given(output=TOKENS, skip=st.booleans())
def test_joined_pieces_are_the_decoded_text(output: list[int], skip: bool) -> None:
    prompt = PLAIN.encode("Hello the")
    got = pieces(TABLE, prompt, output, skip)
    assert "".join(got) == in_context(PLAIN, prompt, output, skip)


@given(text=st.text(max_size=30))
def test_no_half_character_is_shown(text: str) -> None:
    # One byte a token: every border inside a character is met.
    shown = ""
    detokenizer = TABLE.detokenizer(PLAIN.encode("x"))
    for byte in text.encode():
        shown += detokenizer.feed(byte)
        assert text.startswith(shown)
    assert shown + detokenizer.flush() == text


@given(output=TOKENS)
def test_bad_bytes_are_replaced_and_do_not_hold_up_what_follows(output: list[int]) -> None:
    detokenizer = TABLE.detokenizer([65])
    for token in output:
        detokenizer.feed(token)
    first = detokenizer.feed(ord("!"))
    assert first.endswith("!")


@pytest.mark.parametrize("kind", [WindowTokenizer, LeadingSpaceTokenizer])
@pytest.mark.parametrize("skip", [True, False])
def test_other_decoders_agree_with_decoding_in_context(
    kind: type[ByteTokenizer], skip: bool
) -> None:
    tokenizer = kind()
    table = TokenTable(tokenizer)
    text = "a<|tool|> the é<|tool|><|tool|> capital of 日本 👍 <|im_start|>x"
    output = tokenizer.encode(text)
    for prompt in (tokenizer.encode("Hi"), tokenizer.encode("<|bos|>Hi there")):
        assert "".join(pieces(table, prompt, output, skip)) == in_context(
            tokenizer, prompt, output, skip
        )


def test_only_a_decoder_that_joins_bytes_takes_the_short_way() -> None:
    assert TokenTable(ByteTokenizer()).joins_bytes
    assert TokenTable(LeadingSpaceTokenizer()).joins_bytes
    assert not TokenTable(WindowTokenizer()).joins_bytes


def test_a_first_word_loses_its_space_where_the_decoder_drops_it() -> None:
    tokenizer = LeadingSpaceTokenizer()
    table = TokenTable(tokenizer)
    output = tokenizer.encode(" the of")
    nothing_shown = [tokenizer.id_of("<|bos|>")]
    assert "".join(pieces(table, nothing_shown, output, True)) == "the of"
    assert "".join(pieces(table, tokenizer.encode("In"), output, True)) == " the of"


def test_a_character_that_begins_in_the_prompt_is_completed() -> None:
    euro = list("€".encode())
    detokenizer = TABLE.detokenizer([65, euro[0]])
    assert [detokenizer.feed(token) for token in euro[1:]] == ["", "€"]


def test_an_endless_run_of_bad_bytes_is_shown_in_the_window_too() -> None:
    tokenizer = WindowTokenizer()
    detokenizer = TokenTable(tokenizer).detokenizer(tokenizer.encode("x"))
    shown = [detokenizer.feed(0xFF) for _ in range(100)]
    assert "".join(shown).count(REPLACEMENT) > 80
    assert "".join(shown) + detokenizer.flush() == REPLACEMENT * 100


def test_spaces_between_special_tokens_can_be_left_out() -> None:
    tokenizer = WindowTokenizer()
    output = tokenizer.encode("a<|tool|><|tool|>b")
    for spaces, text in ((True, "a <|tool|> <|tool|> b"), (False, "a <|tool|><|tool|> b")):
        detokenizer = TokenTable(tokenizer).detokenizer(
            tokenizer.encode("x"), skip_special_tokens=False, spaces_between_special_tokens=spaces
        )
        assert "".join(detokenizer.feed(token) for token in output) == text


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    assert pieces(TABLE, [65], [66, PLAIN.vocab_size + 5, 67], True) == ["B", "", "C", ""]
