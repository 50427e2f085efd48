"""The documentation agrees with the code."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.core.config.models import ImplementationConfig
from octavo.core.contracts import Kind
from octavo.core.contracts.scheduler_policy import SchedulerPolicyContext, WaitingRequest
from octavo.core.registry import Registry

KINDS = Registry.discover(only=[]).kinds


@pytest.fixture(scope="module")
def contracts_page(repository: Path) -> str:
    return (repository / "docs" / "contracts.md").read_text()


def contract_page(repository: Path, kind: Kind) -> str:
    return (repository / "docs" / "contracts" / f"{kind.name}.md").read_text()


def exact_signature(function: object) -> str:
    """`(arguments) -> result` as written, without `self`."""
    text = str(inspect.signature(function)).replace("'", "")  # type: ignore[arg-type]
    return re.sub(r"^\(self(, )?", "(", text)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_every_hook_has_a_heading_with_its_signature(kind: Kind, repository: Path) -> None:
    hook = getattr(kind.module.Spec, kind.hook)
    page = contract_page(repository, kind)
    assert f"\n## `{kind.hook}{exact_signature(hook)}`\n" in page
    for slot in ("When:", "Where:", "Result:", f"Context class: `{kind.context.__name__}`"):
        assert slot in (hook.__doc__ or ""), f"{kind.hook} does not say {slot}"


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_every_method_of_a_contract_is_documented(kind: Kind, repository: Path) -> None:
    page = contract_page(repository, kind)
    methods = {
        name: member
        for name, member in vars(kind.contract).items()
        if inspect.isfunction(inspect.unwrap(getattr(member, "__func__", member)))
    }
    assert methods
    for name, member in methods.items():
        function = getattr(member, "__func__", member)
        assert f"\n#### `{name}(" in page
        assert inspect.getdoc(function), f"{kind.contract.__name__}.{name} has no docstring"


def test_the_first_plugin_of_the_page_works(contracts_page: str) -> None:
    (code,) = re.findall(r"```python\n(from octavo import LLM\n.*?)```", contracts_page, re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(code.partition("\n\n\nllm = ")[0], names)
    policy = names["LastComeFirstServed"]
    registry = Registry.discover(objects=[policy])
    chosen = registry.select("scheduler_policy", ImplementationConfig(name="fcfs"), explicit=False)
    assert chosen.name == "last_come_first_served"
    made = registry.create(chosen, SchedulerPolicyContext(4, 64, time.monotonic))
    requests = [WaitingRequest(handle, float(handle), 5) for handle in (1, 2, 3)]
    for request in requests:
        made.add(request)
    assert made.remove(3)
    assert not made.remove(3)
    assert made.peek() is made.pop() is requests[1]
    assert len(made) == 1


def test_the_page_names_every_contract_s_module(contracts_page: str) -> None:
    for kind in KINDS.values():
        link = f"[{kind.name}](contracts/{kind.name}.md)"
        assert f"| {link} | `{kind.module.__name__}` |" in contracts_page
        assert getattr(kind.module, kind.contract.__name__) is kind.contract


def test_derived_pages_are_up_to_date(repository: Path) -> None:
    derived = runpy.run_path(str(repository / "tools" / "make_docs.py"))["derived"]()
    stale = [
        str(page.relative_to(repository))
        for page, text in derived.items()
        if not page.exists() or page.read_text() != text
    ]
    assert stale == [], "run `make docs`"
    kinds = {page.stem for page in derived if page.parent.name == "contracts"} - {"shared"}
    assert kinds == set(KINDS)
    assert {page.stem for page in (repository / "docs" / "contracts").glob("*.md")} == {
        *kinds,
        "shared",
    }
    assert "| `fcfs` |" in (repository / "docs" / "built-in.md").read_text()


@pytest.mark.slow
def test_the_site_is_built_without_a_dead_link(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)],
        cwd=repository,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe)[^>]* src=[\"']?(https?:[^\"'> ]*)", page.read_text()
        )
        loaded += re.findall(
            r"<link[^>]* rel=[\"']?(?:stylesheet|preconnect)[^>]*https?:", page.read_text()
        )
        assert loaded == [], f"{page.relative_to(tmp_path)} loads from the network"


def test_structure_names_paths_that_exist(repository: Path) -> None:
    page = (repository / "docs" / "structure.md").read_text()
    paths = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?)`", page)
    assert len(paths) > 20
    assert [path for path in paths if not (repository / path).exists()] == []


def pages(repository: Path) -> list[Path]:
    roots = [repository / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [*roots, *sorted((repository / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {
        "".join(c for c in heading.lower() if c.isalnum() or c in " -_").replace(" ", "-")
        for heading in headings
    }


def test_links_lead_somewhere(repository: Path) -> None:
    broken, seen = [], 0
    for page in pages(repository):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if re.match(r"[a-z]+:", target):
                continue
            seen += 1
            file, _, anchor = target.partition("#")
            where = page.parent / file if file else page
            if not where.exists() or (anchor and anchor not in anchors(where)):
                broken.append(f"{page.relative_to(repository)}: {target}")
    assert broken == []
    assert seen > 10


def test_decisions_are_dated(repository: Path) -> None:
    notes = list((repository / "docs" / "decisions").glob("*.md"))
    assert notes
    for note in notes:
        date = re.match(r"(\d{4}-\d{2}-\d{2})-[a-z0-9-]+\.md$", note.name)
        assert date, f"{note.name}: expected YYYY-MM-DD-what.md"
        assert date[1] in note.read_text().splitlines()[2]
