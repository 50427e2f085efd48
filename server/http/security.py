"""API keys: where they come from, and the middleware that asks for one."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.core.errors import ConfigError
from octavo.server.config import API_KEYS, ServerConfig
from octavo.server.http.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ping", "/dashboard"})
"""Routes without data: load balancers ask them without a key, and the page asks for one itself."""


def load_keys(config: ServerConfig) -> dict[str, str]:
    """All keys by name: from the configuration, its file, and OCTAVO_API_KEYS.

    Raises `ConfigError` (which never shows a key) for a file that cannot be read, an empty key, or
    a name given twice.
    """
    keys: dict[str, str] = {}
    for name, secret in config.api_keys.items():
        _add(keys, name, secret.get_secret_value(), "server.api_keys")
    if config.api_keys_file is not None:
        found = _read_file(config.api_keys_file)
        if not found:  # who names a file means to ask for keys
            raise ConfigError(
                f"expected a line `name: key`, there is none in '{config.api_keys_file}'",
                path="server.api_keys_file",
            )
        for name, key in found:
            _add(keys, name, key, "server.api_keys_file")
    for number, item in enumerate(API_KEYS.get() or (), 1):
        name, colon, key = item.partition(":")
        if colon:
            _add(keys, name.strip(), key.strip(), API_KEYS.name)
        else:
            _add(keys, f"env{number}", item, API_KEYS.name)
    return keys


def _read_file(path: str) -> list[tuple[str, str]]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"cannot read '{path}': {reason}", path="server.api_keys_file") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, colon, key = line.partition(":")
        if not colon:
            raise ConfigError(
                "expected `name: key`", path="server.api_keys_file", file=path, line=number
            )
        found.append((name.strip(), key.strip()))
    return found


def _add(keys: dict[str, str], name: str, key: str, where: str) -> None:
    if not key or not key.isascii() or any(c.isspace() for c in key) or set(key) == {"*"}:
        raise ConfigError(
            f"the key named '{name}' must be ASCII text without spaces, and not empty or masked",
            path=where,
        )
    if name in keys:
        raise ConfigError(f"two keys have the name '{name}'", path=where)
    keys[name] = key


class ApiKeys:
    """Answers 401 unless the request bears one of the keys. Compares digests, every one of them, so
    that the time taken tells nothing. The name of the key is left in the request's state
    (`api_key_name`): it is the request's user where the body names none."""

    def __init__(self, app: ASGIApp, keys: Mapping[str, str]) -> None:
        self._app = app
        self._digests = {name: _digest(key) for name, key in keys.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _path(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        name = self._name(token.strip()) if scheme.lower() == "bearer" else None
        if name is not None:
            scope.setdefault("state", {})["api_key_name"] = name
            await self._app(scope, receive, send)
            return
        what = "the API key is not known" if token else "an API key is needed"
        refusal = ApiError(
            f"{what}; send it as 'Authorization: Bearer KEY'",
            status=401,
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        response = JSONResponse(refusal.body(), status_code=401, headers=refusal.headers)
        await response(scope, receive, send)

    def _name(self, token: str) -> str | None:
        """The key's name, None for an unknown key."""
        given = _digest(token)
        found = [name for name, known in self._digests.items() if hmac.compare_digest(given, known)]
        return found[0] if found else None


def _path(scope: Scope) -> str:
    """The path below `root_path`."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
