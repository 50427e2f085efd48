"""Errors that a client sees: OpenAI's error objects and their HTTP statuses.

ApiError                  any refusal, with status, message, type, param, code, headers
from_exception()          OctavoError tree -> ApiError:
    RequestTooLong        400 context_length_exceeded
    RequestError          400 with its param and code
    RequestFault          500 internal_error, with its message (a plugin failed, no numbers)
    EngineDeadError       503 engine_dead
    anything else         500 internal_error (logged; the text of the exception stays here)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from octavo.core.errors import EngineDeadError, RequestError, RequestFault, RequestTooLong

logger = logging.getLogger("octavo.server")

RETRY_AFTER_S = 5
"""What a refused client is told to wait when nothing better is known."""


class ApiError(Exception):
    """A refusal. `error_type` is OpenAI's `type`, `code` a short stable name."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        error_type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.error_type = error_type or default_type(status)
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.error_type,
                "param": self.param,
                "code": self.code,
            }
        }


def default_type(status: int) -> str:
    """OpenAI's `type` for an HTTP status."""
    if status == 503:
        return "service_unavailable_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def unavailable(message: str, code: str) -> ApiError:
    """503 with Retry-After."""
    headers = {"retry-after": str(RETRY_AFTER_S)}
    return ApiError(message, status=503, code=code, headers=headers)


def from_exception(error: BaseException, renamed: Mapping[str, str] | None = None) -> ApiError:
    """The refusal for an exception; what nobody expected is logged and becomes a bare 500.

    renamed: parameters that the client knows under another name.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestFault):
        return ApiError(error.message, status=500, code=error.code)
    if isinstance(error, RequestError):
        return _from_request_error(error, renamed or {})
    if isinstance(error, EngineDeadError):
        return unavailable(f"the engine has stopped: {error}", "engine_dead")
    logger.error("unexpected error in a request", exc_info=error)
    return ApiError(
        "an internal error occurred; the server's log has the details",
        status=500,
        code="internal_error",
    )


def _from_request_error(error: RequestError, renamed: Mapping[str, str]) -> ApiError:
    code = error.code or "invalid_value"
    if isinstance(error, RequestTooLong):
        code = error.code or "context_length_exceeded"
    param = error.param if error.param is None else renamed.get(error.param, error.param)
    return ApiError(_in_clients_words(error.message, renamed), param=param, code=code)


WORDS = ("prompt", "messages")
"""Parameters whose names are words, too: they are meant only where a message begins with them."""


def _in_clients_words(message: str, renamed: Mapping[str, str]) -> str:
    for ours, theirs in renamed.items():
        pattern = rf"^{ours}\b" if ours in WORDS else rf"\b{ours}\b"
        message = re.sub(pattern, theirs, message)
    return message
