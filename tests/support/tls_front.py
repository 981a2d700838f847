"""TLS before a server that has none, with an authority of its own made by the openssl program:
certificates for servers and clients, thrown away after.
"""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct


class Certificate(Struct, frozen=True, kw_only=True):
    """Files of one certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """An authority in a folder."""

    def __init__(self, folder: Path, name: str = "authority", *, has_key_usage: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.own = Certificate(certificate=folder / f"{name}.crt", key=folder / f"{name}.key")
        self._openssl(
            "req", "-x509", "-days", "1", "-subj", f"/CN={name}", "-out", self.own.certificate, *_new_key(self.own.key),
            *(("-addext", "keyUsage=critical,keyCertSign") if has_key_usage else ()), "-addext", "basicConstraints=critical,CA:TRUE",  # noqa: E501
        )  # fmt: skip

    def issue(self, name: str, *, addresses: str = "IP:127.0.0.1,IP:::1,DNS:localhost") -> Certificate:
        """Make a certificate for a server at these addresses, or for a client of that name."""
        made = Certificate(certificate=self._folder / f"{name}.crt", key=self._folder / f"{name}.key")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={addresses}\nkeyUsage=digitalSignature\n", encoding="ascii")
        self._openssl("req", "-subj", f"/CN={name}", "-out", request, *_new_key(made.key))
        self._openssl(
            "x509", "-req", "-days", "1", "-in", request, "-CA", self.own.certificate, "-CAkey", self.own.key,
            "-out", made.certificate, "-extfile", extensions,
        )  # fmt: skip
        return made

    def _openssl(self, *arguments: str | Path) -> None:
        done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@asynccontextmanager
async def tls_front(
    target_port: int, server: Certificate, *, clients: Authority | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[int]:
    """Take TLS connections for a plain server on loopback; gives the port.

    With `clients`, only who has a certificate of that authority comes in.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.certificate, server.key)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients.own.certificate)
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", target_port)
            await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))
        except (OSError, asyncio.CancelledError):
            # The client left, or the test is over.
            return
        finally:
            tasks.discard(task)
            writer.close()

    listening = await asyncio.start_server(serve, host, 0, ssl=context)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


def _new_key(path: Path) -> tuple[str | Path, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path)
