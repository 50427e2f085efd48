"""The address that a server listens on: binding, certificates, and what to say when it fails."""

from __future__ import annotations

import errno
import os
import resource
import socket
import ssl
import stat

from octavo.core.errors import ConfigError
from octavo.server.config import ServerConfig

LEAST_FILES = 64
"""Open files without which a server and its engine do not start, whatever connects."""


def check_files() -> None:
    """Raise `ConfigError` where so few files may be open that the server cannot work."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < LEAST_FILES:
        raise ConfigError(
            f"this process may open {limit} files, expected at least {LEAST_FILES}, and one more "
            "for each connection: raise the limit (`ulimit -n 4096`; LimitNOFILE= of systemd)"
        )


def bind(config: ServerConfig) -> socket.socket:
    """A socket bound to the configured address. Raises OSError, see `bind_problem`."""
    if config.uds is not None:
        return _bind_path(config.uds)
    found = socket.getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_path(path: str) -> socket.socket:
    """A Unix socket; one that a dead server left behind is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            sock.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _abandoned(path):
                raise
            os.unlink(path)
            sock.bind(path)
    except BaseException:
        sock.close()
        raise
    return sock


def _abandoned(path: str) -> bool:
    """Whether a path is a socket on which nobody listens."""
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


def bind_problem(error: OSError, config: ServerConfig) -> str:
    """Why an address cannot be bound, and what helps."""
    reason = error.strerror or str(error)
    in_use = error.errno == errno.EADDRINUSE
    if config.uds is not None:
        return f"cannot listen on {config.uds}: {'it is in use' if in_use else reason}"
    where = f"{config.host}:{config.port}"
    if isinstance(error, socket.gaierror):
        reason = f"the host '{config.host}' is not known here"
    elif in_use:
        reason = f"port {config.port} is in use; choose another with --port (0 takes a free one)"
    return f"cannot listen on {where}: {reason}"


def address_of(sock: socket.socket, scheme: str = "http") -> str:
    """The URL of a bound socket."""
    name = sock.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host, port = name[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_certificate(config: ServerConfig) -> None:
    """Raises `ConfigError` for a certificate or key that is missing or cannot be used."""
    if config.ssl_certfile is None and config.ssl_keyfile is None:
        return
    for name in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(config, name)
        if path is None:
            raise ConfigError("certificate and key go together", path=f"server.{name}")
        if not os.access(path, os.R_OK):
            raise ConfigError(f"cannot read '{path}'", path=f"server.{name}")
    assert config.ssl_certfile is not None, "checked above"
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"'{config.ssl_certfile}' and '{config.ssl_keyfile}' are not a certificate and its "
            f"key in PEM form ({reason})",
            path="server.ssl_certfile",
        ) from None
