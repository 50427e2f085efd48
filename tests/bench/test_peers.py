"""`octavo bench peers`: engines in turn in their own processes, and the floor of the machine."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from octavo.bench.floor import Machine, Work, decode_floor, floor, measure_machine
from octavo.bench.peers import PeerError, child, lines, measure_rows, work_of
from octavo.bench.workload import Shape

MACHINE = Machine(bytes_per_s=1e9, flops=1e9, isa="test")
WORK = Work(layers=10**6, head=5 * 10**5, layer_bytes=4 * 10**6, head_bytes=2 * 10**6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    found = tmp_path_factory.mktemp("peers")
    LlamaForCausalLM(config).save_pretrained(found)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.save(str(found / "tokenizer.json"))
    return found


def test_a_step_is_bound_by_memory_or_by_arithmetic() -> None:
    assert decode_floor(MACHINE, WORK, 1) == pytest.approx(6e-3)  # 6 MB at 1 GB/s
    assert decode_floor(MACHINE, WORK, 10) == pytest.approx(3e-2)  # 2 * 1.5 M * 10 operations
    whole = floor(MACHINE, WORK, Shape(2, 100, 5))
    prompts = 2 * (10**6 * 200 + 5 * 10**5 * 2) / 1e9  # the head for the last tokens only
    assert whole == pytest.approx(prompts + 4 * 6e-3)


def test_work_counts_the_head_once_a_token() -> None:
    report = {"num_parameters": 1000, "weight_bytes": 2000}
    model = {"vocab_size": 20, "hidden_size": 10}
    assert work_of(report, model) == Work(600, 200, 1200, 400)
    assert work_of(report, {**model, "tie_word_embeddings": True}) == Work(800, 200, 1600, 400)


@pytest.mark.slow
def test_engines_take_turns_and_do_the_same_work(folder: Path) -> None:
    args = Namespace(num_prompts=[1, 3], input_len=9, output_len=4, rounds=2)
    config = {"model": {"source": str(folder)}, "kv_cache": {"num_blocks": 40}}
    with (
        child({"engine": "octavo", "config": config}) as ours,
        child({"engine": "transformers", "folder": str(folder), "threads": 1}) as theirs,
    ):
        work = work_of(ours.about, json.loads((folder / "config.json").read_text()))
        limits = measure_machine(1)
        rows = measure_rows({"octavo": ours, "transformers": theirs}, args, limits, work)
    assert work.layers + 2 * work.head == ours.about["num_parameters"]
    assert limits.bytes_per_s > 1e8
    assert limits.flops > 1e8
    for row in rows:
        for seconds in row["engines"].values():
            assert 0 < row["floor"]["decode_s"] < seconds["decode_s"] < seconds["elapsed_s"]
            assert row["floor"]["elapsed_s"] < seconds["elapsed_s"]
    workload = {"input_len": 9, "output_len": 4, "rounds": 2}
    result = {"model": "m", "workload": workload, "threads": 1, "limits": vars(limits)}
    text = list(lines(result | {"rows": rows}))
    assert len(text) == 3 + 2 * 3
    assert [line.split()[:2] for line in text[3:6]] == [
        ["1", "octavo"],
        ["1", "transformers"],
        ["1", "floor"],
    ]


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (tmp_path / "errors").open("w+") as errors:
        settings = {"engine": "octavo", "config": {"model": {"source": str(tmp_path / "none")}}}
        with pytest.raises(PeerError, match="octavo ended"), child(settings, errors):
            pass
        errors.seek(0)
        said = errors.read()
        assert said.startswith("octavo: no such model")
        assert "Traceback" not in said
