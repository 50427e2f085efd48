"""docs/configuration.md is what the models say."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from octavo.core.contracts import KINDS
from octavo.core.plugin_options import options_model
from octavo.core.registry import Registry
from octavo.server.command_line.config_reference import from_vllm, reference
from octavo.server.config import ServiceConfig


def test_the_page_is_up_to_date(repository: Path):
    page = (repository / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference(), "docs/configuration.md is stale: run `make docs`"


def test_the_table_of_differences_is_up_to_date(repository: Path):
    page = (repository / "docs" / "from-vllm.md").read_text(encoding="utf-8")
    assert page == from_vllm(page), "docs/from-vllm.md is stale: run `make docs`"


def models():
    yield from (f.annotation for f in ServiceConfig.model_fields.values())
    registry = Registry.discover(only=[])
    for kind in KINDS:
        for entry in registry.entries(kind):
            yield options_model(entry)


def test_every_field_has_a_description():
    for model in models():
        if isinstance(model, type) and issubclass(model, BaseModel):
            for name, field in model.model_fields.items():
                assert field.description, f"{model.__name__}.{name} has no description"


def test_every_key_is_on_the_page():
    page = reference()
    for section, field in ServiceConfig.model_fields.items():
        assert f"\n## {section}\n" in page
        if isinstance(field.annotation, type):
            for name in field.annotation.model_fields:
                assert f"| `{section}.{name}` |" in page
    assert "| `OCTAVO_PLUGINS` |" in page
    assert "| `max_model_len` | `model.max_model_len` |" in page
