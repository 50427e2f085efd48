"""JSON Schema of the configuration, for editors: every key, and for a choice every implementation
that is known with its own options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.config import config_model
from octavo.core.contracts import KINDS
from octavo.core.errors import PluginError
from octavo.core.plugin_options import options_model
from octavo.core.registry import Registered, Registry
from octavo.engine.config import PHASES, EngineConfig

_OTHER = {"type": "string", "description": "The name of any other implementation."}


def config_schema(registry: Registry) -> dict[str, Any]:
    """The schema as plain data. A choice is a name, or a mapping with `name` and options."""
    schema = config_model(EngineConfig).model_json_schema()
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Octavo configuration",
        **{key: value for key, value in schema.items() if key != "title"},
    }
    definitions: dict[str, Any] = schema["$defs"]
    definitions.pop("ImplementationConfig", None)
    for kind in KINDS.values():
        variants = [
            _variant(entry, definitions) for entry in registry.providers(kind.name).values()
        ]
        names = ["auto", *registry.providers(kind.name)]
        is_list = "." not in kind.config_path
        definitions[kind.name] = {
            "description": f"{kind.name}: a name, or a mapping with `name` and options.",
            "anyOf": [{"enum": names[1:] if is_list else names}, *variants, _OTHER],
        }
        if kind.name == "scheduler_policy":  # a list of them is a composition
            items = {"$ref": f"#/$defs/{kind.name}"}
            many = {"type": "array", "items": items, "minItems": 1}
            definitions[kind.name]["anyOf"].append(many)
        holder, key = _property(schema, kind.config_path)
        ref = {"$ref": f"#/$defs/{kind.name}"}
        old = holder[key]
        kept = {name: old[name] for name in ("description", "default") if name in old}
        kept["default"] = _plain_default(kept.get("default"))
        holder[key] = {**kept, **({"type": "array", "items": ref} if is_list else ref)}
    for phase in PHASES:  # each an attention backend, or not given
        holder, key = _property(schema, f"attention.{phase}")
        choices = [{"$ref": "#/$defs/attention_backend"}, {"type": "null"}]
        holder[key] = {
            "description": holder[key]["description"],
            "default": None,
            "anyOf": choices,
        }
    return schema


def _property(schema: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """The `properties` that hold a dotted key."""
    here = schema
    *sections, key = path.split(".")
    for section in sections:
        reference = here["properties"][section]
        while "$ref" not in reference:
            reference = reference["allOf"][0]
        here = schema["$defs"][reference["$ref"].rpartition("/")[2]]
    return here["properties"], key


def _plain_default(default: Any) -> Any:
    """A choice as YAML writes it."""
    if isinstance(default, Mapping) and "name" in default and not default.get("options"):
        return default["name"]
    return default


def _variant(entry: Registered, definitions: dict[str, Any]) -> dict[str, Any]:
    """A mapping that names one implementation, with its options."""
    variant: dict[str, Any] = {
        "type": "object",
        "description": entry.provider.summary,
        "properties": {"name": {"const": entry.name}},
        "required": ["name"],
    }
    prefix = f"{entry.kind}.{entry.name}."
    try:
        options = options_model(entry).model_json_schema(ref_template=f"#/$defs/{prefix}{{model}}")
    except PluginError:
        return variant
    for name, definition in options.pop("$defs", {}).items():
        definitions[prefix + name] = definition
    variant["properties"] |= options.get("properties", {})
    variant["required"] += options.get("required", [])
    variant["additionalProperties"] = options.get("additionalProperties", False)
    return variant
