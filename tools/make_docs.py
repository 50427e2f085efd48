"""Write the parts of the documentation that come from the code: `make docs`.

Whole pages: docs/contracts/*.md from the source of the contracts, docs/commands.md from the
argument parsers, docs/gpu-kernels.md from the table of compiled kernels. Tables between
`<!-- name -->` and `<!-- end -->` in pages written by hand: kinds, built-in implementations,
promises, metrics, decisions; and the pages of kinds in mkdocs.yml. A test compares all of them with
the code.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

from octavo import backends, models, plugins, server
from octavo.core.contracts import Kind, provider
from octavo.core.registry import Registry
from octavo.plugins.observers.prometheus.families import API, ENGINE, Family
from octavo.server.command_line.main import _parser
from octavo.testing.conformance import SUITES, suite_of
from octavo.testing.conformance.base import ConformanceSuite, promise_text, promises

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SITE = ROOT / "mkdocs.yml"
KERNEL_TABLE = ROOT / "backends" / "triton" / "kernels.json"

# Modules whose functions are hook implementations, as the entry points of pyproject.toml list them.
BUILT_IN = (plugins, backends, models, server)


def kinds() -> list[Kind]:
    """Every kind, those of the engine first."""
    return sorted(Registry.discover(only=[]).kinds.values(), key=is_server_kind)


def is_server_kind(kind: Kind) -> bool:
    return kind.module.__name__.startswith("octavo.server.")


def title(kind: Kind) -> str:
    """`kv_cache_manager` as a heading."""
    return kind.name.replace("_", " ").capitalize().replace("Kv ", "KV ")


# ---- contracts, one page a kind ------------------------------------------------------------------


def signature(function: ast.FunctionDef) -> str:
    """`name(arguments) -> result` without `self`."""
    arguments = ast.unparse(function.args)
    for first in ("self, ", "self", "cls, ", "cls"):
        if arguments.startswith(first):
            arguments = arguments.removeprefix(first)
            break
    result = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"{function.name}({arguments}){result}"


def doc(node: ast.AsyncFunctionDef | ast.FunctionDef | ast.ClassDef | ast.Module) -> str:
    """The docstring, or an empty text."""
    return ast.get_docstring(node) or ""


def is_abstract(function: ast.FunctionDef) -> bool:
    return any("abstractmethod" in ast.unparse(line) for line in function.decorator_list)


def is_static(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(line) == "staticmethod" for line in function.decorator_list)


def string_after(body: list[ast.stmt], index: int) -> str:
    """The string that stands below a statement and documents it, or an empty text."""
    after = body[index + 1] if index + 1 < len(body) else None
    value = after.value if isinstance(after, ast.Expr) else None
    is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return inspect.cleandoc(value.value) if is_text else ""


def type_names(tree: ast.Module) -> str:
    """Types that list their values (`KVDim = Literal[...]`), with the string below each."""
    text = ""
    for index, node in enumerate(tree.body):
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal["):
            about = string_after(tree.body, index)
            text += f"**`{ast.unparse(node.targets[0])}`**"
            text += (f": {about}" if about else "") + "\n\n" + block([ast.unparse(node)])
    return text


def fields(node: ast.ClassDef, lines: list[str]) -> list[str]:
    """Attributes as in the source, with the comments and strings that document them."""
    shown = []
    for index, item in enumerate(node.body):
        if isinstance(item, ast.AnnAssign | ast.Assign):
            first = item.lineno - 1
            while lines[first - 1].strip().startswith("#"):
                first -= 1
            shown += [f"# {line}".rstrip() for line in string_after(node.body, index).splitlines()]
            shown += [line[item.col_offset :] for line in lines[first : item.end_lineno]]
    return shown


def block(lines: list[str]) -> str:
    return "```python\n" + "\n".join(lines) + "\n```\n\n" if lines else ""


def data_class(node: ast.ClassDef, lines: list[str]) -> str:
    text = f"**`{node.name}`**"
    text += f": {doc(node)}\n\n" if doc(node) else "\n\n"
    return text + block(fields(node, lines))


def contract_class(node: ast.ClassDef, lines: list[str]) -> str:
    text = f"### class `{node.name}`\n\n{doc(node)}\n\n{block(fields(node, lines))}"
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            status = "Abstract" if is_abstract(item) else "Has a default"
            static = ", `@staticmethod`" if is_static(item) else ""
            text += f"#### `{signature(item)}`\n\n*{status}{static}.* {doc(item)}\n\n"
    return text


def parse(kind: Kind) -> tuple[ast.Module, dict[str, ast.ClassDef], list[str]]:
    source = inspect.getsource(kind.module)
    tree = ast.parse(source)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return tree, classes, source.splitlines()


def contract_page(kind: Kind) -> str:
    """One kind: its hook, what its module says, what a factory gets, the class, its types."""
    tree, classes, lines = parse(kind)
    (hook,) = (f for f in classes["Spec"].body if isinstance(f, ast.FunctionDef))
    assert hook.name == kind.hook, f"{kind.name} declares {hook.name}, KINDS says {kind.hook}"
    text = f"# {title(kind)}\n\n{written_from(f'the docstrings of {kind.module.__name__}')}"
    about = doc(tree).removeprefix(f"Kind `{kind.name}`: ")
    text += f"{about[:1].upper()}{about[1:]}\n\n| kind | version | chosen by | module |\n"
    text += f"|---|---|---|---|\n| `{kind.name}` | {kind.version} | `{kind.config_path}` "
    text += f"| `{kind.module.__name__}` |\n\n"
    text += f"## `{signature(hook)}`\n\n{doc(hook)}\n\n"
    context, contract = classes[kind.context.__name__], classes[kind.contract.__name__]
    text += f"### context `{context.name}`\n\n{doc(context)}\n\n{block(fields(context, lines))}"
    text += contract_class(contract, lines)
    for node in classes.values():
        if node in (context, contract) or node.name == "Spec":
            continue
        is_contract = {ast.unparse(base) for base in node.bases} & {"ABC", contract.name}
        text += contract_class(node, lines) if is_contract else data_class(node, lines)
    return tidy(text + type_names(tree))


def shared_page() -> str:
    """The types that all kinds share."""
    source = inspect.getsource(provider)
    text = f"# Shared types\n\n{written_from(f'the docstrings of {provider.__name__}')}"
    text += "What providers of every kind use. All of it can be imported from "
    text += "`octavo.core.contracts`.\n\n"
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name != "NoOptions":
            text += data_class(node, source.splitlines())
    return tidy(text)


def written_from(source: str) -> str:
    return f"<!-- Written by `make docs` from {source}; edit it there. -->\n\n"


def tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip() + "\n"


# ---- commands ------------------------------------------------------------------------------------


def commands_page() -> str:
    """Every command with its arguments. Flags that stand for keys of the configuration are listed
    once, as most commands take them."""
    text = f"# Commands\n\n{written_from('the argument parsers')}"
    text += "What `octavo COMMAND --help` prints. `octavo --version` prints the version.\n\n"
    flags: list[argparse.Action] = []
    for about, parser in leaves(_parser()):
        groups = [g for g in parser._action_groups if "vLLM" in (g.title or "")]
        items = [item for group in groups for item in group._group_actions]
        flags = flags or items
        text += f"## `{parser.prog}`\n\n{sentence(parser.description or about)}\n\n"
        text += argument_table([item for item in parser._actions if item not in items])
        text += "Takes the [engine flags](#engine-flags) as well.\n\n" if items else ""
    text += "## Engine flags\n\nvLLM's names for keys of the [configuration](configuration.md), "
    text += "in brackets. A flag wins over `--set`, and `--set` over the file.\n\n"
    return tidy(text + argument_table(flags))


def leaves(
    parser: argparse.ArgumentParser, about: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that can be run, with what the list of commands says about it."""
    populate = getattr(parser, "populate", None)
    if populate is not None:
        parser.populate = None  # type: ignore[attr-defined]
        populate(parser)
    nested = [item for item in parser._actions if isinstance(item, argparse._SubParsersAction)]
    if not nested or not nested[0].required:
        yield about, parser
    for item in nested:
        about_each = {entry.dest: entry.help or "" for entry in item._choices_actions}
        for name, command in item.choices.items():
            yield from leaves(command, about_each.get(name, ""))


def argument_table(items: list[argparse.Action]) -> str:
    rows = ""
    for item in items:
        hidden = isinstance(item, (argparse._SubParsersAction, argparse._HelpAction))
        if hidden or item.help == argparse.SUPPRESS:
            continue
        names = ", ".join(f"`{name}`" for name in item.option_strings)
        value = item.metavar or (item.dest.upper() if item.nargs != 0 else "")
        value = " ".join(value) if isinstance(value, tuple) else value
        if isinstance(item, argparse.BooleanOptionalAction):
            value = ""
        if item.choices and not item.metavar:
            value = "{" + ",".join(str(choice) for choice in item.choices) + "}"
        shown = f"{names} `{value}`" if names and value else names or f"`{value}`"
        about = sentence((item.help or "") % vars(item))
        rows += "| " + " | ".join(cell.replace("|", "\\|") for cell in (shown, about)) + " |\n"
    return f"| argument | |\n|---|---|\n{rows}\n" if rows else ""


def sentence(text: str) -> str:
    """With a capital in front and a full stop at the end."""
    text = " ".join(text.split())
    if not text:
        return text
    starts_with_value = text.split()[0].endswith(":")
    first = text[0] if starts_with_value else text[0].upper()
    return first + text[1:] + ("" if text[-1] in ".)]" else ".")


# ---- tables in pages that are written by hand ----------------------------------------------------


def fill(page: str, tables: dict[str, str]) -> str:
    """The page with what stands between its markers renewed."""
    for name, table in tables.items():
        before, opening, rest = page.partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition("<!-- end -->")
        assert closing, f"the page has no place for '{name}'"
        page = f"{before}{opening}{table.strip()}\n{closing}{after}"
    return page


def kind_table() -> str:
    rows = ""
    for kind in kinds():
        rows += f"| [{kind.name}](contracts/{kind.name}.md) | `{kind.module.__name__}` "
        rows += f"| `{kind.hook}` |\n"
    return f"| kind | module | hook |\n|---|---|---|\n{rows}"


def built_in_table() -> str:
    """Every implementation that Octavo brings, by kind."""
    rows = ""
    for kind in kinds():
        name = f"[{kind.name.replace('_', ' ')}](contracts/{kind.name}.md)"
        for module in BUILT_IN:
            for offered in getattr(module, kind.hook, list)():
                rows += f"| {name} | `{offered.name}` | {offered.summary} |\n"
                name = ""
    return f"| kind | name | description |\n|---|---|---|\n{rows}"


def promise_lists() -> str:
    """Every promise of every kind."""
    shared = promises(ConformanceSuite)
    text = "## Every kind\n\n" + _promise_list(ConformanceSuite, shared)
    for kind, name in SUITES.items():
        suite = suite_of(kind)
        text += f"## `{kind}`: `{name}`\n\n{inspect.getdoc(suite)}\n\n"
        text += _promise_list(suite, [item for item in promises(suite) if item not in shared])
    return tidy(text)


def _promise_list(suite: type[ConformanceSuite], names: list[str]) -> str:
    lines = (f"- `{name.removeprefix('test_')}`: {promise_text(suite, name)}\n" for name in names)
    return "".join(lines) + "\n"


def metric_table(families: tuple[Family, ...]) -> str:
    rows = ""
    for family in families:
        name = f"{family.name}_total" if family.kind == "counter" else family.name
        values = ", ".join(f"`{value}`" for value in family.values)
        label = f" Label `{family.label}`: {values}." if family.label else ""
        rows += f"| `{name}` | {family.kind} | {family.doc}{label} |\n"
    return f"| metric | type | meaning |\n|---|---|---|\n{rows}"


def navigation(site: str) -> str:
    """mkdocs.yml with a page for each kind."""
    before, opening, rest = site.partition("          # kinds: written by `make docs`\n")
    _, closing, after = rest.partition("          # end\n")
    pages = "".join(f"          - {title(kind)}: contracts/{kind.name}.md\n" for kind in kinds())
    return f"{before}{opening}{pages}{closing}{after}"


def decision_table() -> str:
    rows = ""
    for note in sorted((DOCS / "decisions").glob("*.md")):
        heading = note.read_text().partition("\n")[0].removeprefix("# ")
        rows += f"| {note.name[:10]} | [{heading}](decisions/{note.name}) |\n"
    return f"| date | note |\n|---|---|\n{rows}"


# ---- Triton kernels ------------------------------------------------------------------------------

GPU_INTRODUCTION = """\
# Triton kernels

<!-- Written by `make docs` from backends/triton/kernels.json; that by
`python -m octavo.backends.triton.ahead --write`. -->

What each launch costs, as compiled ahead of time by Triton {triton}. For each device: bytes of
shared memory a program / registers a thread / bytes of local memory a thread (spills, and values
that the hardware keeps there) / warps a program. `G` is the number of query heads that share a KV
head.

| launch | kernel | {devices} |
|---|---|{line}|
"""


def gpu_kernels() -> str:
    """The page of compiled kernels."""
    table = json.loads(KERNEL_TABLE.read_text())
    devices = ["sm_80", "sm_90", "sm_100"]
    text = GPU_INTRODUCTION.format(
        triton=table["triton"], devices=" | ".join(devices), line="|".join("---" for _ in devices)
    )
    for launch, by_device in sorted(table["kernels"].items()):
        for kernel in by_device[devices[0]]:
            costs = (by_device[device][kernel] for device in devices)
            shown = " | ".join(
                f"{c['shared']} / {c['registers']} / {c['spilled']} / {c['warps']}" for c in costs
            )
            text += f"| {launch} | `{kernel.removesuffix('_kernel')}` | {shown} |\n"
    return text


def derived() -> dict[Path, str]:
    """Every derived page, with the text that it should have."""

    def filled(name: str, **tables: str) -> dict[Path, str]:
        by_marker = {marker.replace("_", " "): table for marker, table in tables.items()}
        return {DOCS / name: fill((DOCS / name).read_text(), by_marker)}

    pages = {DOCS / "contracts" / f"{kind.name}.md": contract_page(kind) for kind in kinds()}
    return pages | {
        DOCS / "contracts" / "shared.md": shared_page(),
        SITE: navigation(SITE.read_text()),
        DOCS / "commands.md": commands_page(),
        DOCS / "gpu-kernels.md": gpu_kernels(),
        **filled("contracts.md", kinds=kind_table()),
        **filled("built-in.md", built_in=built_in_table()),
        **filled("decisions.md", decisions=decision_table()),
        **filled("conformance.md", promises=promise_lists()),
        **filled("metrics.md", engine_metrics=metric_table(ENGINE), api_metrics=metric_table(API)),
    }


def main() -> None:
    for file, text in derived().items():
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
            print(f"wrote {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
