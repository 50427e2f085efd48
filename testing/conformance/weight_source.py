"""What every weight source promises."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.core.contracts.weight_source import WeightSource, WeightSourceContext
from octavo.core.errors import ModelError
from octavo.testing.conformance.base import ConformanceSuite
from octavo.testing.tiny_model import generate, make_engine, make_requests, write_tiny_model


class WeightSourceSuite(ConformanceSuite):
    """Subclass it with `provider`, or override `make` (a `WeightSource` for the context).

    write_source: puts a model where the implementation finds it, and returns what a user would
    write as `model.source`; by default the tiny model in a folder. missing: a source of the same
    form where nothing is.
    """

    kind = "weight_source"

    def write_source(self, folder: Path) -> str:
        """A model in a form that the implementation reads."""
        return str(write_tiny_model(folder / "model"))

    def missing(self, folder: Path) -> str:
        """A source of that form, but nothing is there."""
        return str(folder / "nothing-here")

    @contextmanager
    def place(self) -> Iterator[tuple[Path, str]]:
        """A folder, and the source that was written into it."""
        with tempfile.TemporaryDirectory(prefix="octavo-conformance-") as name:
            yield Path(name), self.write_source(Path(name))

    def source(self, folder: Path, source: str) -> WeightSource:
        """The weight source under test."""
        cache = folder / "cache"
        cache.mkdir(exist_ok=True)
        made = self.make(WeightSourceContext(source, None, None, cache, show_progress=False))
        assert isinstance(made, WeightSource), f"make returned {type(made).__name__}"
        return made

    def test_config_names_an_architecture(self) -> None:
        """config is a mapping with `architectures`, plain enough for JSON, and the same twice."""
        with self.place() as (folder, name):
            source = self.source(folder, name)
            config = source.config()
            assert config.get("architectures"), f"no architectures in {sorted(config)}"
            json.dumps(config)
            assert source.config() == config, "config changes from call to call"

    def test_generation_config_is_a_mapping(self) -> None:
        """generation_config is a mapping, empty where there is none."""
        with self.place() as (folder, name):
            found = self.source(folder, name).generation_config()
            assert isinstance(found, dict), f"generation_config is {type(found).__name__}"

    def test_tokenizer_files_are_there(self) -> None:
        """tokenizer_dir is None or a folder that exists."""
        with self.place() as (folder, name):
            found = self.source(folder, name).tokenizer_dir()
            assert found is None or Path(found).is_dir(), f"{found} is no folder"

    def test_configuration_needs_no_torch(self) -> None:
        """Reading the configuration imports no torch, in a fresh process."""
        self._needs_provider()
        factory = self.registered().provider.factory
        if not isinstance(factory, str):
            return
        import subprocess
        import sys

        module, _, attribute = factory.partition(":")
        with self.place() as (folder, name):
            (folder / "cache").mkdir(exist_ok=True)
            options = self.selection().options
            script = (
                "import sys, importlib\n"
                "from pathlib import Path\n"
                "from octavo.core.contracts.weight_source import WeightSourceContext\n"
                f"context = WeightSourceContext({name!r}, None, None,"
                f" Path({str(folder / 'cache')!r}), False)\n"
                f"make = getattr(importlib.import_module({module!r}), {attribute!r})\n"
                f"options = importlib.import_module({type(options).__module__!r})"
                f".{type(options).__name__}.model_validate({options.model_dump()!r})\n"
                "source = make(options, context)\n"
                "source.config(), source.generation_config(), source.tokenizer_dir()\n"
                "print('torch' in sys.modules)\n"
            )
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            done = subprocess.run(
                [sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False
            )
        assert done.returncode == 0, f"it cannot be used alone: {done.stderr[-300:]}"
        assert done.stdout.strip() == "False", "reading the configuration imports torch"

    def test_tensors_are_named_once(self) -> None:
        """Every tensor has a name of its own, lies on the CPU, and is the same when read again."""
        with self.place() as (folder, name):
            source, seen = self.source(folder, name), {}
            for tensor_name, tensor in source.tensors():
                assert tensor_name not in seen, f"'{tensor_name}' comes twice"
                assert tensor.device.type == "cpu", f"'{tensor_name}' lies on {tensor.device}"
                seen[tensor_name] = tensor.clone()
            assert seen, "no tensor at all"
            for tensor_name, tensor in source.tensors():
                assert seen[tensor_name].equal(tensor), f"'{tensor_name}' differs the second time"

    def test_nothing_there_is_said(self) -> None:
        """A source where nothing is raises ModelNotFound (or another ModelError) that names it."""
        with self.place() as (folder, _):
            missing = self.missing(folder)
            try:
                self.source(folder, missing).config()
            except ModelError as error:
                if missing.rsplit("/", 1)[-1] not in str(error):
                    raise AssertionError(f"it does not say what: {error}") from error
            else:
                raise AssertionError(f"'{missing}' was accepted")

    def test_engine_loads_the_model(self) -> None:
        """A real engine loads the model from it and generates."""
        self._needs_provider()
        entry = self.registered()
        choice: Any = {"name": entry.name, **self.options}
        with self.place() as (_, name):
            engine = make_engine(
                name, {"model": {"weight_source": choice}}, [(self.kind, entry.provider)]
            )
            try:
                tokens = generate(engine, make_requests(3))
            finally:
                engine.close()
        assert all(len(item) == 10 for item in tokens), f"generated {tokens}"
