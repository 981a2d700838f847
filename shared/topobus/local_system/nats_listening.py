"""Where the NATS server that `topobus up` runs listens.

Beyond this machine's loopback interface it has TLS, by a certificate that is made on the spot or
was put there. This module gives lines of the server's configuration, the URL for services on this
machine and for others, and a call for each new certificate, so that the server reads it. Without an
address beyond loopback all of it is empty.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from topobus.bus.login.certificate_facts import day
from topobus.bus.login.certificates import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE, ServerCertificate, certify
from topobus.bus.server_config.nats_tls import server_tls
from topobus.process.folder_events import FolderEvents
from topobus.values.errors import ConfigError

__all__ = ["LOOPBACK", "Listening", "NatsCertificate", "free_to_listen"]

LOOPBACK = "127.0.0.1"
# A certificate of ours is made again when a third of a year is left, so a check once a day is
# enough.
_LOOK_EVERY_S = 86_400.0
# TEST-NET-1 (RFC 5737): a datagram socket that is connected to it sends nothing, and shows which
# address of ours leads out.
_ELSEWHERE = ("192.0.2.1", 9)


class Listening(Struct, frozen=True, kw_only=True):
    """The user's choice of address and names."""

    address: str = LOOPBACK
    """An address of this machine; 0.0.0.0 or ::, all of them."""
    is_open: bool = False
    """Without users: whoever reaches this machine's loopback interface may do everything."""
    names: tuple[str, ...] = ()
    """Host names and addresses that clients use besides those that this machine knows itself by."""

    @property
    def has_tls(self) -> bool:
        """Return whether other machines can reach it."""
        return not ipaddress.ip_address(self.address).is_loopback

    @property
    def _is_everywhere(self) -> bool:
        return ipaddress.ip_address(self.address).is_unspecified

    def wanted_names(self) -> tuple[str, ...]:
        """Give all names that the certificate must have."""
        own = (LOOPBACK, "::1", "localhost", *_own_addresses()) if self._is_everywhere else (self.address,)
        host = socket.gethostname().lower()
        return tuple(dict.fromkeys((*self.names, *own, *((host,) if _is_name(host) else ()))))

    def host_here(self, certificate: Sequence[str]) -> str:
        """Give the host by which this machine's own processes connect: one that the certificate is
        for.
        """
        own = LOOPBACK if self._is_everywhere else self.address
        usable = [name for name in (*self.names, *certificate) if not name.startswith("*")]
        return own if own in certificate or not usable else usable[0]

    def host_elsewhere(self, certificate: Sequence[str]) -> str:
        """Give the host by which another machine would connect."""
        if self.names:
            return self.names[0]
        own = next(iter(_own_addresses()), "") if self._is_everywhere else self.address
        return own if own and own in certificate else self.host_here(certificate)


class NatsCertificate:
    """The certificate of a server that listens beyond loopback. None when it does not."""

    def __init__(self, listening: Listening, folder: Path, authority: Path) -> None:
        """Make what is missing.

        Errors: raises ConfigError as `certify` does, for an address that this machine does not
        have, and for an expired certificate of another authority.
        """
        self._listening = listening
        self._folder = folder
        self._authority = authority
        self._here, self._elsewhere = LOOPBACK, ""
        self.hosts: tuple[str, ...] = ()
        """The names by which this server is known besides those of loopback; empty without TLS."""
        if not listening.has_tls:
            return
        if why := _why_not_to_listen(listening.address, 0):
            raise ConfigError(
                f"cannot listen at {listening.address}: {why}",
                next_step="give an address of this machine (`ip address`), or 0.0.0.0 for all",
            )
        made = self._certify()
        if made.facts.is_expired(datetime.now(UTC)):
            raise ConfigError(
                f"{folder / CERTIFICATE_FILE} expired on {day(made.facts.not_after)}: every client would "
                "refuse this server",
                next_step="have its maker renew it, or remove the folder: then one is made here",
            )
        self.hosts = made.facts.names
        # Here, because a name server may be asked: this is not the event loop's thread.
        self._here, self._elsewhere = listening.host_here(self.hosts), listening.host_elsewhere(self.hosts)
        self._read = self._content()

    @property
    def address(self) -> str:
        """Where the server listens."""
        return self._listening.address

    @property
    def host_here(self) -> str:
        """The host by which this machine's own processes connect."""
        return self._here

    @property
    def folder(self) -> Path | None:
        """The folder from which the server reads it. None without TLS."""
        return self._folder if self._listening.has_tls else None

    @property
    def authority_file(self) -> str:
        """The file of authorities that clients trust. Empty without TLS, or for the system's own
        authorities.
        """
        file = self._folder / AUTHORITY_FILE
        return str(file) if self._listening.has_tls and file.exists() else ""

    def url_here(self, port: int) -> str:
        """Give the URL for this machine's own processes."""
        return f"{'tls' if self._listening.has_tls else 'nats'}://{_bracketed(self._here)}:{port}"

    def url_elsewhere(self, port: int) -> str:
        """Return the URL for another machine. Empty when none can connect."""
        return f"tls://{_bracketed(self._elsewhere)}:{port}" if self._listening.has_tls else ""

    def configuration(self, seen_as: str, monitor_port: int) -> str:
        """Render the server's lines. `seen_as` is the folder's path for the server.

        Only clients come from elsewhere: monitoring stays on this machine.
        """
        monitoring = f'http: "{LOOPBACK}:{monitor_port}"\n' if monitor_port else ""
        return f"{server_tls(seen_as)}\n{monitoring}" if self._listening.has_tls else ""

    async def follow(self, reload: Callable[[], None], say: Callable[[str], None]) -> None:
        """Make the certificate again in time, and call `reload` whenever its files have changed,
        whatever process changed them. Runs until cancelled.
        """
        if not self._listening.has_tls:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew(say))
            tasks.create_task(self._hear(reload, say))

    async def _renew(self, say: Callable[[str], None]) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                await asyncio.to_thread(self._certify)
            except ConfigError as err:
                say(f"NATS keeps the certificate that it has: {err}")

    async def _hear(self, reload: Callable[[], None], say: Callable[[str], None]) -> None:
        try:
            with FolderEvents(self._folder) as events:
                while await events.next():
                    content = await asyncio.to_thread(self._content)
                    if content != self._read and all(content):
                        self._read = content
                        reload()
        except OSError as err:
            say(
                f"changes in {self._folder} are not heard ({err.strerror}): a new certificate counts from the "
                "next start on"
            )

    def _certify(self) -> ServerCertificate:
        return certify(self._folder, self._listening.wanted_names(), authority=self._authority, now=datetime.now(UTC))

    def _content(self) -> tuple[bytes, ...]:
        return tuple(_bytes(self._folder / name) for name in (CERTIFICATE_FILE, KEY_FILE))


def free_to_listen(address: str, port: int) -> bool:
    """Return whether this port is free."""
    return not _why_not_to_listen(address, port)


def _why_not_to_listen(address: str, port: int) -> str:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as err:
            return err.strerror or str(err)
    return ""


def _own_addresses() -> tuple[str, ...]:
    """Return this machine's addresses that others can use, the one of the default route first."""
    addresses: list[str] = []
    for family, elsewhere in ((socket.AF_INET, _ELSEWHERE), (socket.AF_INET6, ("2001:db8::1", 9))):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(elsewhere)
                addresses.append(str(probe.getsockname()[0]))
        except OSError:
            # This family has no route to the outside.
            continue
    try:
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        infos = []
    addresses += [str(info[4][0]) for info in infos]
    usable = (address for address in addresses if "%" not in address)
    return tuple(dict.fromkeys(address for address in usable if not ipaddress.ip_address(address).is_loopback))


def _is_name(host: str) -> bool:
    return bool(host) and all(part and part.replace("-", "a").isalnum() and part.isascii() for part in host.split("."))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
