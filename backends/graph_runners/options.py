"""Options of the graph runners; imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from octavo.core.contracts import Options


class CompileOptions(Options):
    """How torch.compile is asked."""

    backend: str = Field(default="inductor", description="A backend of torch.compile.")
    mode: Literal["default", "max-autotune-no-cudagraphs"] = Field(
        default="default", description="Its mode, for the backend `inductor`."
    )
