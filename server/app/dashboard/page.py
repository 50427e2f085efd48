"""The page: one HTML document with its style and script inside, and a policy that lets nothing else
run or load."""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response


@lru_cache(maxsize=1)
def document() -> tuple[bytes, str]:
    """The page and its Content-Security-Policy."""
    folder = resources.files(__package__ or __name__.rpartition(".")[0])
    page, style, script = (
        (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")
    )
    for place, text in (("/* style */", style), ("/* script */", script)):
        assert page.count(place) == 1, f"the page has one place for {place}"
        page = page.replace(place, text)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return page.encode(), policy


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


async def page(request: Request) -> Response:
    """The page."""
    body, policy = document()
    return Response(
        body,
        media_type="text/html",
        headers={
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        },
    )
