"""Options of the attention backend `flashinfer`. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from octavo.core.contracts import Options


class FlashInferOptions(Options):
    """Memory, and when decode rows that share a prefix are computed together."""

    workspace_bytes: int = Field(
        default=128 * 2**20,
        ge=2**20,
        description="Device memory for partial results, shared by all layers.",
    )
    cascade: bool = Field(
        default=True,
        description="Whether decode rows that share a long prefix read it once, all together. "
        "Only in batches that do not run from a captured graph.",
    )
    cascade_min_rows: int = Field(
        default=8, ge=2, description="Least rows that must share a prefix."
    )
    cascade_min_tokens: int = Field(
        default=512, ge=1, description="Least tokens that a shared prefix must have."
    )
