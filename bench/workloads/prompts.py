"""Files of prompts: JSON lines, or ShareGPT's one JSON array."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.errors import ConfigError


@dataclass(frozen=True)
class PromptRow:
    """text or messages, and how many tokens to generate."""

    output_len: int
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None


def read_prompts(path: Path, output_len: int) -> list[PromptRow]:
    """The prompts of a file. A row has `prompt` (text), `messages` (a conversation) or
    `conversations` (ShareGPT: the first human turn), and may have `output_tokens` (or
    `output_len`), else `output_len`. Raises `ConfigError` naming the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the prompts '{path}': {exc}") from None
    if text.lstrip().startswith("["):
        rows = list(enumerate(_json(text, f"{path}"), start=1))
    else:
        lines = enumerate(text.splitlines(), start=1)
        rows = [(n, _json(line, f"{path}:{n}")) for n, line in lines if line.strip()]
    return [found for n, row in rows if (found := _row(row, f"{path}:{n}", output_len))]


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as exc:
        raise ConfigError(f"{where}: not valid JSON: {exc}") from None


def _row(row: Any, where: str, output_len: int) -> PromptRow | None:
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object with prompt or messages")
    length = row.get("output_tokens", row.get("output_len", output_len))
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ConfigError(f"{where}: output_tokens: expected a positive number, got {length!r}")
    prompt, messages = row.get("prompt"), row.get("messages")
    if isinstance(prompt, str) and prompt:
        return PromptRow(length, text=prompt)
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return PromptRow(length, messages=tuple(messages))
    turns = row.get("conversations", row.get("conversation"))
    if isinstance(turns, list):
        human = [t.get("value") for t in turns if isinstance(t, dict) and t.get("from") != "system"]
        # ShareGPT has conversations that lack an answer; they serve nobody.
        return PromptRow(length, text=str(human[0])) if len(human) > 1 and human[0] else None
    raise ConfigError(f"{where}: expected prompt, messages or conversations")
