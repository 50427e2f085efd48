"""tokenizer.json and tokenizer_config.json from the metadata of a GGUF file. No torch.

Two kinds: `gpt2`, byte-level BPE with merges, split into words as the model's kind of
pre-tokenizer says; and `llama`, SentencePiece BPE, whose merges follow from the pieces' scores.
tokenizer.json is the format of the `tokenizers` library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from octavo.core.errors import UnsupportedModel, WeightError, nearest
from octavo.models.weight_sources.gguf_metadata import GGUF


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# The regular expressions that Llama 3 and Qwen 2 publish in their tokenizer.json.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|{digits}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Words:
    """How text is split before merging. pattern: a regular expression, or None for GPT-2's own.
    single_digits: each digit is a word. whole: a word that is a token is never split. nfc: text is
    composed first. bos: a begin token is added unless the metadata say otherwise."""

    pattern: str | None = None
    single_digits: bool = False
    whole: bool = False
    nfc: bool = False
    bos: bool = False


_GPT2 = Words()
_LLAMA3 = Words(_WORDS.replace("{digits}", r"\p{N}{1,3}"), whole=True, bos=True)
_QWEN2 = Words(_WORDS.replace("{digits}", r"\p{N}"), nfc=True)
PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "smollm": Words(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def tokenizer_files(file: GGUF) -> dict[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json by name; empty when the file has no tokenizer.
    Raises `UnsupportedModel` for a kind that is not converted."""
    kind = file.get("tokenizer.ggml.model")
    if kind is None or kind == "none":
        return {}
    if kind not in ("gpt2", "llama"):
        known = nearest(str(kind), ("gpt2", "llama"))
        raise UnsupportedModel(f"{file.path}: tokenizer of kind '{kind}' is not converted: {known}")
    tokens, types = _vocabulary(file)
    if kind == "gpt2":
        model, bos = _byte_level(file, tokens, types)
    else:
        model, bos = _sentence_piece(file, tokens, types), True
    specials = {TokenType.CONTROL, TokenType.UNKNOWN}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(index, token, types[index] in specials)
            for index, token in enumerate(tokens)
            if types[index] in specials | {TokenType.USER_DEFINED}
        ],
        **model,
        "post_processor": _ends(file, tokens, bos, byte_level=kind == "gpt2"),
    }
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": _tokenizer_config(file, tokens),
    }


def _vocabulary(file: GGUF) -> tuple[list[str], list[int]]:
    tokens = file.get("tokenizer.ggml.tokens")
    if not tokens:
        raise WeightError(f"{file.path}: the metadata lack 'tokenizer.ggml.tokens'")
    types = file.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise WeightError(f"{file.path}: {len(tokens)} tokens but {len(types)} token types")
    return tokens, [int(kind) for kind in types]


def _byte_level(
    file: GGUF, tokens: Sequence[str], types: Sequence[int]
) -> tuple[dict[str, Any], bool]:
    pre = file.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in PRE_TOKENIZERS:
        known = nearest(str(pre), PRE_TOKENIZERS)
        raise UnsupportedModel(f"{file.path}: pre-tokenizer '{pre}' is not converted: {known}")
    words = PRE_TOKENIZERS[pre]
    merges = file.get("tokenizer.ggml.merges")
    if merges is None:
        raise WeightError(f"{file.path}: the metadata lack 'tokenizer.ggml.merges'")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps: list[dict[str, Any]] = []
    if words.single_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if words.pattern is not None:
        steps.append(
            {
                "type": "Split",
                "pattern": {"Regex": words.pattern},
                "behavior": "Isolated",
                "invert": False,
            }
        )
    steps.append({**byte_level, "use_regex": words.pattern is None})
    model = {
        "normalizer": {"type": "NFC"} if words.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**byte_level, "use_regex": True},
        # Unused ids stand for no text: they are padding of the embedding matrix.
        "model": _bpe(
            {t: i for i, t in enumerate(tokens) if types[i] != TokenType.UNUSED},
            [merge.split(" ", 1) for merge in merges],
            whole=words.whole,
        ),
    }
    return model, words.bos


def _sentence_piece(file: GGUF, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    scores = file.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise WeightError(f"{file.path}: expected {len(tokens)} 'tokenizer.ggml.scores'")
    unknown = file.get("tokenizer.ggml.unknown_token_id")
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    normalizers: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    pieces = {token: scores[i] for i, token in enumerate(tokens) if types[i] == TokenType.NORMAL}
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            {token: i for i, token in enumerate(tokens)},
            merges_of_pieces(pieces),
            unknown=None if unknown is None else tokens[unknown],
            byte_fallback=True,
        ),
    }


def merges_of_pieces(scores: dict[str, float]) -> list[list[str]]:
    """Every way to make a piece of two others, best piece first.

    SentencePiece merges the neighbours whose union has the highest score, which is BPE with the
    merges in this order.
    """
    found = [
        (-score, index, [piece[:cut], piece[cut:]])
        for index, (piece, score) in enumerate(scores.items())
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    found.sort(key=lambda item: item[:2])
    return [pair for _, _, pair in found]


def _bpe(
    vocabulary: dict[str, int],
    merges: list[list[str]],
    *,
    unknown: str | None = None,
    byte_fallback: bool = False,
    whole: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unknown is not None,
        "byte_fallback": byte_fallback,
        "ignore_merges": whole,
        "vocab": vocabulary,
        "merges": merges,
    }


def _added_token(index: int, token: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **flags, "special": special}


def _ends(
    file: GGUF, tokens: Sequence[str], bos_default: bool, *, byte_level: bool
) -> dict[str, Any] | None:
    """Begin and end tokens added around a text, where the file asks for them."""
    begin = _edge(file, "bos", bos_default)
    end = _edge(file, "eos", False)
    if begin is None and end is None:
        if not byte_level:
            return None
        return {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": True,
        }

    def template(kind: str, type_id: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": kind, "type_id": type_id}}
        edges = [
            None if i is None else {"SpecialToken": {"id": tokens[i], "type_id": type_id}}
            for i in (begin, end)
        ]
        return [part for part in (edges[0], text, edges[1]) if part is not None]

    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": template("A", 0) + template("B", 1),
        "special_tokens": {
            tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]}
            for i in (begin, end)
            if i is not None
        },
    }


def _edge(file: GGUF, name: str, default: bool) -> int | None:
    token = file.get(f"tokenizer.ggml.{name}_token_id")
    wanted = file.get(f"tokenizer.ggml.add_{name}_token", default)
    return int(token) if wanted and token is not None else None


def _tokenizer_config(file: GGUF, tokens: Sequence[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(file.own("context_length")),
    }
    for key, name in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        index = file.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None:
            if not 0 <= int(index) < len(tokens):
                raise WeightError(f"{file.path}: {name}_token_id {index} is not in the vocabulary")
            config[f"{key}_token"] = tokens[int(index)]
    template = file.get("tokenizer.chat_template")
    named = {
        name: file.get(f"tokenizer.chat_template.{name}")
        for name in file.get("tokenizer.chat_templates") or ()
    }
    if named:
        listed = {"default": template, **named}
        config["chat_template"] = [
            {"name": name, "template": text} for name, text in listed.items() if text is not None
        ]
    elif template is not None:
        config["chat_template"] = template
    return config
