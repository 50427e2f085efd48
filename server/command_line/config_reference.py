"""Writes two pages of the documentation, which tests compare with this output:

    python -m octavo.server.command_line.config_reference docs/configuration.md docs/from-vllm.md

The first has every key, the options of every built-in implementation, vLLM's names and environment
variables. In the second only the table is written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from octavo.core import envvars
from octavo.core.config.models import ImplementationConfig, plain
from octavo.core.registry import Registry
from octavo.core.registry.options import options_model
from octavo.frontend.vllm import differences
from octavo.frontend.vllm.keywords import KEYWORDS
from octavo.server.command_line import main  # noqa: F401, declares environment variables
from octavo.server.config import ServiceConfig

INTRODUCTION = """\
# Configuration

<!-- Written by `make docs`; edit the descriptions in the code. -->

One YAML file holds everything. The same keys can be set one by one on the command line
(`--set scheduler.max_num_seqs=64`, the value in YAML, also inside a choice:
`--set scheduler.policy.name=fcfs`), given as a mapping in Python (`LLM(config={...})`), or by
vLLM's names (`--max-num-seqs 64`, `LLM(max_num_seqs=64)`, see [below](#vllms-names)). Flags win
over `--set`, `--set` over the file, the file over the defaults.

A file for vLLM's `--config`, with flag names (`max-model-len: 4096`) in place of sections, is taken
too; flags and sections are not mixed in one file.

An unknown key is refused with the nearest known one and the line of the file; so is a duplicate
key. `octavo config validate FILE` shows all that is wrong with a file, `octavo config show FILE`
prints it with what every `auto` became and why, `octavo config schema` prints a JSON Schema for
editors. `config show` takes what `octavo serve` takes, and prints the YAML that a command line
stands for; with `--given` only that, deciding nothing:
`octavo config show --given MODEL --max-num-seqs 64`.

Values are taken as YAML has them ([why](decisions/2026-11-30-plain-values.md)): `true` and `"64"`
are no numbers, `1` and `"no"` are neither true nor false, and a whole number may be written `1e9`.
Only a file with flag names reads numbers in quotes, as the command line does. What stands in a list
(`observers`, `routes`, `logits_processors`) may stand there twice only with other options.

A *choice* is the name of an implementation, or a mapping with `name` and that implementation's own
options. The name `auto` takes the best that is available, by the implementations' own probes;
`octavo plugins` lists them.

```yaml
scheduler: {policy: fcfs, max_num_seqs: 256}
logits_processors: [{name: my_processor, strength: 2}]
plugins: {load: [./my_processor.py]}      # relative to this file
```
"""

CPU_POOL = """\
On a CPU the KV cache pool defaults to the least of 4 GiB, a quarter of the memory that the cgroup
has free, and what `max_num_seqs` requests of `max_model_len` need. `memory_bytes` or `num_blocks`
set it outright.
"""


def reference() -> str:
    """The page."""
    registry = Registry.discover(only=[])
    lines = [INTRODUCTION]
    for name, field in ServiceConfig.model_fields.items():
        lines.append(f"## {name}\n\n{field.description}\n")
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            lines += _table(section, prefix=f"{name}.")
            if name == "kv_cache":
                lines.append(CPU_POOL)
        else:
            lines.append(f"A list of choices. Default: `{_value(field)}`.\n")
        for kind in registry.kinds.values():
            if kind.config_path.partition(".")[0] == name:
                lines += _implementations(registry, kind.name, kind.config_path)
    lines += _keywords()
    lines += _environment()
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _table(model: type[BaseModel], prefix: str = "", key: str = "key") -> Iterator[str]:
    yield f"| {key} | type | default | |"
    yield "|---|---|---|---|"
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else f"`{_value(field)}`"
        yield _row(f"`{prefix}{name}`", type_text(field), default, field.description or "")
    yield ""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(field: FieldInfo) -> str:
    value = plain(field.get_default(call_default_factory=True))
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)


def type_text(field: FieldInfo) -> str:
    """A field's type in words, with its bounds."""
    text, bounds = _type(field.annotation), _bounds(field.metadata)
    stem = text.removesuffix(" or null")
    return stem + bounds + text[len(stem) :]


def _bounds(metadata: Any) -> str:
    words = []
    for item in metadata:
        for form, sign in (
            (annotated_types.Gt, ">"),
            (annotated_types.Ge, "≥"),
            (annotated_types.Lt, "<"),
            (annotated_types.Le, "≤"),
        ):
            if isinstance(item, form):
                words.append(f"{sign} {getattr(item, form.__name__.lower())}")
    return f" {', '.join(words)}" if words else ""


_WORDS = {
    int: "integer",
    float: "number",
    str: "text",
    SecretStr: "text",
    bool: "true or false",
    type(None): "null",
    ImplementationConfig: "choice",
}


def _type(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in _WORDS:
        return _WORDS[annotation]
    if hasattr(annotation, "__metadata__"):
        return _type(annotation.__origin__) + _bounds_of(annotation.__metadata__)
    if str(origin) == "typing.Literal":
        return ", ".join(f"`{part}`" for part in parts)
    if origin is list or origin is tuple:
        return f"list of {_type(parts[0])}" if parts else "list"
    if origin is dict:
        return f"mapping to {_type(parts[1])}" if parts and parts[1] is not Any else "mapping"
    if parts and (origin is Union or "Union" in str(origin) or "UnionType" in str(origin)):
        return " or ".join(_type(part) for part in parts)
    return getattr(annotation, "__name__", str(annotation))


def _bounds_of(metadata: Any) -> str:
    """Of `Annotated[int, Field(gt=0)]`."""
    flat = []
    for item in metadata:
        flat += item.metadata if isinstance(item, FieldInfo) else [item]
    return _bounds(flat)


def _implementations(registry: Registry, kind: str, path: str) -> Iterator[str]:
    entries = [e for e in registry.entries(kind) if e.source.built_in]
    if not entries:
        return
    yield f"Built in for `{path}`:\n"
    with_options = []
    for entry in sorted(entries, key=lambda e: e.name):
        model = options_model(entry)
        yield f"- `{entry.name}`: {entry.provider.summary}"
        if model.model_fields:
            with_options.append((entry, model))
    yield ""
    for entry, model in with_options:
        yield f"Options of `{path}: {entry.name}`:\n"
        yield from _table(model, key="option")


def _keywords() -> Iterator[str]:
    yield "## vLLM's names\n"
    yield (
        "Keywords of `LLM(...)` and `AsyncLLM(...)`, and flags of the command line and of vLLM's "
        "files (`max_model_len` is `--max-model-len`; underscores are dashes). What names a thing "
        "that Octavo does not have stops with a message; a value that turns it off is accepted.\n"
    )
    yield "| keyword | key | |"
    yield "|---|---|---|"
    for name, keyword in KEYWORDS.items():
        yield _row(f"`{name}`", f"`{keyword.path}`" if keyword.path else "", keyword.doc)
    yield ""


def _environment() -> Iterator[str]:
    yield "## Environment variables\n"
    yield "| variable | type | default | |"
    yield "|---|---|---|---|"
    for _, variable in sorted(envvars.DECLARED.items()):
        yield _row(f"`{variable.name}`", variable.kind, variable.default, variable.doc)
    yield ""


BEGIN = "<!-- differences: written by `make docs` from frontend/vllm/differences.py -->\n"
END = "<!-- end of differences -->"


def from_vllm(page: str) -> str:
    """docs/from-vllm.md with its table renewed."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + differences.table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference())
    Path(sys.argv[2]).write_text(from_vllm(Path(sys.argv[2]).read_text()))
