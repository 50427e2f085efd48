"""Route plugin `perplexity`: `POST /perplexity` tells how probable the model finds a text.

{"text": "..."}  ->  {"tokens": 12, "logprob": -31.2, "perplexity": 17.1}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from octavo import RequestError, SamplingParams
from octavo.core.contracts import Options
from octavo.server.contracts.route import RouteContext, RoutePlugin


class PerplexityOptions(Options):
    """Where it is found, and what it takes."""

    path: str = Field(default="/perplexity", pattern="^/.+", description="Path of the route.")
    max_characters: int = Field(default=20_000, gt=0, description="Longest text that is taken.")


class PerplexityRoutes(RoutePlugin):
    """One route, on the engine that serves everything else too."""

    def __init__(self, options: PerplexityOptions, context: RouteContext) -> None:
        self._options, self._engine = options, context.engine

    def routes(self) -> Sequence[BaseRoute]:
        return [Route(self._options.path, self.perplexity, methods=["POST"])]

    async def perplexity(self, request: Request) -> JSONResponse:
        """How probable the model finds a text: its tokens, their summed logprob, its perplexity.

        The first token has nothing before it, so it is not counted.
        """
        text = self._text(await _json(request))
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        output = await self._engine.complete(text, params)
        values = [
            next(iter(entry.values())).logprob for entry in output.prompt_logprobs or () if entry
        ]
        total = math.fsum(values)
        perplexity = math.exp(-total / len(values)) if values else None
        return JSONResponse({"tokens": len(values), "logprob": total, "perplexity": perplexity})

    def _text(self, body: Any) -> str:
        text = body.get("text") if isinstance(body, dict) else None
        if not isinstance(text, str) or not text:
            raise RequestError(f"'text' must be a text, got {text!r:.40}", param="text")
        if len(text) > self._options.max_characters:
            raise RequestError(
                f"'text' has {len(text)} characters, at most {self._options.max_characters} are "
                "taken",
                param="text",
            )
        return text


async def _json(request: Request) -> Any:
    try:
        return await request.json()
    except ValueError:
        raise RequestError("the body is no JSON") from None
