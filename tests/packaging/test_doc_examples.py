"""Examples of the pages in docs/: flags and subcommands are there, YAML is a configuration, Python
imports what there is. (README and tutorial have tests that run them.)"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from octavo.core.config import config_model
from octavo.engine.config import EngineConfig
from octavo.frontend.config import load_config
from octavo.server.command_line.main import _parser

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    *sorted(page for page in DOCS.rglob("*.md") if page.parent.name != "decisions"),
    DOCS.parent / "README.md",
    DOCS.parent / "CONTRIBUTING.md",
]
SECTIONS = tuple(config_model(EngineConfig).model_fields)
NAMES = [str(page.relative_to(DOCS.parent)) for page in PAGES]


def blocks(page: Path, *languages: str) -> list[str]:
    """Contents of fenced blocks in one of the languages."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def indented(page: Path) -> list[str]:
    """Contents of blocks that are indented by four spaces."""
    found = re.findall(r"(?:^|\n\n)((?: {4}.*\n|\n(?= {4}))+)", page.read_text())
    return [textwrap.dedent(text) for text in found]


def commands(page: Path) -> Iterator[str]:
    """Command lines of `octavo`, in blocks and in the text."""
    lines = "\n".join([*blocks(page, "bash", "sh"), *indented(page)])
    joined = re.sub(r"\\\n|\n(?= {8,})", " ", lines)
    yield from (line for line in joined.splitlines() if line.startswith("octavo "))
    yield from re.findall(r"`(octavo [a-z][^`]*)`", page.read_text())


def subcommand(words: list[str]) -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser that reads these words, and the words that are left for it."""
    parser: argparse.ArgumentParser = _parser()
    while True:
        populate = getattr(parser, "populate", None)
        if populate is not None:
            parser.populate = None  # type: ignore[attr-defined]
            populate(parser)
        nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not nested or not words or words[0] not in nested[0].choices:
            return parser, words
        parser, words = nested[0].choices[words[0]], words[1:]


def test_examples_are_found() -> None:
    assert sum(len(list(commands(page))) for page in PAGES) > 60
    assert sum(len(blocks(page, "yaml")) for page in PAGES) > 8


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_have_their_flags(page: Path) -> None:
    for line in commands(page):
        words = line.partition("   #")[0].split()[1:]
        if words[0].startswith("-"):
            continue
        parser, rest = subcommand(words)
        assert rest != words, f"{line}: there is no such command"
        known = {option for action in parser._actions for option in action.option_strings}
        flags = {word.partition("=")[0] for word in re.findall(r"(?<![\w-])--?[a-z][\w-]*", line)}
        assert flags <= known, f"{line}: {flags - known}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_yaml_is_a_configuration(page: Path) -> None:
    texts = blocks(page, "yaml")
    texts += [text for text in indented(page) if text.startswith(SECTIONS) and ":" in text]
    for text in texts:
        if "scrape_configs" in text:
            continue  # Prometheus's
        load_config(mapping=yaml.safe_load(text))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_imports_what_there_is(page: Path) -> None:
    for text in blocks(page, "python"):
        try:
            nodes = ast.walk(ast.parse(text))
        except SyntaxError as error:
            raise AssertionError(f"{page.name}: {error}\n{text}") from None
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("octavo."):
                module = importlib.import_module(node.module or "")
                for name in node.names:
                    assert hasattr(module, name.name), f"{page.name}: {node.module}.{name.name}"


@pytest.mark.slow
def test_the_python_tutorial_runs(tmp_path: Path, demo_model: str) -> None:
    code = "\n".join(blocks(DOCS / "tutorials" / "python.md", "python"))
    assert demo_model in code
    script = tmp_path / "tutorial.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout
