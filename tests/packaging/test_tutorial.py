"""docs/write-a-plugin.md, block by block, as a reader would do it."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# Installed with Octavo, unless this tree was installed before it had them.
FIXTURES = ("-p", "octavo.testing.pytest_plugin", "-p", "no:cacheprovider")

Run = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path, isolated: Any) -> Run:
    """Runs a line of shell."""
    environment = isolated(tmp_path)
    quiet = ("--quiet", "--no-index", "--no-build-isolation", "--disable-pip-version-check")

    def run(line: str) -> subprocess.CompletedProcess[str]:
        name, *rest = shlex.split(line)
        start = {"octavo": ["-m", "octavo"], "pip": ["-m", "pip"], "python": []}[name]
        more = [*(quiet if name == "pip" else ()), *(FIXTURES if "pytest" in rest else ())]
        done: subprocess.CompletedProcess[str] = environment.run(*start, *rest, *more)
        return done

    return run


def test_every_block_works(repository: Path, tmp_path: Path, run: Run) -> None:
    text = (repository / "docs" / "write-a-plugin.md").read_text()
    kinds = set()
    outputs = []
    for kind, body in BLOCK.findall(text):
        kinds.add(kind)
        if kind == "sh":
            for line in body.splitlines():
                done = run(line)
                assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
                outputs.append(done.stdout)
        else:
            first, _, rest = body.partition("\n")
            target = tmp_path / first.removeprefix("# ")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(rest)
    assert kinds == {"sh", "python", "yaml"}
    checks = [output for output in outputs if "promises" in output]
    assert len(checks) == 2
    assert all(" 0 broken" in output for output in checks)
    assert "Requests that a user may send in a row." in outputs[-1]
    assert "users take turns, each one's requests by order of arrival" in outputs[-1]

    # What the page says of a planted fault.
    code = tmp_path / "octavo-take-turns" / "octavo_take_turns" / "scheduler_policy.py"
    broken = code.read_text().replace("                    self._count -= 1\n", "", 1)
    assert broken != code.read_text()
    code.write_text(broken)
    done = run("octavo plugins check octavo-take-turns")
    assert done.returncode == 1
    (said,) = re.findall(r"`(BROKEN .*?)`", text)
    assert " ".join(said.split()) in " ".join(done.stdout.split())
