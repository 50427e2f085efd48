"""What `auto` chooses: the native kernels where they can be, else torch's operators, and why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.backends.cpu import build
from octavo.core.errors import PluginUnavailable
from octavo.models.families.decoder import Decoder

PARTS = ("quantization", "attention_backend", "sampler", "graph_runner")
PROMPT = {"prompt_token_ids": [5, 9, 14, 3, 77, 20]}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tied head."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=160,
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    found = tmp_path_factory.mktemp("choice")
    LlamaForCausalLM(config).save_pretrained(found)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(160)}, unk_token="w0"))
    words.save(str(found / "tokenizer.json"))
    return found


@contextmanager
def started(folder: Path, **sections: Any) -> Iterator[LLM]:
    """An engine that is closed again."""
    llm = LLM(config={"model": {"source": str(folder)}, "kv_cache": {"num_blocks": 20}} | sections)
    try:
        yield llm
    finally:
        llm.close()


def chosen(llm: LLM) -> dict[str, str]:
    return {choice.kind: choice.name for choice in llm.report.plugins if choice.kind in PARTS}


def rejected(llm: LLM) -> dict[str, str]:
    return dict(item for choice in llm.report.plugins for item in choice.rejected)


def answer(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    return list(llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.fixture(scope="session")
def usual(folder: Path) -> list[int]:
    """The answer of the native parts."""
    with started(folder) as llm:
        assert chosen(llm) == dict(zip(PARTS, ("packed", "cpu", "cpu", "native"), strict=True))
        assert not llm.report.notes
        return answer(llm)


@pytest.fixture
def forget() -> Iterator[None]:
    """The compiler that was found is forgotten before and after."""
    build.toolchain.cache_clear()
    yield
    build.toolchain.cache_clear()


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize("broken", [False, True])
def test_without_a_compiler_everything_works(
    folder: Path,
    usual: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: bool,
) -> None:
    """An empty PATH, or a compiler that fails: torch's operators, and the report says what is
    lost."""
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    if broken:
        compiler = tmp_path / "cc"
        compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo cc 0.1 && exit\nexit 3\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CC", str(compiler))
    else:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", "")
    with started(folder) as llm:
        assert answer(llm) == usual
        assert chosen(llm) == dict(zip(PARTS, ("none", "torch", "torch", "eager"), strict=True))
        why = "could not be compiled" if broken else "there is no C compiler"
        assert why in rejected(llm)["packed"]
        assert why in rejected(llm)["cpu"]
        assert "needs packed weights" in rejected(llm)["native"]
        assert llm.report.notes == (build.LOST,)
        assert any(build.LOST in line for line in llm.report.lines())


def test_reference_parts_by_name(folder: Path, usual: list[int]) -> None:
    with started(folder, attention={"backend": "torch"}) as llm:
        assert chosen(llm) == dict(zip(PARTS, ("packed", "torch", "cpu", "eager"), strict=True))
        assert "needs attention backend cpu, this is torch" in rejected(llm)["native"]
        assert answer(llm) == usual
    with started(folder, graph={"runner": "eager"}) as llm:
        assert chosen(llm) == dict(zip(PARTS, ("packed", "cpu", "cpu", "eager"), strict=True))
        assert answer(llm) == usual


def test_every_weight_is_kept_once_and_counted(folder: Path) -> None:
    """A tied head too, in whatever form; packing fills the last of 16 outputs up."""
    with started(folder, model={"source": str(folder), "quantization": "none"}) as llm:
        plain = llm.report
    for quantization, share in (("packed", 1.05), ("int8", 0.45), ("int4", 0.35)):
        with started(folder, model={"source": str(folder), "quantization": quantization}) as llm:
            assert llm.report.num_parameters == plain.num_parameters
            assert llm.report.weight_bytes < share * plain.weight_bytes


def test_a_model_that_is_no_plain_decoder(
    folder: Path, usual: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only the loaded model shows: the next best graph runner takes over."""
    monkeypatch.setattr(Decoder, "decoder_spec", lambda self: None)
    with started(folder) as llm:
        assert chosen(llm)["graph_runner"] == "eager"
        assert "plain decoders, Decoder is not one" in rejected(llm)["native"]
        assert answer(llm) == usual
    with pytest.raises(PluginUnavailable, match="Decoder is not one"):
        LLM(config={"model": {"source": str(folder)}, "graph": {"runner": "native"}})


@pytest.mark.slow
def test_a_second_start_compiles_nothing(folder: Path, tmp_path: Path) -> None:
    """Whole starts, with a compiler that counts what it is asked for."""
    log, compiler = tmp_path / "log", tmp_path / "cc"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || echo "$@" >> {log}\nexec {shutil.which("cc")} "$@"\n'
    )
    compiler.chmod(0o755)
    environment = os.environ | {"CC": str(compiler), "OCTAVO_CACHE_DIR": str(tmp_path / "cache")}
    code = (
        "from octavo import LLM\n"
        f"llm = LLM(config={{'model': {{'source': {str(folder)!r}}}}})\n"
        "print([choice.name for choice in llm.report.plugins])\n"
        "llm.close()\n"
    )
    for compiles in (True, False):
        log.write_text("")
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "'native'" in done.stdout
        assert bool(log.read_text()) == compiles
