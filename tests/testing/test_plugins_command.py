"""`octavo plugins show`, `check` and `new`, and the fixtures that pytest gets."""

from __future__ import annotations

import json

import pytest

from octavo.server.command_line.main import main
from octavo.testing.conformance.base import registry

pytestmark = pytest.mark.slow


def run(capsys, *args):
    status = main(["plugins", *args])
    out, err = capsys.readouterr()
    return status, out, err


def test_show_tells_options_requirements_and_origin(capsys):
    status, out, _ = run(capsys, "show", "scheduler_policy", "fair")
    assert status == 0
    for text in ("weights", "tokens shared among users", "scheduler.policy", "octavo-plugins"):
        assert text in out
    status, out, _ = run(capsys, "--json", "show", "grammar_engine", "xgrammar")
    found = json.loads(out)
    assert found["requirements"] == ["package xgrammar (pip install 'octavo[grammar]')"]
    assert found["our_contract_version"] == registry().kinds["grammar_engine"].version
    assert all(option["description"] for option in found["options"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("show", "schedler_policy", "fcfs"), "did you mean 'scheduler_policy'"),
        (("show", "scheduler_policy", "fcsf"), "did you mean 'fcfs'"),
        (("check", "octavo-nobody"), "no distribution 'octavo-nobody' is installed"),
        (("check", "numpy"), "registers no implementation"),
        (("new", "observr", "mine"), "did you mean 'observer'"),
        (("new", "observer", "My-Own"), "is no name for an implementation"),
        (("new", "observer", "class"), "is no name for an implementation"),
    ],
)
def test_mistakes_are_named(capsys, args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = run(capsys, *args)
    assert status == 2
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_new_writes_a_package_and_never_over_another(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "new", "observer", "token_count")
    assert status == 0
    assert "octavo plugins check octavo-token-count" in out
    folder = tmp_path / "octavo-token-count"
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "pyproject.toml",
        "octavo_token_count",
        "tests",
    }
    assert "class TokenCountObserver" in (folder / "octavo_token_count/observer.py").read_text()
    assert "example" not in (folder / "octavo_token_count/__init__.py").read_text().lower()
    status, _, err = run(capsys, "new", "observer", "token_count")
    assert status == 2
    assert "exists already" in err


# ---- installed packages -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def environment(tmp_path_factory, isolated):
    return isolated(tmp_path_factory.mktemp("packages"))


FIXTURES = ("-p", "octavo.testing.pytest_plugin", "-p", "no:cacheprovider")


def test_a_new_package_is_listed_checked_and_used(environment, tmp_path):
    # Of a kind whose suite runs no engine: the others have a test of their own, marked slow.
    written = environment.octavo("plugins", "new", "reasoning_parser", "rarer", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    folder = tmp_path / "octavo-rarer"
    environment.install([folder])
    listed = environment.octavo("plugins")
    assert "octavo-rarer" in listed.stdout
    checked = environment.octavo("plugins", "check", "octavo-rarer")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "0 broken" in checked.stdout
    assert "reasoning_parser rarer" in checked.stdout
    tested = environment.run("-m", "pytest", "-q", *FIXTURES, str(folder))
    assert tested.returncode == 0, tested.stdout


def test_a_broken_package_is_told_apart(environment, tmp_path):
    environment.octavo("plugins", "new", "eviction_policy", "leaky", cwd=tmp_path)
    code = tmp_path / "octavo-leaky" / "octavo_leaky" / "eviction_policy.py"
    code.write_text(code.read_text().replace("self._order.pop(block, None)", "pass"))
    environment.install([tmp_path / "octavo-leaky"])
    checked = environment.octavo("plugins", "--json", "check", "octavo-leaky")
    assert checked.returncode == 1
    found = json.loads(checked.stdout)
    broken = [v["promise"] for v in found["checked"][0]["verdicts"] if v["outcome"] == "broken"]
    assert "a_reused_block_is_safe" in broken


def test_every_kind_passes_check_as_generated(environment, tmp_path):
    names = {kind: f"fresh_{kind}" for kind in registry().kinds}
    for kind, name in names.items():
        environment.octavo("plugins", "new", kind, name, cwd=tmp_path)
    environment.install(list(tmp_path.iterdir()))
    for name in names.values():
        package = f"octavo-{name.replace('_', '-')}"
        checked = environment.octavo("plugins", "check", package)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_fixtures_for_packages(environment, tmp_path):
    (tmp_path / "test_mine.py").write_text(
        """
from octavo.testing.fake_engine import Collector, request
from octavo.testing.tiny_model import generate, make_requests


def test_real(octavo_engine, octavo_step_log, octavo_tiny_model):
    assert (octavo_tiny_model / "config.json").exists()
    engine = octavo_engine({"observers": ["step_log"]}, plugins=[octavo_step_log])
    assert len(generate(engine, make_requests(3))) == 3
    assert octavo_step_log.steps
    assert len(octavo_step_log.requests) == 3


def test_executor(octavo_fake_executor):
    assert octavo_fake_executor.start().vocab_size == octavo_fake_executor.worker.vocab_size


def test_fake(octavo_fake_engine, octavo_step_log):
    engine = octavo_fake_engine(num_blocks=8, observers=[("log", octavo_step_log)])
    for handle in (1, 2, 3):
        engine.add(request(handle, range(10, 22), 12, ignore_eos=True))
    Collector(engine).run()
    assert octavo_step_log.num_preemptions
"""
    )
    done = environment.run("-m", "pytest", "-q", *FIXTURES, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
