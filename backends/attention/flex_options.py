"""Options of the attention backend `flex`. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from octavo.core.contracts import Options


class FlexOptions(Options):
    """Whether PyTorch generates a kernel."""

    compile: Literal["auto"] | bool = Field(
        default="auto",
        description="Whether FlexAttention goes through torch.compile, or runs unfused. auto: "
        "compiled on cuda.",
    )
