"""The public surface as data: what `octavo`, its kernels and testing API, and the contracts offer.

    python tools/freeze_surface.py          # write docs/surface.json; refuses what breaks a promise
    python tools/freeze_surface.py --check  # only say what differs

A contract whose signatures changed is written only with a new version: a minor one when all that
was there still works (docs/stability.md), else a major one. A test compares file and code.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

import octavo
import octavo.kernels
import octavo.testing
from octavo.core.contracts import Kind
from octavo.core.registry import Registry

FILE = Path(__file__).resolve().parent.parent / "docs" / "surface.json"


def surface() -> dict[str, Any]:
    """Signatures by module, and by contract kind with its version."""
    return {
        "octavo": _module(octavo),
        "octavo.kernels": _module(octavo.kernels),
        "octavo.testing": dict.fromkeys(sorted(octavo.testing.__all__), ""),
        "contracts": {
            name: _contract(kind) for name, kind in Registry.discover(only=[]).kinds.items()
        },
    }


def _module(module: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in sorted(module.__all__):
        value = getattr(module, name)
        if inspect.isclass(value):
            found[name] = _class(value)
        elif inspect.isfunction(value):
            found[name] = _signature(value)
        else:
            found[name] = type(value).__name__
    return found


def _contract(kind: Kind) -> dict[str, Any]:
    classes = {
        name: _class(value)
        for name, value in sorted(vars(kind.module).items())
        if inspect.isclass(value)
        and value.__module__ == kind.module.__name__
        and not name.startswith("_")
    }
    return {"version": kind.version, "hook": kind.hook, "classes": classes}


def _class(cls: type) -> dict[str, str]:
    """Signatures of public methods, and fields of data classes."""
    found: dict[str, str] = {}
    if dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
            optional = (
                field.default is not dataclasses.MISSING
                or field.default_factory is not dataclasses.MISSING
            )
            found[field.name] = "field, optional" if optional else "field"
    struct = getattr(cls, "__struct_fields__", ())
    if struct:
        fields = msgspec.structs.fields(cls)
        found.update({f.name: "field" if f.required else "field, optional" for f in fields})
    # Exported classes of the front end may inherit; contracts list their own members only.
    bases = [base for base in cls.__mro__ if base.__module__.startswith("octavo.frontend")]
    inherited = {name: value for base in reversed(bases) for name, value in vars(base).items()}
    for name, value in {**inherited, **vars(cls)}.items():
        if name in struct or inspect.ismemberdescriptor(value):
            continue
        if name.startswith("_") and name not in ("__init__", "__len__", "__call__"):
            continue
        if dataclasses.is_dataclass(cls) and name == "__init__":
            continue
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if inspect.isfunction(function):
            abstract = getattr(function, "__isabstractmethod__", False)
            found[name] = _signature(function) + (", abstract" if abstract else "")
        elif isinstance(value, property):
            found[name] = "property"
    return found


def _signature(function: Any) -> str:
    """Names, kinds and whether there is a default; annotations and values are spelling."""
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        text = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
        parts.append(text + ("=..." if parameter.default is not parameter.empty else ""))
    return f"({', '.join(parts)})"


def problems(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What the change from `old` to `new` breaks without saying so by a version."""
    found = []
    for module in ("octavo", "octavo.kernels", "octavo.testing"):
        for name in old.get(module, {}):
            if name not in new[module]:
                found.append(f"{module}.{name} is gone")
    for kind, before in old["contracts"].items():
        after = new["contracts"].get(kind)
        if after is None:
            found.append(f"contract {kind} is gone")
            continue
        if {**before, "version": ""} == {**after, "version": ""}:
            continue
        was, now = _version(before["version"]), _version(after["version"])
        needed = (was[0] + 1, 0) if _breaks(before, after) else (was[0], was[1] + 1)
        if was[0] > 0 and now < needed:
            found.append(
                f"contract {kind} changed and is still version {after['version']}: raise it to "
                f"{needed[0]}.{needed[1]} where its KIND is declared"
            )
    return found


def _breaks(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether something that was written for `before` may fail with `after`."""
    if before["hook"] != after["hook"]:
        return True
    for name, members in before["classes"].items():
        now = after["classes"].get(name)
        if now is None or any(
            # A method that need not be written any more is still one that may be.
            now.get(member) not in (text, text.removesuffix(", abstract"))
            for member, text in members.items()
        ):
            return True
        added = [text for member, text in now.items() if member not in members]
        if any(text.endswith("abstract") or text == "field" for text in added):
            return True
    return False


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def main() -> int:
    new = surface()
    old = json.loads(FILE.read_text()) if FILE.exists() else new
    found = problems(old, new)
    for line in found:
        print(line, file=sys.stderr)
    if "--check" in sys.argv[1:]:
        if not found and new != old:
            print("docs/surface.json is stale: run `make docs`", file=sys.stderr)
        return int(bool(found) or new != old)
    if not found:
        FILE.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
        print(f"wrote {FILE.name}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
