"""Detokenization over tokenizers as they ship: the demo model's, and a byte-fallback vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from octavo.core.contracts import NoOptions
from octavo.core.contracts.tokenizer import Tokenizer, TokenizerContext
from octavo.core.contracts.weight_source import WeightSourceContext
from octavo.core.sampling_params import SamplingParams
from octavo.frontend.text.detokenizer import TextStream, TokenTable
from octavo.models.tokenizers.fast import FastTokenizer
from octavo.models.weight_sources.package import package_source

SEEDS = st.lists(st.integers(0, 10**6), min_size=1, max_size=30)


@pytest.fixture(scope="module")
def demo(demo_model: str, tmp_path_factory: pytest.TempPathFactory) -> TokenTable:
    source = package_source(
        NoOptions(),
        WeightSourceContext(
            source=demo_model,
            revision=None,
            download_dir=None,
            cache_dir=tmp_path_factory.mktemp("cache"),
            show_progress=False,
        ),
    )
    folder = source.tokenizer_dir()
    assert folder is not None
    context = TokenizerContext(folder=folder, config=source.config(), generation_config={})
    return TokenTable(FastTokenizer(NoOptions(), context))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> TokenTable:
    """As Llama 2's: words carry their space as U+2581, unknown characters fall into bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.é", "▁the", "▁of", "ing", "▁▁", "▁日"]
    backend = Backend(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")]
    )
    backend.add_special_tokens([AddedToken("<|tool|>", special=True)])
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    context = TokenizerContext(folder=folder, config={"eos_token_id": 2}, generation_config={})
    return TokenTable(FastTokenizer(NoOptions(), context))


def shown(table: TokenTable, prompt: list[int], output: list[int], skip: bool) -> str:
    detokenizer = table.detokenizer(prompt, skip_special_tokens=skip)
    return "".join(detokenizer.feed(token) for token in output) + detokenizer.flush()


def truth(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    return tokenizer.decode([*prompt, *output], skip_special_tokens=skip)[len(before) :]


def test_both_take_the_short_way(demo: TokenTable, byte_fallback: TokenTable) -> None:
    assert demo.joins_bytes
    assert byte_fallback.joins_bytes


@settings(max_examples=60)
@given(seeds=SEEDS, skip=st.booleans())
def test_demo_tokens_join_to_the_decoded_text(
    demo: TokenTable, seeds: list[int], skip: bool
) -> None:
    tokenizer = demo.tokenizer
    # Every third token is of the first ids, where special tokens and single bytes are.
    output = [s % 300 if place % 3 else s % tokenizer.vocab_size for place, s in enumerate(seeds)]
    prompt = tokenizer.encode("The capital of")
    assert shown(demo, prompt, output, skip) == truth(tokenizer, prompt, output, skip)


@settings(max_examples=60)
@given(text=st.text(max_size=40))
def test_demo_text_comes_back_and_is_never_taken_back(demo: TokenTable, text: str) -> None:
    tokenizer = demo.tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    assume(tokenizer.decode(ids) == text)  # its vocabulary lacks some bytes of rare planes
    detokenizer = demo.detokenizer(tokenizer.encode("x"))
    so_far = ""
    for token in ids:
        so_far += detokenizer.feed(token)
        assert text.startswith(so_far)
    assert so_far + detokenizer.flush() == text


@settings(max_examples=60)
@given(text=st.text(alphabet="abc the é日👍\n.", max_size=30), skip=st.booleans())
def test_byte_fallback_text_comes_back(byte_fallback: TokenTable, text: str, skip: bool) -> None:
    tokenizer = byte_fallback.tokenizer
    output = tokenizer.encode(text, add_special_tokens=False)
    for prompt in (tokenizer.encode("of"), [1, *tokenizer.encode("a")]):
        assert shown(byte_fallback, prompt, output, skip) == truth(tokenizer, prompt, output, skip)
    assert shown(byte_fallback, [1], output, True) == truth(tokenizer, [1], output, True) == text


def test_spaces_around_special_tokens_stay(byte_fallback: TokenTable) -> None:
    tokenizer = byte_fallback.tokenizer
    tool = tokenizer.vocab_size - 1
    word = tokenizer.encode("the", add_special_tokens=False)
    output = [*word, tool, *word, tool, tool, *word]
    for skip in (True, False):
        prompt = tokenizer.encode("a")
        assert shown(byte_fallback, prompt, output, skip) == truth(tokenizer, prompt, output, skip)


def test_demo_end_tokens_can_be_stop_strings(demo: TokenTable) -> None:
    tokenizer = demo.tokenizer
    output = tokenizer.encode("Paris.<|im_end|>\nand more", add_special_tokens=False)
    stream = TextStream(demo, [1], SamplingParams(stop=["<|im_end|>"]))
    text, stop, count = "", None, 0
    while stop is None:
        new, stop = stream.feed(output[count])
        text, count = text + new, count + 1
    assert (text, stop) == ("Paris.", "<|im_end|>")
    assert tokenizer.decode(output[:count], skip_special_tokens=False) == "Paris.<|im_end|>"
