"""Numbers of bytes in messages."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes in powers of 1024: `11 KiB`, `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
