"""Options of the graph runners; imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from octavo.core.contracts import Options


class CompileOptions(Options):
    """How torch.compile is asked."""

    backend: str = Field(default="inductor", description="A backend of torch.compile.")
    mode: Literal["default", "max-autotune-no-cudagraphs"] = Field(
        default="default", description="Its mode, for the backend `inductor`."
    )


class CudaGraphOptions(Options):
    """What is captured, and how the passes inside are made."""

    capture_sizes: list[Annotated[int, Field(gt=0)]] | None = Field(
        default=None,
        description="Rows of the decode-only batches that are captured; not given: 1, 2, 4, then "
        "every 8 up to `scheduler.max_num_seqs`.",
    )
    compile: CompileOptions = Field(
        default=CompileOptions(), description="Options of the runner `compile`, for what is inside."
    )
