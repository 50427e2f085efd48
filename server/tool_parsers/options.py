"""Options of the tool parsers that read JSON."""

from __future__ import annotations

from pydantic import Field

from octavo.core.contracts import Options


class JsonParserOptions(Options):
    """How arguments are given out."""

    stream_arguments: bool = Field(
        default=False,
        description="Stream the arguments of a call as they are written. Otherwise a call is given "
        "out when it is whole, so that one that is malformed comes back as text; with this its "
        "arguments are given as the model wrote them.",
    )
