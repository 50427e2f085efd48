"""Options of the attention backend `triton`. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from octavo.core.contracts import Options


class TritonAttentionOptions(Options):
    """How decode rows are cut."""

    num_splits: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = Field(
        default="auto",
        description="Pieces that the context of a decode row is cut into, each computed by a "
        "program of its own. auto: by the batch's size, so that the device is filled. A fixed "
        "number makes a row's result independent of the batch.",
    )
