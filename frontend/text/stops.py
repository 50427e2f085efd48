"""Stop strings in a stream of text.

Each stop string is an automaton (Knuth, Morris and Pratt) fed one character at a time: its state
is the length of the longest prefix of the stop string that the text ends with. So a match is found
wherever token borders are, the stop string that is complete first wins (of several complete at
the same character, the longest), and the text that must be held back is the longest state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class _Pattern:
    """One stop string. `through_hidden`: hidden special tokens are part of the text it sees."""

    __slots__ = ("fallback", "state", "text", "through_hidden")

    def __init__(self, text: str, through_hidden: bool) -> None:
        self.text = text
        self.through_hidden = through_hidden
        self.state = 0
        self.fallback = [0] * len(text)  # [k - 1]: the next shorter prefix that ends a k-prefix
        length = 0
        for position in range(1, len(text)):
            while length and text[position] != text[length]:
                length = self.fallback[length - 1]
            length += text[position] == text[length]
            self.fallback[position] = length

    def step(self, char: str) -> bool:
        """Take one character; whether the stop string is complete with it."""
        state = self.state
        while state and self.text[state] != char:
            state = self.fallback[state - 1]
        if self.text[state] == char:
            state += 1
        complete = state == len(self.text)
        self.state = self.fallback[state - 1] if complete else state
        return complete


class StopScanner:
    """Finds stop strings and holds back text that may become one.

    hidden_texts: texts of special tokens that are not shown. A stop string that contains one of
    them is searched in the text with special tokens, the others in the text that is shown.
    """

    def __init__(
        self, stops: Sequence[str], *, include: bool = False, hidden_texts: Iterable[str] = ()
    ) -> None:
        hidden = [text for text in hidden_texts if text]
        self._patterns = [_Pattern(stop, any(text in stop for text in hidden)) for stop in stops]
        self._through_hidden = [p for p in self._patterns if p.through_hidden]
        self._include = include
        self._first = frozenset(stop[0] for stop in stops)
        self._pending = ""
        # Of the latest characters, hidden ones included: "1" shown, "0" hidden.
        self._shown = ""
        self._span = max((len(p.text) for p in self._through_hidden), default=0)

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take text that is shown. Returns what may be shown now, and the stop string that ends
        the sequence, if one does. While not `armed`, a stop string is text as any other."""
        if self._first.isdisjoint(text) and not any(p.state for p in self._patterns):
            self._note(text, "1")
            return text, None
        stop, used = self._scan(self._patterns, text, armed)
        self._note(text[:used], "1")
        self._pending += text[:used]
        return self._release(stop)

    def feed_hidden(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take the text of a special token that is not shown."""
        if not self._through_hidden:
            return "", None
        stop, used = self._scan(self._through_hidden, text, armed)
        self._note(text[:used], "0")
        return self._release(stop)

    def flush(self) -> str:
        """The held text: nothing follows that could complete a stop string."""
        text, self._pending = self._pending, ""
        return text

    def _scan(
        self, patterns: list[_Pattern], text: str, armed: bool
    ) -> tuple[_Pattern | None, int]:
        for position, char in enumerate(text):
            complete = [pattern for pattern in patterns if pattern.step(char)]
            if complete and armed:
                return max(complete, key=lambda p: len(p.text)), position + 1
        return None, len(text)

    def _release(self, stop: _Pattern | None) -> tuple[str, str | None]:
        if stop is not None:
            before = self._pending[: len(self._pending) - self._visible(stop, len(stop.text))]
            self._pending = ""
            return (before + stop.text if self._include else before), stop.text
        held = max(self._visible(pattern, pattern.state) for pattern in self._patterns)
        cut = len(self._pending) - held
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text, None

    def _visible(self, pattern: _Pattern, length: int) -> int:
        """How many of the latest `length` characters that a pattern saw are shown."""
        if not pattern.through_hidden or not length:
            return length
        return self._shown[-length:].count("1")

    def _note(self, text: str, flag: str) -> None:
        if self._span:
            self._shown = (self._shown + flag * len(text))[-self._span :]
