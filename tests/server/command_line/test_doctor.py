"""`octavo doctor`: facts, parts, the self-test and the exit status."""

from __future__ import annotations

import json

import pytest

from octavo.server.command_line.doctor import facts, self_test
from octavo.server.command_line.main import main


@pytest.mark.slow
def test_it_says_what_is_here_and_that_it_works(capsys) -> None:
    assert main(["doctor", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["healthy"]
    named = {fact["name"]: fact for fact in result["facts"]}
    for name in ("processor", "cores", "free memory", "C compiler", "NVIDIA driver", "torch"):
        assert named[name]["value"]
    kinds = {row["kind"] for row in result["plugins"]}
    assert {"attention_backend", "sampler", "graph_runner", "quantization"} <= kinds
    test = result["self_test"]
    assert test["ok"]
    backends = [part["backend"] for part in test["parts"]]
    assert backends[0] == "auto"
    assert "torch" in backends
    assert test["seconds"] > 0


def test_the_text_names_every_part_with_its_reason(capsys) -> None:
    assert main(["doctor", "--no-self-test"]) == 0
    out = capsys.readouterr().out
    for words in ("machine", "packages", "attention backend", "sampler", "quantization"):
        assert words in out
    assert "self-test: left out" in out
    assert out.endswith("everything that is needed is here and works\n")


def test_what_is_missing_is_an_exit_status(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(facts, "REQUIRED", ("torch", "no_such_package"))
    assert main(["doctor", "--no-self-test"]) == 1
    out = capsys.readouterr().out
    assert "! no_such_package" in out
    assert "NOT HEALTHY" in out


def test_a_self_test_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    failed = {"backend": "torch", "ok": False, "error": "OctavoError: it broke"}
    monkeypatch.setattr(
        "octavo.server.command_line.doctor.command.self_test",
        lambda: {"ok": False, "parts": [failed], "seconds": 0.1},
    )
    assert main(["doctor"]) == 1
    assert "it broke" in capsys.readouterr().out


def test_a_self_test_that_hangs_ends() -> None:
    found = self_test.self_test(limit_s=0.05)
    assert not found["ok"]
    assert "not within" in found["error"]
