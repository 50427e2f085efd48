"""Writes a new plugin package from the template of a kind: `octavo plugins new KIND NAME`."""

from __future__ import annotations

import importlib
import inspect
import keyword
import re
from dataclasses import dataclass
from pathlib import Path

from octavo import __version__
from octavo.core.contracts import Kind
from octavo.core.errors import PluginError, nearest
from octavo.testing.conformance import SUITES
from octavo.testing.conformance.base import registry

_SERVER_TEMPLATES = "octavo.server.testing.templates"


@dataclass(frozen=True)
class Recipe:
    """summary: of the provider. cls: the class in the template. suite: further lines of the suite's
    subclass. imports: that these need. probe: whether the template has one. use: YAML that turns it
    on, `{name}` standing for its name."""

    summary: str
    cls: str
    use: str
    suite: str = ""
    imports: str = ""
    probe: bool = False
    templates: str = "octavo.testing.templates"


RECIPES: dict[str, Recipe] = {
    "scheduler_policy": Recipe(
        "first come, first served, with a lane for short prompts",
        "ExamplePolicy",
        "scheduler: {{policy: {name}}}",
        '    options = {"short_tokens": 12}\n',
    ),
    "kv_cache_manager": Recipe(
        "blocks without sharing", "ExampleManager", "kv_cache: {{manager: {name}}}"
    ),
    "eviction_policy": Recipe(
        "first retired, first evicted", "ExampleEviction", "kv_cache: {{eviction: {name}}}"
    ),
    "preemption_policy": Recipe(
        "swaps long sequences, recomputes short ones",
        "ExamplePreemption",
        "preemption: {{policy: {name}}}",
        '    options = {"swap_from_tokens": 20}\n',
    ),
    "attention_backend": Recipe(
        "PyTorch's attention over gathered pages",
        "ExampleAttention",
        "attention: {{backend: {name}}}",
    ),
    "sampler": Recipe(
        "the contract's formula a row at a time", "ExampleSampler", "sampler: {{backend: {name}}}"
    ),
    "graph_runner": Recipe(
        "runs the forward pass as it is written", "ExampleRunner", "graph: {{runner: {name}}}"
    ),
    "executor": Recipe(
        "one worker in the engine's thread", "ExampleExecutor", "executor: {{kind: {name}}}"
    ),
    "model": Recipe(
        "a Llama decoder in plain PyTorch",
        "ExampleModel",
        "model: {{implementation: {name}}}",
        probe=True,
    ),
    "weight_source": Recipe(
        "a folder named by its own prefix",
        "ExampleSource",
        "model: {{source: '{name}:./folder'}}",
        """\

    def write_source(self, folder: Path) -> str:
        return "example:" + super().write_source(folder)

    def missing(self, folder: Path) -> str:
        return "example:" + super().missing(folder)
""",
        "from pathlib import Path\n\n",
        probe=True,
    ),
    "tokenizer": Recipe(
        "bytes of UTF-8", "ExampleTokenizer", "model: {{tokenizer_backend: {name}}}"
    ),
    "quantization": Recipe(
        "weights in bfloat16",
        "ExampleMethod",
        "model: {{quantization: {name}}}",
        "    error = 5e-3\n",
    ),
    "logits_processor": Recipe(
        "makes tokens rarer that were just generated",
        "ExampleProcessor",
        "logits_processors: [{name}]",
        """\
    params = (
        SamplingParams(extra_args={"example": 2.0}),
        SamplingParams(extra_args={"example": -0.5}),
    )
    plain = SamplingParams()
""",
        "from octavo import SamplingParams\n",
    ),
    "grammar_engine": Recipe(
        "one of several texts",
        "ExampleEngine",
        "structured_outputs: {{engine: {name}}}",
    ),
    "tool_parser": Recipe(
        "a line that begins with CALL",
        "ExampleParser",
        "server: {{tool_parser: {name}}}",
        """\
    call = 'CALL get_weather {"city": "Paris"}\\n'
    bare = "CALL get_time\\n"
""",
        templates=_SERVER_TEMPLATES,
    ),
    "reasoning_parser": Recipe(
        "what comes before [answer]",
        "ExampleParser",
        "server: {{reasoning_parser: {name}}}",
        '    answer = "Hm.[answer]Yes."\n',
        templates=_SERVER_TEMPLATES,
    ),
    "route": Recipe(
        "says what is served", "ExampleRoutes", "routes: [{name}]", templates=_SERVER_TEMPLATES
    ),
    "engine_extension": Recipe(
        "limits the requests of a user that run at once",
        "ExampleExtension",
        "extensions: [{name}]",
        '    options = {"per_user": 2}\n',
    ),
    "observer": Recipe("counts tokens", "ExampleObserver", "observers: [{name}]"),
}


def write_package(kind: str, name: str, parent: Path) -> Path:
    """Write the package `octavo-NAME` into a folder of its own under `parent`, and return the
    folder. Raises `PluginError` for a kind or name that cannot be, or a folder that exists."""
    if kind not in RECIPES:
        raise PluginError(f"there is no kind '{kind}' to write; {nearest(kind, RECIPES)}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise PluginError(
            f"'{name}' is no name for an implementation: expected lower case letters, digits and "
            "underscores, beginning with a letter"
        )
    folder = parent / f"octavo-{name.replace('_', '-')}"
    if folder.exists():
        raise PluginError(f"{folder} exists already; expected a name that is not taken")
    for path, text in files(kind, name).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder


def files(kind: str, name: str) -> dict[str, str]:
    """Contents of the package by path."""
    package = f"octavo_{name}"
    recipe, contract = RECIPES[kind], registry().kind(kind)
    return {
        "pyproject.toml": _pyproject(name, package, kind),
        "README.md": _readme(name, kind, recipe),
        f"{package}/__init__.py": _providers(name, package, kind, contract, recipe),
        f"{package}/{kind}.py": _renamed(_template(kind), name),
        f"{package}/conformance.py": _renamed(_conformance(package, kind, recipe), name),
        f"{package}/py.typed": "",
        "tests/test_conformance.py": _tests(package, name, kind),
    }


def _template(kind: str) -> str:
    return inspect.getsource(importlib.import_module(f"{RECIPES[kind].templates}.{kind}"))


def _renamed(text: str, name: str) -> str:
    return text.replace("Example", _camel(name)).replace("example", name)


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _pyproject(name: str, package: str, kind: str) -> str:
    return f"""\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "octavo-{name.replace("_", "-")}"
version = "0.1.0"
description = "{kind.replace("_", " ").capitalize()} '{name}' for Octavo."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["octavo>={".".join(__version__.split(".")[:2])}"]

[project.optional-dependencies]
dev = ["pytest>=8"]

# Octavo finds the implementation by this entry point ...
[project.entry-points.octavo]
{name} = "{package}"

# ... and `octavo plugins check` the suites that it is checked with.
[project.entry-points."octavo.conformance"]
{name} = "{package}.conformance"

[tool.setuptools]
packages = ["{package}"]

[tool.setuptools.package-data]
{package} = ["py.typed"]

[tool.pytest.ini_options]
testpaths = ["tests"]
"""


def _readme(name: str, kind: str, recipe: Recipe) -> str:
    distribution = f"octavo-{name.replace('_', '-')}"
    return f"""\
# {distribution}

The {kind.replace("_", " ")} `{name}` for Octavo: {recipe.summary}.

```
pip install -e '.[dev]'
octavo plugins                       # it is listed
octavo plugins show {kind} {name}
octavo plugins check {distribution}
pytest
```

Turn it on in the configuration:

```yaml
{recipe.use.format(name=name)}
```

The contract is described in Octavo's docs/contracts.md, the promises that `check` runs in
docs/conformance.md.
"""


def _providers(name: str, package: str, kind: str, contract: Kind, recipe: Recipe) -> str:
    cls = _renamed(recipe.cls, name)
    probe = f'        probe="{package}.{kind}:probe",\n' if recipe.probe else ""
    return f'''\
"""What this package offers to Octavo. Importing it imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo import Provider, hookimpl

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="{name}",
        factory="{package}.{kind}:{cls}",
        options="{package}.{kind}:{_camel(name)}Options",
        contract_version="{contract.version}",
{probe}        rank=-1,  # only when named; give it a rank from 0 on to let `auto` choose it
        summary="{recipe.summary}",
    ),
]


@hookimpl
def {contract.hook}() -> list[Provider[Any]]:
    return PROVIDERS
'''


def _conformance(package: str, kind: str, recipe: Recipe) -> str:
    suite = SUITES[kind]
    return f'''\
"""The promises of the contract, as `octavo plugins check` and pytest run them."""

from __future__ import annotations

{recipe.imports}from octavo.testing import {suite}

from {package} import PROVIDERS


class TestExample({suite}):
    provider = PROVIDERS[0]
{recipe.suite}'''


def _tests(package: str, name: str, kind: str) -> str:
    return f'''\
"""Conformance, and room for tests of what is special about this implementation."""

from octavo.core.registry import Registry
from {package}.conformance import Test{_camel(name)}  # noqa: F401  (collected by pytest)


def test_it_is_registered():
    assert "{name}" in Registry.discover().providers("{kind}")
'''
