"""`octavo bench scheduler`: what it reports, and that its loads are what it says."""

from __future__ import annotations

import json

import pytest

from octavo.bench.scheduler import Load, policy_choice
from octavo.server.command_line.main import main


@pytest.mark.parametrize("policy", ["fcfs", "priority,fair"])
def test_it_reports_every_phase(tmp_path, capsys, policy):
    path = tmp_path / "out.json"
    argv = ["--running", "8", "--prompt-len", "40", "--steps", "20", "--policy", policy]
    assert main(["bench", "scheduler", *argv, "--waiting", "5", "--json", str(path)]) == 0
    numbers = json.loads(path.read_text())
    assert (numbers["running"], numbers["prompt_len"], numbers["policy"]) == (8, 40, policy)
    for load in ("", "mixed_"):
        for phase in ("schedule", "prepare", "commit", "catch_up", "total"):
            for end in ("", "_mean", "_p99"):
                assert numbers[f"{load}{phase}_ms{end}"] > 0
    assert numbers["add_request_us"] > 0
    assert numbers["reference_us"] > 0
    assert numbers["waiting_us"] != 0
    out = capsys.readouterr().out
    assert "decode-only steps: 8 sequences" in out
    assert "5 waiting requests add" in out
    assert "add_request median" in out


def test_rows_cross_block_borders_in_turn():
    load = Load(32, 64, 16, "fcfs", "paged")
    steps = load.decode(64)
    next(steps)
    held = load.scheduler.kv.num_slot_blocks.copy()
    grown = []
    for _ in range(48):
        next(steps)
        now = load.scheduler.kv.num_slot_blocks.copy()
        grown.append(int((now - held).sum()))
        held = now
    assert set(grown) == {2}


def test_churn_mixes_prefill_and_decodes():
    load = Load(8, 64, 16, policy_choice("fair"), "paged")
    assert len(list(load.churn(30))) == 30
    assert load.scheduler.num_running == 8
    assert load.scheduler.num_waiting >= 7
