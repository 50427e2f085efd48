"""The private folder with the engine's socket."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

SOCKET = "engine.sock"
_LONGEST = 100  # bytes of a Unix socket's path: 104 on macOS, 108 on Linux, with the final zero


def make_folder() -> Path:
    """A new folder that only this user can enter (mode 0700)."""
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), None, "/tmp"):
        if parent is not None and not os.access(parent, os.W_OK | os.X_OK):
            continue
        folder = Path(tempfile.mkdtemp(prefix="octavo-", dir=parent))
        if len(os.fsencode(folder / SOCKET)) <= _LONGEST:
            return folder
        folder.rmdir()
    raise OSError("every folder for temporary files has too long a path for a Unix socket")


def address(folder: Path) -> str:
    """The ZeroMQ address of the socket in a folder."""
    return f"ipc://{folder / SOCKET}"


def remove_folder(folder: Path) -> None:
    """Remove the folder and what is in it; harmless when it is gone."""
    shutil.rmtree(folder, ignore_errors=True)
