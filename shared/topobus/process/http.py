"""The probe and metrics endpoint: /healthz (the loops make progress), /readyz (ready, or which part
is not), /metrics (Prometheus).

It is the standard library's server in its own thread: it answers while the event loop is busy and
adds no dependency. The content comes from the loops' reports (`heartbeat`): a process whose event
loop hangs, or whose work makes no progress, is neither alive nor ready.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from typing import Any, Self

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from topobus.process.config import HttpSettings
from topobus.process.heartbeat import Heartbeats
from topobus.process.logging import get_logger
from topobus.process.readiness import Readiness
from topobus.values.errors import ConfigError

__all__ = ["Endpoint"]


class Endpoint:
    """Serves while the `with` block runs. Does nothing when the port is 0."""

    def __init__(
        self, settings: HttpSettings, readiness: Readiness, registry: CollectorRegistry, beats: Heartbeats | None = None
    ) -> None:
        self._settings = settings
        self._beats = beats or Heartbeats()
        self._readiness = readiness
        self._registry = registry
        self._server: _Server | None = None
        self._serving: threading.Thread | None = None
        self._end, self._ended = socket.socketpair()

    def __enter__(self) -> Self:
        if self._settings.port == 0:
            return self
        kind = type("_BoundServer", (_Server,), {"address_family": AF_INET6 if ":" in self._settings.host else AF_INET})
        try:
            self._server = kind(
                (self._settings.host, self._settings.port), _handler(self._readiness, self._registry, self._beats)
            )
        except (OSError, OverflowError) as err:
            raise ConfigError(
                f"http.port: cannot listen at {self._settings.host}:{self._settings.port}: {err}",
                next_step="choose another port, or 0 for none",
                key="http.port",
            ) from err
        self._serving = threading.Thread(target=self._server.serve_until, args=(self._ended,), name="http", daemon=True)
        self._serving.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None and self._serving is not None:
            self._end.send(b".")
            self._serving.join()
            self._server.server_close()
        self._end.close()
        self._ended.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # `handle_request` is called when a request is there; one that has
    # gone meanwhile is not waited for.
    timeout = 0

    def serve_until(self, ended: socket.socket) -> None:
        """Serve until something comes at `ended`.

        The base class wakes up twice a second to see whether it must stop.
        """
        with selectors.DefaultSelector() as selector:
            for channel in (self.socket, ended):
                selector.register(channel, selectors.EVENT_READ)
            while all(key.fileobj is not ended for key, _ in selector.select()):
                self.handle_request()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log in one line what ended a request.

        The base class prints a traceback, also for each client that only hung up.
        """
        err = sys.exception()
        log = get_logger()
        (log.debug if isinstance(err, OSError) else log.error)(
            "http.request-failed", client=str(client_address), error=repr(err)
        )


def _handler(readiness: Readiness, registry: CollectorRegistry, beats: Heartbeats) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5.0
        server_version = "topobus"
        sys_version = ""

        def do_GET(self) -> None:
            """Answer the three paths."""
            path = self.path.partition("?")[0]
            stalled = {name: f"stalled: no progress for {silent_s:.0f} s" for name, silent_s in beats.stalled().items()}
            if path == "/healthz":
                text = "".join(f"{name} {what}\n" for name, what in stalled.items()) or "ok\n"
                self._send(503 if stalled else 200, "text/plain; charset=utf-8", text.encode())
            elif path == "/readyz":
                is_ready = readiness.is_ready and not stalled
                body = json.dumps({"ready": is_ready, "parts": readiness.report() | stalled}, indent=1).encode() + b"\n"
                self._send(200 if is_ready else 503, "application/json", body)
            elif path == "/metrics":
                self._send(200, CONTENT_TYPE_LATEST, generate_latest(registry))
            else:
                self._send(404, "text/plain; charset=utf-8", b"try /healthz, /readyz or /metrics\n")

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
            """Log nothing: a probe each second is not worth a line."""

    return Handler
