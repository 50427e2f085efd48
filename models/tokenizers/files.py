"""What tokenizer files beside tokenizer.json say: special tokens, end tokens, chat templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo.core.contracts import Availability, ProbeContext
from octavo.core.contracts.tokenizer import TokenizerContext
from octavo.core.errors import ModelError
from octavo.models.json_files import read_json

TOKENIZER_JSON = "tokenizer.json"
DEFAULT_TEMPLATE = "default"
SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


def probe_fast(context: ProbeContext) -> Availability:
    """Needs a tokenizer.json."""
    if "tokenizer_dir" not in context.facts:
        return Availability(True)
    folder = context.facts["tokenizer_dir"]
    if folder is None:
        return Availability(False, "the model has no tokenizer files")
    if not (Path(folder) / TOKENIZER_JSON).is_file():
        return Availability(False, f"no {TOKENIZER_JSON} in {folder}")
    return Availability(True)


def probe_transformers(context: ProbeContext) -> Availability:
    """Needs any tokenizer files."""
    if context.facts.get("tokenizer_dir", "") is None:
        return Availability(False, "the model has no tokenizer files")
    return Availability(True, "imports torch")


def read_mapping(file: Path) -> dict[str, Any]:
    """A JSON file; empty when it is not there."""
    return read_json(file) if file.is_file() else {}


def special_tokens(folder: Path) -> dict[str, str]:
    """Text of the special tokens by their name (`bos_token`, ...), for chat templates."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        values = read_mapping(folder / file)
        extra = values.get("extra_special_tokens")
        named = {**values, **extra} if isinstance(extra, dict) else values
        for name, value in named.items():
            content = value.get("content") if isinstance(value, dict) else value
            known = name in SPECIAL_NAMES or (isinstance(extra, dict) and name in extra)
            if known and isinstance(content, str):
                found[name] = content
    return found


def chat_templates(folder: Path) -> dict[str, str]:
    """Templates by name; the usual one is `default`."""
    found: dict[str, str] = {}
    value = read_mapping(folder / "tokenizer_config.json").get("chat_template")
    if value is None:
        value = read_mapping(folder / "chat_template.json").get("chat_template")
    if isinstance(value, str):
        found[DEFAULT_TEMPLATE] = value
    elif isinstance(value, list):
        found |= {str(item["name"]): str(item["template"]) for item in value}
    elif isinstance(value, dict):
        found |= {str(name): str(text) for name, text in value.items()}
    single = folder / "chat_template.jinja"
    if single.is_file():
        found[DEFAULT_TEMPLATE] = single.read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    return found


def given_template(text: str) -> str:
    """A template that the configuration gives: its text, or the path of a file with it."""
    if "{%" in text or "{{" in text:
        return text
    path = Path(text).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"chat_template '{text}' is neither a Jinja template nor a readable file: {error}"
        ) from error


def end_tokens(
    context: TokenizerContext, tokens: Mapping[str, str], to_id: Callable[[str], int | None]
) -> tuple[int, ...]:
    """End tokens of the tokenizer, the configuration and the generation configuration."""
    found: list[int | None] = []
    if "eos_token" in tokens:
        found.append(to_id(tokens["eos_token"]))
    for source in (context.config, context.generation_config):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(int(token) for token in found if token is not None))


def begin_token(
    context: TokenizerContext, tokens: Mapping[str, str], to_id: Callable[[str], int | None]
) -> int | None:
    """The tokenizer's begin token, or the configuration's."""
    if "bos_token" in tokens:
        return to_id(tokens["bos_token"])
    value = context.config.get("bos_token_id")
    return value if isinstance(value, int) else None
