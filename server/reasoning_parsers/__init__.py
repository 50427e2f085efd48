"""Built-in reasoning parsers. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

_HERE = "octavo.server.reasoning_parsers"

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="deepseek_r1",
        factory=f"{_HERE}.think:DeepSeekR1Parser",
        rank=-1,
        summary="`<think>` tags, the first of which may be missing: DeepSeek R1 and similar models",
    ),
    Provider(
        name="qwen3",
        factory=f"{_HERE}.think:Qwen3Parser",
        rank=-1,
        summary="`<think>` tags, or none where thinking is off: Qwen 3",
    ),
]
