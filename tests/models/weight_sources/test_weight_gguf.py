"""GGUF files: tensors, configuration and rope against transformers; damage; the cache."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from octavo.core.contracts import NoOptions
from octavo.core.contracts.weight_source import WeightSourceContext
from octavo.core.errors import ModelError, ModelNotFound, UnsupportedModel, WeightError
from octavo.models.families.config import decoder_config
from octavo.models.weight_sources.gguf_file import GGUFFile, make_private

TINY: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
}
TOKENS = [(5 * i * i + i) % 70 for i in range(50)]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{suffix}"
    return f"{NAMES[stem]}.{suffix}"


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k of a Llama."""
    shape = values.shape
    halves = values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(shape))


def write(
    path: Path,
    model: Any,
    architecture: str,
    kind: Kind = Kind.F32,
    *,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Write a model of transformers as llama.cpp's converter would; the values that it holds."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else 16)
    for key, value in (extra or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        (writer.add_uint32 if isinstance(value, int) else add)(key, value)
    held = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if kind != Kind.F32 and values.ndim == 2:
            raw = gguf.quantize(values, kind)
            held[name] = gguf.dequantize(raw, kind)
        else:
            held[name] = values
        heads = 0
        if architecture == "llama" and "q_proj" in name:
            heads = config.num_attention_heads
        if architecture == "llama" and "k_proj" in name:
            heads = config.num_key_value_heads
        values = permute(values, heads) if heads else values
        if kind != Kind.F32 and values.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), values)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def reference(config: Any, model_class: Any) -> Any:
    torch.manual_seed(1)
    model = model_class._from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
        parameter.requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def llama() -> Any:
    return reference(LlamaConfig(**TINY), LlamaForCausalLM)


def open_file(path: Path) -> GGUFFile:
    return GGUFFile(
        NoOptions(), WeightSourceContext(str(path), None, None, path.parent / "cache", False)
    )


def assert_same(doubles: Any, path: Path, model: Any) -> GGUFFile:
    source = open_file(path)
    ours, _ = doubles.build(source.config(), 128)
    ours.load_weights((name, tensor.float()) for name, tensor in source.tensors())
    with torch.inference_mode():
        want = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(doubles.logits(ours, TOKENS), want, atol=1e-4, rtol=0)
    return source


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_llama(doubles: Any, tmp_path: Path, llama: Any, kind: str) -> None:
    path = tmp_path / "model.gguf"
    held = write(path, llama, "llama", Kind[kind])
    quantized = reference(LlamaConfig(**TINY), LlamaForCausalLM)
    quantized.load_state_dict({name: torch.from_numpy(value) for name, value in held.items()})
    source = assert_same(doubles, path, quantized)
    found = dict(source.tensors())
    assert found.keys() == held.keys()
    for name, values in held.items():
        assert torch.equal(found[name].float(), torch.from_numpy(values)), name
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    assert found["model.layers.0.mlp.up_proj.weight"].dtype == dtype.get(kind, torch.float32)
    names = {"F32": "float32", "F16": "float16"}
    assert source.config()["dtype"] == names.get(kind, "bfloat16")


def test_llama_biases(doubles: Any, tmp_path: Path) -> None:
    config = LlamaConfig(**TINY, attention_bias=True, mlp_bias=True)
    model = reference(config, LlamaForCausalLM)
    write(tmp_path / "model.gguf", model, "llama")
    assert_same(doubles, tmp_path / "model.gguf", model)


def test_qwen2(doubles: Any, tmp_path: Path) -> None:
    model = reference(Qwen2Config(**TINY, tie_word_embeddings=True), Qwen2ForCausalLM)
    write(tmp_path / "model.gguf", model, "qwen2")
    source = assert_same(doubles, tmp_path / "model.gguf", model)
    assert source.config()["tie_word_embeddings"] is True


def test_qwen3(doubles: Any, tmp_path: Path) -> None:
    model = reference(Qwen3Config(**TINY, head_dim=24), Qwen3ForCausalLM)
    write(tmp_path / "model.gguf", model, "qwen3")
    source = assert_same(doubles, tmp_path / "model.gguf", model)
    assert source.config()["head_dim"] == 24
    assert source.config()["tie_word_embeddings"] is False


def test_llama3_rope_is_found_from_its_divisors(doubles: Any, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    sizes = {**TINY, "head_dim": 64, "max_position_embeddings": 131072}
    model = reference(LlamaConfig(**sizes, rope_parameters=rope), LlamaForCausalLM)
    plain = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert np.median(divisors) > 1 or divisors.max() == 32
    write(tmp_path / "model.gguf", model, "llama", tensors={"rope_freqs.weight": divisors})
    source = assert_same(doubles, tmp_path / "model.gguf", model)
    assert source.config()["rope_parameters"] == rope
    odd = tmp_path / "odd.gguf"
    write(odd, model, "llama", tensors={"rope_freqs.weight": divisors + 0.1})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is of no known rope scaling"):
        open_file(odd).config()


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(doubles: Any, tmp_path: Path, kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    extra = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 32
        extra["llama.rope.scaling.original_context_length"] = 32
    model = reference(LlamaConfig(**TINY, rope_parameters=rope), LlamaForCausalLM)
    write(tmp_path / "model.gguf", model, "llama", extra=extra)
    assert_same(doubles, tmp_path / "model.gguf", model)


def test_configuration(tmp_path: Path, llama: Any) -> None:
    extra = {
        "llama.attention.sliding_window": 9,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.padding_token_id": 0,
    }
    write(tmp_path / "model.gguf", llama, "llama", extra=extra)
    source = open_file(tmp_path / "model.gguf")
    config = source.config()
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert (config["vocab_size"], config["bos_token_id"]) == (70, 1)
    assert decoder_config(config).windows == (9, 9)
    assert source.generation_config() == {
        "bos_token_id": 1,
        "pad_token_id": 0,
        "eos_token_id": [2, 5],
    }
    assert source.tokenizer_dir() is None


# ---- the cache -----------------------------------------------------------------------------------


def test_second_start_reads_the_cache(
    tmp_path: Path, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = tmp_path / "model.gguf", tmp_path / "cache" / "gguf"
    write(path, llama, "llama")
    first = open_file(path)
    assert first.config()
    assert [file.name for file in cache.glob("*/*.safetensors")] == []
    list(first.tensors())
    (converted,) = cache.iterdir()
    for folder in (cache, converted):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with monkeypatch.context() as patch:
        patch.setattr("octavo.models.weight_sources.gguf_metadata.read_gguf", None)
        again = open_file(path)
        assert again.config() == first.config()
        assert len(list(again.tensors())) == len(llama.state_dict())
    os.utime(path, ns=(1, 1))
    list(open_file(path).tensors())
    (renewed,) = cache.iterdir()
    assert renewed != converted
    assert {file.name for file in renewed.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


def killed_at(monkeypatch: pytest.MonkeyPatch, path: Path) -> Path:
    """Convert until half the weights are written, as far as a process gets that is killed then."""

    def half(file: Path, headers: Any, contents: Any) -> None:
        file.with_name(f".{file.name}.a1b2").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("octavo.models.weight_sources.gguf_file.write_tensors", half)
        with pytest.raises(KeyboardInterrupt):
            list(open_file(path).tensors())
    (left,) = (path.parent / "cache" / "gguf").glob("*/.*")
    return left


def test_what_a_killed_conversion_left_is_removed(
    tmp_path: Path, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    write(path, llama, "llama")
    left = killed_at(monkeypatch, path)
    list(open_file(path).tensors())
    assert not left.exists()
    left.write_bytes(b"half")  # of a process that another one has overtaken
    list(open_file(path).tensors())
    assert not left.exists()


def test_a_conversion_that_runs_is_waited_for(
    tmp_path: Path, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    write(path, llama, "llama")
    left = killed_at(monkeypatch, path)
    converter = open_file(path)
    entered, go_on = threading.Event(), threading.Event()
    write_weights = converter._write_weights

    def slowly(file: Path) -> None:
        left.write_bytes(b"being written")
        entered.set()
        assert go_on.wait(60)
        write_weights(file)
        left.unlink()

    monkeypatch.setattr(converter, "_write_weights", slowly)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: list(converter.tensors()))
        assert entered.wait(60)
        second_source = open_file(path)
        monkeypatch.setattr(second_source, "_write_weights", None)  # it finds the first one's
        second = threads.submit(lambda: list(second_source.tensors()))
        assert left.read_bytes() == b"being written"
        go_on.set()
        assert len(first.result(60)) == len(second.result(60)) == len(llama.state_dict())


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_damaged_cache_is_rebuilt(
    tmp_path: Path, llama: Any, caplog: pytest.LogCaptureFixture, keep: float
) -> None:
    path = tmp_path / "model.gguf"
    write(path, llama, "llama")
    before = {name: tensor.clone() for name, tensor in open_file(path).tensors()}
    (file,) = (tmp_path / "cache" / "gguf").glob("*/model.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[: keep if isinstance(keep, int) else int(keep * len(whole))])
    after = dict(open_file(path).tensors())
    assert file.read_bytes() == whole
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "truncated or damaged; it is converted anew" in caplog.text


def test_damaged_texts_of_a_cache_are_rebuilt(tmp_path: Path, llama: Any) -> None:
    path = tmp_path / "model.gguf"
    write(path, llama, "llama")
    source = open_file(path)
    config = source.config()
    list(source.tensors())
    (file,) = (tmp_path / "cache" / "gguf").glob("*/config.json")
    weights = (file.parent / "model.safetensors").stat().st_mtime_ns
    for text in ("", file.read_text()[:20]):
        file.write_text(text)
        assert open_file(path).config() == config
    assert (file.parent / "model.safetensors").stat().st_mtime_ns == weights


def test_a_full_cache_is_named(tmp_path: Path, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    write(path, llama, "llama")

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("octavo.models.weight_sources.gguf_file.write_tensors", full)
    with pytest.raises(
        ModelError, match=r"No space left .* set OCTAVO_CACHE_DIR to another folder"
    ):
        list(open_file(path).tensors())


def test_cache_of_another_user_is_refused(
    tmp_path: Path, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "model.gguf", llama, "llama")
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(PermissionError, match="belongs to user"):
        make_private(tmp_path / "cache")
    with pytest.raises(ModelError, match=r"model\.gguf: cannot write .* belongs to user"):
        open_file(tmp_path / "model.gguf").config()


def test_cache_that_cannot_be_written(tmp_path: Path, llama: Any) -> None:
    write(tmp_path / "model.gguf", llama, "llama")
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(ModelError, match=r"the converted model .*OCTAVO_CACHE_DIR"):
        open_file(tmp_path / "model.gguf").config()


# ---- damage --------------------------------------------------------------------------------------


def test_truncation_anywhere_is_an_error_that_names_the_file(tmp_path: Path, llama: Any) -> None:
    path = tmp_path / "model.gguf"
    write(path, llama, "llama")
    whole = path.read_bytes()
    for keep in [*range(0, 400, 7), *range(400, len(whole), len(whole) // 40), len(whole) - 40]:
        path.write_bytes(whole[:keep])
        with pytest.raises(WeightError, match=r"model\.gguf: truncated or damaged"):
            open_file(path).config()


def test_other_damage(tmp_path: Path, llama: Any) -> None:
    path = tmp_path / "model.gguf"
    write(path, llama, "llama")
    whole = path.read_bytes()
    for at, data, message in (
        (0, b"ABCD", "begins with b'ABCD'"),
        (4, b"\x09\0\0\0", "version 9 is not read"),
        (8, b"\xff" * 8, "the file ends at byte|dimensions"),
        (16, b"\xff" * 8, "the file ends at byte|unknown"),
    ):
        path.write_bytes(whole[:at] + data + whole[at + len(data) :])
        with pytest.raises(WeightError, match=message):
            open_file(path).config()


def test_what_is_not_converted(tmp_path: Path, llama: Any) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelNotFound, match=r"no such file: '.*model\.gguf'"):
        open_file(path)
    write(path, llama, "gptneox")
    with pytest.raises(UnsupportedModel, match="GGUF architecture 'gptneox': known: llama, qwen2"):
        open_file(path).config()
    for extra, message in (
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope'"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer of kind 'bert'"),
    ):
        write(path, llama, "llama", extra=extra)
        with pytest.raises(UnsupportedModel, match=message):
            open_file(path).config()
    write(path, llama, "llama", extra={"tokenizer.ggml.model": "gpt2"})
    with pytest.raises(WeightError, match=r"lack 'tokenizer\.ggml\.tokens'"):
        open_file(path).config()
    write(path, llama, "llama", tensors={"blk.0.odd.weight": np.ones(3, np.float32)})
    with pytest.raises(WeightError, match=r"tensor 'blk\.0\.odd\.weight' has no place in a llama"):
        list(open_file(path).tensors())


def test_config_is_json(tmp_path: Path, llama: Any) -> None:
    write(tmp_path / "model.gguf", llama, "llama")
    config = open_file(tmp_path / "model.gguf").config()
    assert json.loads(json.dumps(config)) == config
