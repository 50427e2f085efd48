"""What `octavo plugins new` writes keeps the contract of every kind."""

from __future__ import annotations

import importlib
import inspect
import sys

import pytest

from octavo.testing.conformance import SUITES
from octavo.testing.conformance.base import promises, registry, run_promise
from octavo.testing.new_package import RECIPES, write_package

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def suites(tmp_path_factory):
    """The suite of every kind, from a package that was written for it."""
    parent = tmp_path_factory.mktemp("packages")
    before, found = set(sys.modules), {}
    for kind in RECIPES:
        folder = write_package(kind, f"own_{kind}", parent)
        sys.path.insert(0, str(folder))
        module = importlib.import_module(f"octavo_own_{kind}.conformance")
        found[kind] = getattr(module, "TestOwn" + kind.title().replace("_", ""))
    yield found
    del sys.path[: len(RECIPES)]
    for name in set(sys.modules) - before:
        if name.startswith("octavo_own_"):
            del sys.modules[name]


def test_every_kind_has_a_suite_and_a_template():
    assert set(SUITES) == set(RECIPES) == set(registry().kinds)


@pytest.mark.parametrize("kind", RECIPES)
def test_the_package_keeps_its_contract(kind, suites):
    suite = suites[kind]
    verdicts = [run_promise(suite, name) for name in promises(suite)]
    broken = [f"{verdict.promise}: {verdict.message}" for verdict in verdicts if not verdict]
    assert not broken, "\n".join(broken)
    assert sum(verdict.outcome == "kept" for verdict in verdicts) >= len(verdicts) - 3


@pytest.mark.parametrize("kind", RECIPES)
def test_the_template_uses_the_contract_alone(kind):
    module = importlib.import_module(f"{RECIPES[kind].templates}.{kind}")
    source = inspect.getsource(module)
    source = source.replace("octavo.server.contracts", "")
    for package in ("octavo.plugins", "octavo.backends", "octavo.models", "octavo.server"):
        assert package not in source
