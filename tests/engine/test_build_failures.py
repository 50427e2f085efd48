"""An engine that cannot be built leaves nothing open."""

from __future__ import annotations

import textwrap

import pytest

from octavo.core.registry import Registry
from octavo.engine.builder import build_engine
from octavo.engine.resolve import resolve
from octavo.frontend.config import load_config
from octavo.testing.model_folder import write_model_folder

PLUGIN = """
    from pathlib import Path

    from octavo.core.contracts import Options, Provider, hookimpl
    from octavo.core.contracts.observer import Observer

    LOG = Path(__file__).with_name("log")

    class NoteOptions(Options):
        fail: bool = False
        fail_close: bool = False

    class Note(Observer):
        def __init__(self, options, context):
            self.options = options
            if options.fail:
                raise RuntimeError("no room")

        def close(self):
            with LOG.open("a") as file:
                file.write("closed\\n")
            if self.options.fail_close:
                raise RuntimeError("cannot close")

    @hookimpl
    def octavo_observers():
        return [Provider(name="note", factory=Note, options=NoteOptions)]
"""


@pytest.mark.parametrize("fail_close", [False, True])
def test_observers_made_before_a_failure_are_closed(tmp_path, fail_close):
    (tmp_path / "note.py").write_text(textwrap.dedent(PLUGIN))
    folder = write_model_folder(tmp_path / "model")
    config = load_config(
        mapping={
            "model": {"source": str(folder), "weight_source": "dummy"},
            "plugins": {"load": ["octavo.testing.instant_executor", str(tmp_path / "note.py")]},
            "executor": {"kind": "instant"},
            "kv_cache": {"num_blocks": 8},
            "observers": [
                {"name": "note", "fail_close": fail_close},
                "note",
                {"name": "note", "fail": True},
            ],
        }
    )
    registry = Registry.discover(load=config.plugins.load)
    with pytest.raises(Exception, match="no room"):
        build_engine(resolve(config, registry), registry)
    assert (tmp_path / "log").read_text() == "closed\n" * 2
