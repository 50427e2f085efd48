"""`octavo plan` agrees with what the engine allocates, and with arithmetic done by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.bench.plan.capacity import PlanRequest, capacity, decode_shape, step_floor, weight_bits
from octavo.core.contracts.executor import DeviceMemory
from octavo.engine.capacity import no_room, too_long
from octavo.plugins.executors.accelerators import load
from octavo.server.command_line.main import main
from octavo.testing.model_folder import write_model_folder

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
WISH = PlanRequest("bfloat16", "bfloat16", "none", 8192, 256, 16, 0.9)


def planned(tmp_path: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    file = tmp_path / "plan.json"
    assert main(["plan", *arguments, "--json", str(file)]) == status
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def against_the_engine(plan: dict[str, Any], llm: LLM) -> None:
    report = llm.report
    assert plan["num_parameters"] == report.num_parameters
    assert plan["parameters_exact"]
    # The engine counts buffers (rope tables) as weights too.
    assert plan["weight_bytes"] == pytest.approx(report.weight_bytes, rel=0.02)
    assert plan["num_blocks"] == report.num_blocks
    assert plan["kv_bytes"] == report.kv_bytes
    assert plan["concurrency"] == pytest.approx(report.concurrency)
    assert plan["max_model_len"] == report.max_model_len


def test_a_tiny_model_is_as_planned(tmp_path: Path, capsys) -> None:
    folder = write_model_folder(tmp_path / "model", max_model_len=512)
    arguments = [str(folder), "--device", "cpu", "--max-num-seqs", "6", "--block-size", "16"]
    plan = planned(tmp_path, *arguments)
    assert "6.0 sequences of 512 tokens" in capsys.readouterr().out
    config = {"model": {"weight_source": "dummy"}, "attention": {"backend": "torch"}}
    config |= {"graph": {"runner": "eager"}, "executor": {"device": "cpu"}}
    with LLM(str(folder), config=config, max_num_seqs=6) as llm:
        against_the_engine(plan, llm)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "packed", "int8", "int4"])
def test_the_demo_model_is_as_planned(
    demo_model: str, tmp_path: Path, quantization: str, capsys
) -> None:
    arguments = [demo_model, "--device", "cpu", "--max-num-seqs", "4", "--max-model-len", "1024"]
    plan = planned(tmp_path, *arguments, "--quantization", quantization)
    config = {"model": {"quantization": quantization}, "executor": {"device": "cpu"}}
    with LLM(demo_model, config=config, max_num_seqs=4, max_model_len=1024) as llm:
        against_the_engine(plan, llm)


def test_an_8b_model_by_hand() -> None:
    found = capacity(LLAMA_8B, WISH, 80 * 2**30, "cuda")
    assert found.params == 8_030_261_248  # as its model card counts
    assert found.weights == 2 * found.params
    assert found.kv_per_token == 2 * 32 * 8 * 128 * 2
    assert found.pool == found.blocks * 16 * found.kv_per_token
    assert found.weights + found.activations + found.pool <= 0.9 * 80 * 2**30
    assert found.fits
    two = capacity(LLAMA_8B, PlanRequest(**{**vars(WISH), "devices": 2}), 80 * 2**30, "cuda")
    assert two.weights == found.weights // 2
    assert two.kv_per_token == found.kv_per_token // 2
    sixteen = capacity(LLAMA_8B, PlanRequest(**{**vars(WISH), "devices": 16}), 80 * 2**30, "cuda")
    assert sixteen.kv_per_token == found.kv_per_token // 8  # heads are not divided further


def test_the_floor_of_a_step_is_its_bytes_over_the_bandwidth() -> None:
    found, device = capacity(LLAMA_8B, WISH, 80 * 2**30, "cuda"), load("h100")
    embedding = 128256 * 4096 * 2
    read = found.weights - embedding + 1000 * found.kv_per_token
    seconds = step_floor(found.size, device, WISH, decode_shape(1, 1000))
    assert seconds == pytest.approx(read / 3.35e12, rel=1e-3)


def test_quantized_weights() -> None:
    def request(name: str) -> PlanRequest:
        return PlanRequest(**{**vars(WISH), "quantization": name})

    assert weight_bits(LLAMA_8B, request("none")) == 16
    assert weight_bits(LLAMA_8B, request("int8")) == 8.5
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    assert weight_bits(LLAMA_8B | {"quantization_config": awq}, WISH) == pytest.approx(4.156, 1e-3)
    fp8 = {"quant_method": "fp8"}
    assert weight_bits(LLAMA_8B | {"quantization_config": fp8}, WISH) == 8


def test_what_does_not_fit_says_how_many_devices_would_do(tmp_path: Path, capsys) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B))
    plan = planned(tmp_path, str(file), "--device", "t4", status=1)
    assert plan["devices_needed"] == 2
    out = capsys.readouterr().out
    assert "2 devices would do" in out
    # In the words and numbers of an engine's start.
    shares = DeviceMemory(
        plan["memory_bytes"],
        0.9,
        plan["weight_bytes"],
        plan["activation_bytes"],
        tables=plan["table_bytes"],
    )
    assert shares.tables == 256 * (8 * 8192 + 5 * 128256)
    assert "tables        173 MiB (penalties, allowed tokens)" in out
    assert f"does not fit: {no_room(shares, 16 * plan['kv_bytes_per_token'])}; 2 dev" in out
    assert plan["longest_context"] == 0
    assert not plan["starts"]
    less = ["--max-num-batched-tokens", "512", "--gpu-memory-utilization", "0.7"]
    plan = planned(tmp_path, str(file), "--device", "l4", *less, status=1)
    needed, longest = 8192 * plan["kv_bytes_per_token"], plan["longest_context"]
    assert plan["problem"] == too_long(8192, needed, plan["kv_bytes"], longest)
    assert 0 < longest == plan["num_blocks"] * 16 < 8192
    assert "an engine starts all the same" in capsys.readouterr().out
    plan = planned(
        tmp_path, str(file), "--device", "l4", *less, "--max-model-len", "8192", status=1
    )
    assert "an engine starts" not in capsys.readouterr().out
    assert not plan["starts"]
    plan = planned(tmp_path, str(file), "--device", "t4:2", "--dtype", "float16")
    assert plan["fits"]
    plan = planned(tmp_path, str(file), "--device", "h100:2", "--kv-cache-dtype", "fp8")
    assert plan["kv_bytes_per_token"] == 32 * 2 * 4 * 128
    decode = plan["floors"]["decode"]
    assert decode["1"]["seconds"] < decode["32"]["seconds"]


def test_devices_divide_heads_and_mlp_evenly(tmp_path: Path, capsys) -> None:
    file = tmp_path / "config.json"
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
    file.write_text(json.dumps(LLAMA_8B | heads | {"hidden_size": 576, "head_dim": 64}))
    plan = planned(tmp_path, str(file), "--device", "h100:7", status=1)
    assert (plan["fits"], plan["starts"], plan["devices_needed"]) == (False, False, 1)
    out = capsys.readouterr().out
    what = "9 query heads, 3 KV heads, intermediate_size 1536"
    assert f"does not fit: 7 devices cannot divide evenly: {what}; 1 device would do" in out
    assert planned(tmp_path, str(file), "--device", "h100:3")["fits"]
    assert "tensor parallelism: heads, MLP and vocabulary divided by 3" in capsys.readouterr().out
    plan = planned(tmp_path, str(file), "--device", "h100:9", status=1)
    assert plan["problem"] == "9 devices cannot divide evenly: intermediate_size 1536"
    # More devices than KV heads: each head is held by two.
    file.write_text(json.dumps(LLAMA_8B))
    assert planned(tmp_path, str(file), "--device", "h100:16")["fits"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h1000"], "expected a profile or a YAML file, got 'h1000'"),
        (["--device", "h100:0"], "expected NAME or NAME:NUMBER"),
        (["--device", "cpu:2"], "--device cpu takes no number"),
        (["--max-model-len", "9000"], "at most 8192 tokens"),
        (["--gpu-memory-utilization", "2"], "expected (0, 1]"),
    ],
)
def test_mistakes_of_plan(arguments: list[str], message: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B))
    assert main(["plan", str(file), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "nowhere.json")]) == 2
