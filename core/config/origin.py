"""Where each value of a configuration came from, for error messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Path = tuple[str | int, ...]


def dotted(path: Path) -> str:
    """`scheduler.policy.weights`, `observers[0].port`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


class Origin:
    """From the path of a value to the file (or `--set`) and the line that it came from.

    All origins compare equal: they are not part of a configuration's value.
    """

    def __init__(self) -> None:
        self._where: dict[Path, tuple[str, int | None]] = {}

    def record(self, path: Path, file: str, line: int | None = None) -> None:
        """Record where the value at `path` came from, replacing what is known below it."""
        for known in [k for k in self._where if k[: len(path)] == path]:
            del self._where[known]
        self._where[path] = (file, line)

    def update(self, lines: Mapping[Path, int], file: str) -> None:
        """Record many paths of one file."""
        self._where.update({path: (file, line) for path, line in lines.items()})

    def where(self, path: Path) -> tuple[str | None, int | None]:
        """(file, line) of the value at `path`, or of the nearest one above it, or below."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._where:
                return self._where[path[:length]]
        below = (place for known, place in self._where.items() if known[: len(path)] == path)
        return next(below, (None, None)) if path else (None, None)

    def rows(self) -> list[tuple[list[str | int], str, int | None]]:
        """Everything recorded, as plain data: (path, file, line)."""
        return [(list(path), file, line) for path, (file, line) in self._where.items()]

    def replace(self, rows: Sequence[tuple[Sequence[str | int], str, int | None]]) -> None:
        """Replace everything by the `rows` of another process."""
        self._where = {tuple(path): (file, line) for path, file, line in rows}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return hash(Origin)
