"""Tokenizers made from GGUF metadata, against the tokenizers they were written from."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers.trainers import BpeTrainer

from octavo.core.contracts import NoOptions
from octavo.core.contracts.tokenizer import TokenizerContext
from octavo.core.contracts.weight_source import WeightSourceContext
from octavo.core.errors import UnsupportedModel, WeightError
from octavo.models.tokenizers.fast import FastTokenizer
from octavo.models.weight_sources.gguf_file import GGUFFile

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1234 years old, isn't it?",
    "def main():\n    print('hello world')\n\n    return 0\n",
    "Les élèves français ont 25 ans. Grüße! 你好世界 12 345 6789",
] * 3
TEXTS = [
    *CORPUS[:3],
    "",
    " x",
    "x  ",
    "12345 1,234.5 it'S WE'LL",
    "new\r\n\r\n lines \n\n  and\ttabs",
    "e\u0301 and é, 😀!",
    "<|end|>middle<|end|> <think>plain</think>",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def splitter(kind: str) -> Any:
    if kind == "smollm":
        return pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(False)])
    if kind == "gpt-2":
        return pre.ByteLevel(add_prefix_space=False)
    pattern = LLAMA3 if kind == "llama-bpe" else LLAMA3.replace("{1,3}", "")
    split = pre.Split(Regex(pattern), "isolated")
    return pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level(kind: str) -> Tokenizer:
    """A small tokenizer of a kind, as the models publish it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    tokenizer.normalizer = normalizers.NFC() if kind == "qwen2" else None
    tokenizer.pre_tokenizer = splitter(kind)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def metadata(tokenizer: Tokenizer) -> dict[str, Any]:
    vocabulary = tokenizer.get_vocab()
    added = tokenizer.get_added_tokens_decoder()
    types = dict.fromkeys(range(len(vocabulary)), 1)
    types |= {index: 3 if token.special else 4 for index, token in added.items()}
    return {
        "tokens": [token for token, _ in sorted(vocabulary.items(), key=lambda item: item[1])],
        "types": [types[index] for index in range(len(vocabulary))],
        "merges": [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]],
    }


def write(path: Path, model: str, values: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model(model)
    for key, value in values.items():
        {
            "pre": writer.add_tokenizer_pre,
            "tokens": writer.add_token_list,
            "types": writer.add_token_types,
            "merges": writer.add_token_merges,
            "scores": writer.add_token_scores,
            "bos": writer.add_bos_token_id,
            "eos": writer.add_eos_token_id,
            "eot": writer.add_eot_token_id,
            "unk": writer.add_unk_token_id,
            "add_bos": writer.add_add_bos_token,
            "add_space_prefix": writer.add_add_space_prefix,
            "template": writer.add_chat_template,
        }[key](value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(path: Path) -> FastTokenizer:
    cache = path.parent / "cache"
    source = GGUFFile(NoOptions(), WeightSourceContext(str(path), None, None, cache, False))
    folder = source.tokenizer_dir()
    assert folder is not None
    return FastTokenizer(
        NoOptions(), TokenizerContext(folder, source.config(), source.generation_config())
    )


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level(tmp_path: Path, kind: str) -> None:
    original = byte_level(kind)
    begin, end = (original.token_to_id(name) for name in ("<|begin|>", "<|end|>"))
    values = {"pre": kind, **metadata(original), "bos": begin, "eos": end}
    converted = convert(write(tmp_path / "model.gguf", "gpt2", values))
    for text in TEXTS:
        ids = original.encode(text).ids
        first = [begin] if kind == "llama-bpe" else []
        assert converted.encode(text) == first + ids, text
        assert converted.encode(text, add_special_tokens=False) == ids, text
        assert converted.decode(ids) == original.decode(ids)
        assert b"".join(map(converted.token_bytes, ids)).decode() == original.decode(
            ids, skip_special_tokens=False
        )
    assert converted.special_ids == {begin, end}
    assert converted.eos_token_ids == (end,)
    assert converted.bos_token_id == begin


def test_kinds_differ() -> None:
    """So that one kind taken for another would be seen."""
    words = {
        kind: str([w for t in TEXTS for w, _ in splitter(kind).pre_tokenize_str(t)])
        for kind in ("gpt-2", "smollm", "llama-bpe", "qwen2")
    }
    assert len(set(words.values())) == 4


def test_unused_ids_and_ends(tmp_path: Path) -> None:
    original = byte_level("qwen2")
    values = metadata(original)
    end = original.token_to_id("<|end|>")
    values["tokens"] += ["[PAD0]", "[PAD1]"]
    values["types"] += [5, 5]
    values |= {"pre": "qwen2", "eos": end, "eot": end - 1, "bos": end, "add_bos": True}
    converted = convert(write(tmp_path / "model.gguf", "gpt2", values))
    assert converted.vocab_size == len(values["tokens"]) - 2
    assert converted.token_bytes(converted.vocab_size) == b""
    assert converted.decode([converted.vocab_size]) == ""
    assert converted.eos_token_ids == (end, end - 1)
    assert converted.encode("a")[0] == end


def test_chat_templates(tmp_path: Path) -> None:
    values = {"pre": "gpt-2", **metadata(byte_level("gpt-2"))}
    converted = convert(
        write(tmp_path / "one.gguf", "gpt2", {**values, "template": "{{ messages[0].content }}!"})
    )
    assert converted.chat([{"role": "user", "content": "Hi"}]) == "Hi!"
    named = [
        {"name": "default", "template": "{{ 'default' }}"},
        {"name": "rag", "template": "{{ 'rag' }}"},
    ]
    converted = convert(write(tmp_path / "two.gguf", "gpt2", {**values, "template": named}))
    message = [{"role": "user", "content": "Hi"}]
    assert converted.chat(message) == "default"
    assert converted.chat(message, template="rag") == "rag"


# ---- SentencePiece -------------------------------------------------------------------------------


def pieces() -> dict[str, Any]:
    """A vocabulary as SentencePiece's BPE makes one: the later a piece, the lower its score."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.train_from_iterator(CORPUS, BpeTrainer(vocab_size=260, show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    merged = list(dict.fromkeys("".join(pair) for pair in model["merges"]))
    letters = [piece for piece in model["vocab"] if len(piece) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256
    scores = [0.0] * len(tokens)
    for rank, piece in enumerate(merged + letters):
        if set(piece) & set("你好"):  # these are spelled in bytes
            continue
        tokens.append(piece)
        types.append(1)
        scores.append(-float(rank))
    return {"tokens": tokens, "types": types, "scores": scores, "bos": 1, "eos": 2, "unk": 0}


def sentence_piece(text: str, values: dict[str, Any]) -> list[int]:
    """The algorithm itself: merge the neighbours whose union scores best, leftmost first."""
    ids = {token: i for i, token in enumerate(values["tokens"])}
    scores = dict(zip(values["tokens"], values["scores"], strict=True))
    symbols = list(text.replace(" ", "▁"))
    while True:
        unions = [a + b for a, b in itertools.pairwise(symbols)]
        known = [(-scores[union], at) for at, union in enumerate(unions) if union in scores]
        if not known:
            break
        at = min(known)[1]
        symbols[at : at + 2] = [unions[at]]
    found = []
    for symbol in symbols:
        bytes_of = [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        found += [ids[symbol]] if symbol in ids else bytes_of
    return found


def test_sentence_piece(tmp_path: Path) -> None:
    values = pieces()
    converted = convert(write(tmp_path / "model.gguf", "llama", values))
    texts = [*TEXTS[:3], "x  y", "12345", "new\nline\t", "你好世界 😀", " lead", "elf the thethe"]
    for text in texts:
        ids = converted.encode(text, add_special_tokens=False)
        assert ids == sentence_piece(" " + text, values), text
        assert converted.encode(text) == [1, *ids]
        assert converted.decode(ids) == text
        assert b"".join(map(converted.token_bytes, ids)).decode() == " " + text
    assert converted.decode([1, *converted.encode("fox"), 2]) == "fox"
    assert converted.token_bytes(3 + 10) == b"\n"
    assert converted.special_ids == {0, 1, 2}
    plain = convert(write(tmp_path / "plain.gguf", "llama", {**values, "add_space_prefix": False}))
    assert plain.encode("fox", add_special_tokens=False) == sentence_piece("fox", values)


def test_what_is_not_converted(tmp_path: Path) -> None:
    values = metadata(byte_level("gpt-2"))
    path = tmp_path / "model.gguf"
    with pytest.raises(UnsupportedModel, match="pre-tokenizer 'viking' is not converted: known"):
        convert(write(path, "gpt2", {**values, "pre": "viking"}))
    with pytest.raises(WeightError, match=r"lack 'tokenizer\.ggml\.merges'"):
        convert(write(path, "gpt2", {key: values[key] for key in ("tokens", "types")}))
    with pytest.raises(WeightError, match=r"expected \d+ 'tokenizer\.ggml\.scores'"):
        convert(write(path, "llama", {key: values[key] for key in ("tokens", "types")}))
    with pytest.raises(WeightError, match="but 3 token types"):
        convert(write(path, "gpt2", {**values, "types": [1, 1, 1]}))
    with pytest.raises(WeightError, match="eos_token_id 99999 is not in the vocabulary"):
        convert(write(path, "gpt2", {**values, "eos": 99999}))
