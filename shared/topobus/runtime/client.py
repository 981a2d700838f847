"""nats-py's client with a check before it sends anything: where TLS is required, no byte goes over a connection without it.

nats-py upgrades a connection only when the server's greeting asks for it, and the greeting is plain text. An attacker in between could remove that request and
receive user and password in clear. So the connection itself is checked at the last step before CONNECT, whatever the greeting said: at the first connect, at each
later one, and at every server that a greeting named.
"""

from __future__ import annotations

import nats.errors
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

__all__ = ["GatedClient", "NotEncrypted"]


class NotEncrypted(nats.errors.Error):
    """Raised when a server offers no TLS where it is wanted: nothing was sent to it."""

    def __init__(self, server: str, why: str) -> None:
        super().__init__(f"the server at {server} offers no TLS, which {why} wants: nothing was sent to it, no password either")


class GatedClient(Client):
    """A client that connects by TLS only, when `tls_because` says why it must."""

    def __init__(self, tls_because: str = "") -> None:
        super().__init__()
        self._tls_because = tls_because

    def _connect_command(self) -> bytes:
        if self._tls_because and not self._is_encrypted():
            server = self._current_server.uri if self._current_server is not None else None
            raise NotEncrypted(f"{server.hostname}:{server.port}" if server is not None else "?", self._tls_because)
        return super()._connect_command()

    def _is_encrypted(self) -> bool:
        transport = self._transport
        if isinstance(transport, TcpTransport):
            writer = transport._io_writer
            return writer is not None and writer.get_extra_info("ssl_object") is not None
        # A websocket is encrypted from its first byte or never.
        return self._current_server is not None and self._current_server.uri.scheme == "wss"
