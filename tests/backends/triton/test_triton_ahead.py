"""Kernels compiled ahead of time, for devices that are not here, against the table of costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SAMPLE = [
    "decode bf16 kv e4m3 head 128 block 16 G 4",
    "kv_write bf16 kv bf16 head 128 block 16 G 4",
    "gumbel draw",
    "quantize_rows bf16 to int8",
]


@pytest.fixture(scope="module")
def table():
    import triton

    from octavo.backends.triton.ahead import TABLE

    found = json.loads(TABLE.read_text())
    if found["triton"] != triton.__version__:
        pytest.skip(f"the table is of Triton {found['triton']}, this is {triton.__version__}")
    return found["kernels"]


def compiled(folder, *arguments):
    """The same in a process of its own: this one interprets kernels."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "octavo.backends.triton.ahead", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)["kernels"]


def near(got, wanted):
    """The same launch; registers may move a little with the ptxas that is installed."""
    assert got["warps"] == wanted["warps"]
    assert got["shared"] == wanted["shared"]
    assert abs(got["registers"] - wanted["registers"]) <= 8
    assert got["spilled"] <= wanted["spilled"] + 16


def test_a_sample_costs_what_the_table_says(table, tmp_path):
    made = compiled(tmp_path, "--sm", "90", *SAMPLE)
    assert set(made) >= set(SAMPLE)
    for name, by_device in made.items():
        for kernel, cost in by_device["sm_90"].items():
            near(cost, table[name]["sm_90"][kernel])


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    "parts",
    [
        ("decode",),
        ("prefill",),
        ("kv_write", "rms_norm", "gate", "quantize", "copy", "gumbel", "nucleus"),
    ],
    ids=["decode", "prefill", "others"],
)
def test_everything_costs_what_the_table_says(table, tmp_path, parts):
    from octavo.backends.triton.variants import VARIANTS

    names = [each.name for each in VARIANTS if any(part in each.name for part in parts)]
    made = compiled(tmp_path, *parts)
    assert set(made) == set(names)
    for name, by_device in made.items():
        assert set(by_device) == {"sm_80", "sm_90", "sm_100"}
        for device, kernels in by_device.items():
            assert set(kernels) == set(table[name][device])
            for kernel, cost in kernels.items():
                near(cost, table[name][device][kernel])


def test_the_table_is_complete_and_every_program_fits(table):
    from octavo.backends.triton.ahead import SHARED_MOST
    from octavo.backends.triton.variants import VARIANTS

    assert set(table) == {variant.name for variant in VARIANTS}
    for name, by_device in table.items():
        for device, kernels in by_device.items():
            for kernel, cost in kernels.items():
                assert cost["shared"] <= SHARED_MOST[int(device[3:])], (name, device, kernel)
                assert cost["registers"] <= 255
                assert cost["spilled"] <= 512, (name, device, kernel)


def test_variants_cover_what_the_kernels_take():
    from octavo.backends.triton.support import BLOCK_SIZES
    from octavo.backends.triton.variants import VARIANTS

    names = [variant.name for variant in VARIANTS]
    for dtype in ("fp32", "fp16", "bf16"):
        for kernel in ("decode", "prefill", "kv_write"):
            for kv in (dtype, "e4m3"):
                assert any(name.startswith(f"{kernel} {dtype} kv {kv} ") for name in names)
        for kernel in ("rms_norm residual", "gate silu", "gate gelu", "block_copy"):
            assert f"{kernel} {dtype}" in names
        for code in ("int8", "e4m3", "e5m2"):
            assert f"quantize_rows {dtype} to {code}" in names
    for size in (64, 80, 96, 128, 256):
        assert any(f"head {size} " in name for name in names)
    for size in BLOCK_SIZES:
        assert any(f"block {size} " in name for name in names)


ANYWHERE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from octavo.backends.triton.ahead import captured
from octavo.backends.triton.decode import paged_decode
from octavo.backends.triton.kv_write import write_kv
from octavo.backends.triton.prefill import paged_prefill
from octavo.testing.device_attention import attention_spec

q, pool, cos_sin = torch.empty(8, 4, 64), torch.empty(2, 9, 16, 2, 64), torch.empty(64, 64)
table, spec = torch.zeros(8, 16, dtype=torch.int32), attention_spec(4, 2, 64, rope_dim=64)
with captured(90) as launches:
    for first in range(4):
        numbers = torch.zeros(64, dtype=torch.int32)[first:]
        places = torch.zeros(64, dtype=torch.int64)[first:]
        rope = {"positions": places, "cos_sin": cos_sin}
        write_kv(q[:, :2], q[:, 2:], *pool, places, **rope)
        paged_decode(q, *pool, table, numbers, q, spec, **rope)
        tiles = (numbers, numbers)
        paged_prefill(q, *pool, table, numbers, numbers, tiles, q, spec, **rope)
backend = make_backend(GPUTarget("cuda", 90, 32))
found = set()
for function, args, kwargs in launches:
    bind = create_function_from_signature(function.signature, function.params, backend)
    found.add((function.__name__, str(bind(*args, debug=False, **kwargs)[1])))
print(len(launches), len(found))
"""


def test_a_part_of_a_batch_is_nothing_to_compile_anew_for():
    """A phase's rows begin anywhere in the arrays of a batch."""
    environment = {**os.environ}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", ANYWHERE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.split() == ["12", "3"], done.stdout + done.stderr[-2000:]
