"""Environment variables."""

from __future__ import annotations

import pytest

from octavo.core import envvars
from octavo.core.errors import ConfigError
from octavo.server.command_line.main import LOG_LEVEL


def test_values(monkeypatch, tmp_path):
    for name in envvars.DECLARED:
        monkeypatch.delenv(name, raising=False)
    assert envvars.PLUGINS.get() is None
    assert LOG_LEVEL.get() == "info"
    assert str(envvars.CACHE_DIR.get()).endswith(".cache/octavo")
    monkeypatch.setenv("OCTAVO_PLUGINS", "a, b,")
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "DEBUG")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "new"))
    assert envvars.PLUGINS.get() == ("a", "b")
    assert LOG_LEVEL.get() == "debug"
    assert envvars.CACHE_DIR.get() == tmp_path / "new"


def test_bad_values(monkeypatch, tmp_path):
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError) as caught:
        LOG_LEVEL.get()
    assert str(caught.value) == (
        "environment variable OCTAVO_LOG_LEVEL: expected one of debug, info, warning, error, "
        "got 'loud'"
    )
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="OCTAVO_CACHE_DIR: expected a directory, not a file"):
        envvars.CACHE_DIR.get()
