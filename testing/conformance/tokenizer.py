"""What every tokenizer promises."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from octavo.core.contracts.tokenizer import Tokenizer, TokenizerContext
from octavo.core.errors import RequestError
from octavo.testing.conformance.base import ConformanceSuite
from octavo.testing.model_folder import write_model_folder

TEXTS = (
    "",
    "a",
    "the quick brown fox jumps over",
    "  two spaces, a\ttab\nand lines\n\n",
    "Grüße, 日本語, emoji 👍🏽 and a flag 🇩🇪",
    "def f(x):\n    return x * 2  # code",
    "12345.6789e-10",
)


class TokenizerSuite(ConformanceSuite):
    """Subclass it with `provider`, or override `make` (a `Tokenizer` for the context).

    write_files: puts the files of a tokenizer into a folder; by default those of a byte-level one
    with a chat template. exact: whether decoding what was encoded gives the text back.
    """

    kind = "tokenizer"
    exact: ClassVar[bool] = True

    def write_files(self, folder: Path) -> None:
        """Files of a tokenizer that the implementation reads."""
        write_model_folder(folder)

    @contextmanager
    def tokenizer(self) -> Iterator[Tokenizer]:
        """The tokenizer under test, in a folder of its own."""
        with tempfile.TemporaryDirectory(prefix="octavo-conformance-") as name:
            folder = Path(name)
            self.write_files(folder)
            config: dict[str, Any] = {}
            if (folder / "config.json").exists():
                config = json.loads((folder / "config.json").read_text())
            made = self.make(TokenizerContext(folder, config, {}))
            assert isinstance(made, Tokenizer), f"make returned {type(made).__name__}"
            yield made

    def test_what_it_says_about_itself(self) -> None:
        """End tokens, first token and special tokens are ids below vocab_size."""
        with self.tokenizer() as tokenizer:
            size = tokenizer.vocab_size
            assert isinstance(tokenizer.eos_token_ids, tuple), "eos_token_ids is no tuple"
            assert isinstance(tokenizer.special_ids, frozenset), "special_ids is no frozenset"
            named = [*tokenizer.eos_token_ids, *tokenizer.special_ids]
            if tokenizer.bos_token_id is not None:
                named.append(tokenizer.bos_token_id)
            wrong = [token for token in named if not 0 <= token < size]
            assert not wrong, f"ids outside 0 to {size - 1}: {wrong}"

    def test_texts_come_back(self) -> None:
        """Decoding what was encoded without special tokens gives the text back."""
        with self.tokenizer() as tokenizer:
            for text in TEXTS:
                ids = tokenizer.encode(text, add_special_tokens=False)
                assert all(isinstance(token, int) for token in ids), f"{text!r}: ids are no ints"
                back = tokenizer.decode(ids)
                assert not self.exact or back == text, f"{text!r} came back as {back!r}"

    def test_bytes_of_tokens_join_to_the_text(self) -> None:
        """The bytes of the tokens of a text, joined, are the text in UTF-8."""
        with self.tokenizer() as tokenizer:
            for text in TEXTS:
                ids = tokenizer.encode(text, add_special_tokens=False)
                joined = b"".join(tokenizer.token_bytes(token) for token in ids)
                assert not self.exact or joined == text.encode(), f"{text!r}: bytes {joined!r}"

    def test_fewest_tokens_is_never_too_many(self) -> None:
        """fewest_tokens is an int from 0 to what encode gives without special tokens."""
        with self.tokenizer() as tokenizer:
            names = [tokenizer.token_bytes(token).decode() for token in tokenizer.special_ids]
            for text in (*TEXTS, " " * 300, "e\u0301" * 50, *(f" {name} " for name in names)):
                for repeated in (text, text * 40):
                    count = len(tokenizer.encode(repeated, add_special_tokens=False))
                    least = tokenizer.fewest_tokens(repeated)
                    assert isinstance(least, int), f"fewest_tokens gave {least!r}, expected an int"
                    assert 0 <= least <= count, (
                        f"{repeated[:20]!r} has {count} tokens, fewest_tokens says {least}"
                    )

    def test_special_tokens_are_hidden_on_request(self) -> None:
        """decode hides special tokens unless it is told not to, and shows their own text then."""
        with self.tokenizer() as tokenizer:
            ids = tokenizer.encode("ab", add_special_tokens=False)
            for special in sorted(tokenizer.special_ids)[:4]:
                mixed = [ids[0], special, *ids[1:]]
                assert tokenizer.decode(mixed) == "ab", f"special token {special} is not hidden"
                shown = tokenizer.decode(mixed, skip_special_tokens=False)
                name = tokenizer.token_bytes(special).decode()
                assert name, f"special token {special} has no text"
                assert name in shown, f"special token {special} is not shown: {shown!r}"

    def test_broken_utf8_becomes_replacement_characters(self) -> None:
        """A token that is part of a character decodes to U+FFFD and never raises."""
        with self.tokenizer() as tokenizer:
            ids = tokenizer.encode("👍", add_special_tokens=False)
            for count in range(1, len(ids)):
                text = tokenizer.decode(ids[:count])
                assert "\ufffd" in text or text == "", f"part of a character gave {text!r}"

    def test_ids_that_no_token_has(self) -> None:
        """Unknown ids have no bytes, and decode leaves them out."""
        with self.tokenizer() as tokenizer:
            ids = tokenizer.encode("ab", add_special_tokens=False)
            unknown = tokenizer.vocab_size + 5
            assert tokenizer.token_bytes(unknown) == b"", "an unknown id has bytes"
            assert tokenizer.decode([ids[0], unknown, *ids[1:]]) == "ab", "an unknown id shows"

    def test_a_lone_surrogate_is_the_callers_mistake(self) -> None:
        """A text that is no Unicode raises RequestError."""
        with self.tokenizer() as tokenizer:
            self._refused(lambda: tokenizer.encode("ab\ud83d"), "a lone surrogate")

    def test_chat_renders_the_messages(self) -> None:
        """chat gives text with every message's content, in order."""
        with self.tokenizer() as tokenizer:
            messages = self._messages("first thing", "second thing", "third thing")
            text = tokenizer.chat(messages)
            places = [text.find(str(message["content"])) for message in messages]
            assert -1 not in places, f"a message is missing in {text!r}"
            assert places == sorted(places), f"messages are out of order in {text!r}"

    def test_chat_continues_a_message(self) -> None:
        """With continue_final_message the text ends with the last message, and no end token."""
        with self.tokenizer() as tokenizer:
            messages = self._messages("question", "the answer so far")
            text = tokenizer.chat(
                messages, add_generation_prompt=False, continue_final_message=True
            )
            assert text.endswith("the answer so far"), f"the text ends with {text[-40:]!r}"

    def test_chat_refuses_what_is_no_conversation(self) -> None:
        """No messages, a message without role, or content of another kind raise RequestError."""
        wrong: list[Any] = [[], [{"content": "x"}], ["text"], [{"role": "user", "content": 3}]]
        with self.tokenizer() as tokenizer:
            for messages in wrong:
                self._refused(lambda m=messages: tokenizer.chat(m), f"chat({messages})")  # type: ignore[misc]

    def test_threads_agree(self) -> None:
        """Several threads at once get what one gets."""
        with self.tokenizer() as tokenizer:
            texts = [f"the fox number {i} jumps " * 5 for i in range(40)]
            wanted = [tokenizer.encode(text) for text in texts]
            with ThreadPoolExecutor(4) as pool:
                for _ in range(3):
                    got = list(pool.map(tokenizer.encode, texts))
                    assert got == wanted, "threads disturb each other"

    @staticmethod
    def _messages(*contents: str) -> list[Mapping[str, Any]]:
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]

    @staticmethod
    def _refused(call: Any, what: str) -> None:
        try:
            call()
        except RequestError:
            return
        except Exception as error:
            raise AssertionError(f"{what} raised {error!r}, expected RequestError") from error
        raise AssertionError(f"{what} was accepted")
