from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from octavo.core.sampling_params import SamplingParams
from octavo.frontend.text.detokenizer import TextStream, TokenTable
from octavo.frontend.text.stops import StopScanner
from octavo.testing.byte_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
TABLE = TokenTable(TOKENIZER)
SMALL = st.text(alphabet="ab<", max_size=24)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The slow truth: where the stop string that is complete first begins."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return end - len(stop), stop
    return None


@given(
    text=SMALL,
    stops=st.lists(st.text(alphabet="ab<", min_size=1, max_size=5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 24)),
    include=st.booleans(),
)
def test_stops_are_found_whatever_the_borders(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in itertools.pairwise(borders)]
    scanner = StopScanner(stops, include=include)
    expected = first_stop(text, stops)
    shown, found = "", None
    for part in parts:
        released, found = scanner.feed(part)
        shown += released
        if found is not None:
            break
        # Nothing that is shown can turn out to belong to a stop string.
        if expected is not None:
            assert len(shown) <= expected[0]
    if expected is None:
        assert found is None
        assert shown + scanner.flush() == text
    else:
        start, stop = expected
        assert found == stop
        assert shown == text[:start] + (stop if include else "")


@given(text=SMALL, stop=st.text(alphabet="ab<", min_size=1, max_size=5))
def test_no_more_is_held_back_than_needed(text: str, stop: str) -> None:
    scanner = StopScanner([stop])
    shown = ""
    for place, char in enumerate(text):
        released, found = scanner.feed(char)
        shown += released
        if found:
            return
        seen = text[: place + 1]
        longest = max(k for k in range(len(stop)) if seen.endswith(stop[:k]) or k == 0)
        assert shown == seen[: len(seen) - longest]


def run(text: str, **params: object) -> tuple[str, str | None, int]:
    """Shown text, stop string and number of tokens taken."""
    stream = TextStream(TABLE, TOKENIZER.encode("prompt"), SamplingParams(**params))  # type: ignore[arg-type]
    shown = ""
    tokens = TOKENIZER.encode(text)
    for count, token in enumerate(tokens, 1):
        released, stop = stream.feed(token)
        shown += released
        if stop is not None:
            return shown, stop, count
    return shown + stream.finish(), None, len(tokens)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run("xabcdy", stop=["abcd", "bc"]) == ("xa", "bc", 4)
    assert run("xabcdy", stop=["cd", "abcd"]) == ("x", "abcd", 5)


def test_a_stop_string_naming_a_hidden_special_token_fires() -> None:
    assert run("one<|tool|>two", stop=["<|tool|>"]) == ("one", "<|tool|>", 4)
    shown = run("one<|tool|>two", stop=["<|tool|>"], include_stop_str_in_output=True)
    assert shown == ("one<|tool|>", "<|tool|>", 4)


def test_a_stop_string_around_a_hidden_special_token_fires() -> None:
    assert run("ab<|tool|>cd", stop=["b<|tool|>c"]) == ("a", "b<|tool|>c", 4)
    assert run("ab<|tool|>xd", stop=["b<|tool|>c"]) == ("abxd", None, 5)
    assert run("ab<|im_start|>cd", stop=["bc"]) == ("a", "bc", 4)


def test_special_tokens_that_are_shown_are_searched_as_text() -> None:
    assert run("a<|tool|>b", stop=["<|tool|>"], skip_special_tokens=False)[:2] == ("a", "<|tool|>")


def test_min_tokens_come_first() -> None:
    assert run("a.b.c.", stop=["."]) == ("a", ".", 2)
    assert run("a.b.c.", stop=["."], min_tokens=2) == ("a.b", ".", 4)
    assert run("a.b.c.", stop=["."], min_tokens=6) == ("a.b.c.", None, 6)


@given(
    output=st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40),
    stops=st.lists(
        st.sampled_from(["a", "é", " the", "<|tool|>", "\n\n", "日本", "of"]), max_size=2
    ),
    skip=st.booleans(),
)
def test_streams_show_what_decoding_gives(output: list[int], stops: list[str], skip: bool) -> None:
    prompt = TOKENIZER.encode("hello")
    sampling = SamplingParams(stop=stops or None, skip_special_tokens=skip)
    stream = TextStream(TABLE, prompt, sampling)
    shown, stop = "", None
    count = 0
    while stop is None and count < len(output):
        released, stop = stream.feed(output[count])
        shown += released
        count += 1
    if stop is None:
        assert shown + stream.finish() == TOKENIZER.decode(output, skip_special_tokens=skip)
    else:
        with_stop = TOKENIZER.decode(output[:count], skip_special_tokens=False)
        assert stop in with_stop
        assert TOKENIZER.decode(output[:count], skip_special_tokens=skip).startswith(shown)
        # No earlier token completed a stop string.
        before = TOKENIZER.decode(output[: count - 1], skip_special_tokens=skip)
        assert not any(s in before for s in stops)
