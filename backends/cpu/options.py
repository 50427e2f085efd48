"""Options of the CPU backend's plugins. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from octavo.core.contracts import Options


class Int4Options(Options):
    """Options of quantization `int4`."""

    head_bits: Literal[4, 8] = Field(
        default=8,
        description="Bits of the language-model head's weights. The head suffers most from 4 bits.",
    )
