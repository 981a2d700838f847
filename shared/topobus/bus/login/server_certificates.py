"""Watches until when the NATS server's certificate is valid, and explains why one was refused, with
its dates and names.

It keeps a metric, and warns from 30 days before the end. A connection that is up survives the end
of a certificate, so only the next connect would show it, which is late. And the certificate that
the connection began with does not show the one that the server has got since. So from that day on
the server's present certificate is read by a handshake after which nothing is sent. A refused
certificate is read in the same way, unverified: its facts are for people and decide nothing.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from datetime import datetime, timedelta

from nats.aio.client import Client

from topobus.bus.connection.client import GatedClient
from topobus.bus.connection.endpoint import tls_context
from topobus.bus.login.certificate_facts import CertificateFacts, day, parse_certificate
from topobus.bus.login.tls_trust import server_context
from topobus.process.clock import Clock
from topobus.process.config import NatsSettings
from topobus.process.logging import get_logger
from topobus.process.metrics import BusMetrics
from topobus.values.errors import ConfigError

__all__ = ["ServerCertificates", "shown_certificate", "why_refused"]

# Time enough for an operator who looks once a week.
_WARN_BEFORE = timedelta(days=30)
_LOOK_EVERY_S = 6 * 3600.0
_LOOK_S = 2.0
# X509_V_ERR_…, openssl/x509_vfy.h
_NOT_YET_VALID, _EXPIRED, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 62, 64
_NOT_SHOWN = (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError)


async def shown_certificate(host: str, port: int, context: ssl.SSLContext) -> CertificateFacts:
    """Ask a NATS server for its certificate, and send nothing afterwards.

    Errors: raises OSError (ssl.SSLCertVerificationError among them), TimeoutError or ValueError
    when it shows none that the context accepts.
    """
    async with asyncio.timeout(_LOOK_S):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            # Its greeting comes in clear, and then it waits for the handshake.
            await reader.readline()
            await writer.start_tls(context, server_hostname=host)
            shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        finally:
            writer.transport.abort()
    return parse_certificate(shown or b"")


def why_refused(
    err: ssl.SSLCertVerificationError, facts: CertificateFacts, *, host: str, port: int, now: datetime, ca_file: str
) -> str:
    """Explain why a certificate was refused.

    Shapes: facts — those of the server's certificate, unverified. ca_file — setting
    nats.tls_ca_file; empty: the system's own authorities.
    """
    server = f"the certificate of the server at {host}:{port}"
    if err.verify_code == _EXPIRED and facts.is_expired(now):
        return (
            f"{server} expired on {day(facts.not_after)} (it was good from {day(facts.not_before)}); here it is "
            f"{day(now)}"
        )
    if err.verify_code == _NOT_YET_VALID and facts.not_before > now:
        return f"{server} is good from {day(facts.not_before)} to {day(facts.not_after)}; here it is {day(now)}"
    if err.verify_code in (_OTHER_NAME, _OTHER_ADDRESS):
        return f"{server} is for {', '.join(facts.names) or 'nobody'}, and not for {host}"
    trusted = f"{ca_file} (nats.tls_ca_file)" if ca_file else "this system's own authorities"
    return f"{server} is signed by {facts.issuer or 'nobody'!r}, not trusted by {trusted}: {err.verify_message}"


class ServerCertificates:
    """The server's certificate as one connection knows it."""

    def __init__(self, settings: NatsSettings, metrics: BusMetrics, clock: Clock) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._refused: tuple[ssl.SSLCertVerificationError, str, int] | None = None
        self._server: tuple[str, int] | None = None
        self._following: asyncio.Task[None] | None = None
        self.newest: CertificateFacts | None = None
        """What the server has shown last; None: no TLS, or not connected yet."""

    async def close(self) -> None:
        """Stop checking the server."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
            self._following = None

    def take(self, client: Client) -> None:
        """Record the certificate that a new client saw. From 30 days before its end the server is
        checked, until `close`.
        """
        shown = client.peer_certificate if isinstance(client, GatedClient) else None
        server = _server_of(client)
        if shown is None or server is None:
            return
        self._server = server
        with suppress(ValueError):
            self._note(parse_certificate(shown))
        if self._following is None:
            self._following = asyncio.create_task(self._follow(), name="bus-certificate")

    def note_error(self, err: Exception, client: Client) -> None:
        """Record an error of a client that connects."""
        server = _server_of(client)
        if isinstance(err, ssl.SSLCertVerificationError) and server is not None:
            self._refused = (err, *server)

    async def explain(self, text: str) -> str:
        """Explain why the last connect failed, if the certificate was the cause. Otherwise return
        the text unchanged.
        """
        refused, self._refused = self._refused, None
        if refused is None:
            return text
        err, host, port = refused
        try:
            facts = await shown_certificate(host, port, _unverified())
        except _NOT_SHOWN:
            return text
        return why_refused(err, facts, host=host, port=port, now=self._clock.now(), ca_file=self._settings.tls_ca_file)

    def _note(self, facts: CertificateFacts) -> None:
        self.newest = facts
        self._metrics.certificate_expires_s.set(facts.not_after.timestamp())
        if self._is_near:
            days = (facts.not_after - self._clock.now()).days
            get_logger().warning(
                "bus.certificate-expiring",
                url=_text(self._server),
                expires=day(facts.not_after),
                days=days,
                issuer=facts.issuer,
            )

    @property
    def _is_near(self) -> bool:
        return self.newest is not None and self.newest.not_after - self._clock.now() < _WARN_BEFORE

    async def _follow(self) -> None:
        while True:
            await self._clock.sleep(_LOOK_EVERY_S)
            if self._is_near and self._server is not None:
                await self._look(*self._server)

    async def _look(self, host: str, port: int) -> None:
        """Read the certificate that the server would show to a new client."""
        try:
            context = await asyncio.to_thread(tls_context, self._settings)
            self._note(await shown_certificate(host, port, context or server_context()))
        except ssl.SSLCertVerificationError as err:
            self._refused = (err, host, port)
            get_logger().warning("bus.certificate-refused", url=_text(self._server), error=await self.explain(str(err)))
        except (*_NOT_SHOWN, ConfigError) as err:
            # The connection itself notices when the server is gone. This one tries again.
            get_logger().debug("bus.certificate-unseen", url=_text(self._server), error=str(err))


def _server_of(client: Client) -> tuple[str, int] | None:
    server = getattr(client, "_current_server", None)
    if server is None or server.uri.scheme in ("ws", "wss") or not server.uri.hostname:
        return None
    return server.uri.hostname, server.uri.port or 4222


def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _text(server: tuple[str, int] | None) -> str:
    return f"{server[0]}:{server[1]}" if server else ""
