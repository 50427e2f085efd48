"""Every command and every example of the README is run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

SERVE, SHORT, MAKE = "octavo serve ", "octavo ", "make "


def blocks(text: str, language: str) -> list[str]:
    """Contents of the fenced blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Command lines of all bash blocks, continued lines joined, comments cut."""
    joined = "\n".join(blocks(text, "bash")).replace("\\\n", " ")
    return [line.split("   #")[0].strip() for line in joined.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text()


@pytest.fixture(scope="module")
def octavo() -> list[str]:
    """How to call `octavo` with this interpreter, also where the script is not installed."""
    script = Path(sys.executable).parent / "octavo"
    if script.exists():
        return [str(script)]
    return [
        sys.executable,
        "-c",
        "import sys; from octavo.server.command_line.main import main; sys.exit(main())",
    ]


def run(command: list[str], cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_command_has_a_test(readme: str) -> None:
    unknown = [c for c in commands(readme) if not c.startswith((MAKE, SHORT, "curl "))]
    assert unknown == []
    assert len(commands(readme)) > 5


def test_make_targets_do_what_the_readme_says(readme: str, repository: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    recipes = {
        c: run(["make", "--dry-run", "--always-make", *shlex.split(c)[1:]], repository)
        for c in commands(readme)
        if c.startswith(MAKE)
    }
    assert set(recipes) == {"make demo", "make test"}
    assert "octavo serve --config docs/examples/demo.yaml" in recipes["make demo"]
    assert "pytest" in recipes["make test"]
    assert "make test" in (repository / ".ci" / "run").read_text()


def test_yaml_examples_validate(readme: str, repository: Path) -> None:
    from octavo.frontend.config import load_config

    for text in blocks(readme, "yaml"):
        assert load_config(mapping=yaml.safe_load(text)).model.source
    for file in sorted((repository / "docs" / "examples").glob("*.yaml")):
        config = load_config(file)
        # A simulated executor takes the facts of a model, and no model.
        assert config.model.source or config.executor.kind.options["model"]


def test_commands_that_end_by_themselves(
    readme: str, repository: Path, octavo: list[str], demo_model: str
) -> None:
    lines = [c for c in commands(readme) if c.startswith(SHORT) and not c.startswith(SERVE)]
    outputs = {c: run(octavo + shlex.split(c)[1:], repository) for c in lines}
    by_name = {" ".join(c.split()[1:3]): text for c, text in outputs.items()}
    assert "fcfs" in by_name["plugins"]
    assert demo_model in by_name["config show"]
    assert "tokens/s" in by_name["bench throughput"]
    assert "config validate" in by_name


def test_python_example(readme: str, tmp_path: Path, demo_model: str) -> None:
    (code,) = blocks(readme, "python")
    assert demo_model in code
    script = tmp_path / "example.py"
    script.write_text(code)
    output = run([sys.executable, str(script)], tmp_path)
    assert len(output.strip().splitlines()) >= 3
    assert output.endswith("The capital of France is Paris.\n")


@pytest.fixture
def served(
    readme: str, repository: Path, octavo: list[str], demo_model: str, tmp_path: Path
) -> Iterator[int]:
    """The README's `octavo serve` on a free port, until it answers that it is healthy."""
    (line,) = (c for c in commands(readme) if c.startswith(SERVE))
    log = tmp_path / "server.log"
    command = [*octavo, *shlex.split(line)[1:], "--port", "0"]
    with log.open("wb") as stream:
        server = subprocess.Popen(
            command, cwd=repository, stdout=stream, stderr=stream, env=os.environ | {"LANG": "C"}
        )
    try:
        deadline = time.monotonic() + 120
        where = re.compile(r"ready on http://127\.0\.0\.1:(\d+)$", re.M)
        while not (ready := where.search(log.read_text())):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        port = int(ready[1])
        assert healthy(port)
        yield port
        server.send_signal(signal.SIGINT)
        assert server.wait(60) in (0, 130, -signal.SIGINT), log.read_text()
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def healthy(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as answer:
        return bool(answer.status == 200)


def test_curl_example_against_the_demo(readme: str, served: int, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    (line,) = (c for c in commands(readme) if c.startswith("curl "))
    assert "localhost:8000" in line
    command = shlex.split(line.replace("localhost:8000", f"127.0.0.1:{served}"))
    answer = json.loads(run(command, tmp_path))
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
