"""The metrics of an engine that has no server, on a port of their own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from octavo.plugins.observers.prometheus.exposition import Exposition


def serve(exposition: Exposition, host: str, port: int) -> Callable[[], None]:
    """Answer every GET with the metrics, from threads. Returns what ends it. Raises `OSError`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, content_type = exposition.render(self.headers.get("accept", ""))
            self.send_response(200)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Scrapes are not worth a line."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    server = Server((host, port), Handler)
    thread = threading.Thread(target=server.serve_forever, name="octavo-metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
