"""The OpenAPI document as a page."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }
h2 { margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem }
code { font: 13px ui-monospace, monospace; background: #f2f2f2; padding: .1rem .3rem }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0;
  border-bottom: 1px solid #eee }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818 } code { background: #2a2a2a }
  td, th { border-color: #333 } h2 { border-color: #444 } a { color: #8bf } }
"""


def page(spec: Mapping[str, Any]) -> str:
    """The document as a page without scripts or outside resources."""
    title = html.escape(f"{spec['info']['title']} {spec['info']['version']}")
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>",
        f"<meta name=viewport content='width=device-width'><style>{STYLE}</style>",
        f"<h1>{title}</h1><p>Machine-readable: <a href=openapi.json>openapi.json</a></p>",
    ]
    for path, methods in spec["paths"].items():
        for method, item in methods.items():
            parts += _page_operation(path, method, item, spec["components"]["schemas"])
    return "".join(parts)


def _page_operation(
    path: str, method: str, item: Mapping[str, Any], schemas: Mapping[str, Any]
) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>"
    yield f"<p>{html.escape(item['summary'])}</p>"
    body = item.get("requestBody")
    if body is None:
        return
    schema = body["content"]["application/json"]["schema"]
    for one in schema.get("anyOf", [schema]):
        name = one["$ref"].rpartition("/")[2]
        model = schemas[name]
        yield f"<h3>{html.escape(name)}</h3><table><tr><th>parameter<th>type<th>"
        for member, about in model["properties"].items():
            need = "" if member not in model.get("required", ()) else " (required)"
            text = html.escape(about.get("description", ""))
            kind = html.escape(type_text(about))
            yield f"<tr><td><code>{html.escape(member)}</code>{need}<td>{kind}<td>{text}"
        yield "</table>"


def type_text(schema: Mapping[str, Any]) -> str:
    """A JSON schema's type in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        kinds = [type_text(one) for one in schema["anyOf"] if one != {"type": "null"}]
        return " or ".join(dict.fromkeys(kinds))
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"array of {type_text(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object to {type_text(schema['additionalProperties'])}"
    return str(schema.get("type", "any"))
