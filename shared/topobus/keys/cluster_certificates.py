"""Makes and renews the certificate of the NATS server in a cluster, and the authority that signs
it, as Secrets.

Clients get the authority's certificate as a ConfigMap.

The files of `topobus.bus.login.certificates` are written to a temporary folder, and the results are
written back to the API server: first the authority, which is only ever created, then the
certificate, then the ConfigMap for clients. A run that was killed or raced by another one is
completed by the next. A Secret that another program fills (cert-manager) is left unchanged.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from topobus.bus.login.certificates import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE, ServerCertificate, certify
from topobus.bus.login.user_keys import write_whole
from topobus.keys.namespace_objects import NamespaceObjects
from topobus.keys.secret_objects import AUTHORITY_MAP, AUTHORITY_SECRET, TLS_SECRET, is_ours, object_made, texts_of
from topobus.kubernetes.answers import Plain
from topobus.values.errors import ConfigError

__all__ = ["make_certificate", "server_names"]

_SERVER_FILES = (CERTIFICATE_FILE, KEY_FILE, AUTHORITY_FILE)
# The authority's key and its certificate, which clients trust.
_AUTHORITY_FILES = ("ca.key", AUTHORITY_FILE)


def server_names(namespace: str) -> tuple[str, ...]:
    """Name the hosts by which clients in a cluster reach the server, and those of a forwarded port
    (`kubectl port-forward`).

    >>> server_names("topobus")[2:5]
    ('nats.topobus.svc', 'nats.topobus.svc.cluster.local', '*.nats.topobus.svc')
    """
    service = f"nats.{namespace}.svc"
    return ("nats", f"nats.{namespace}", service, f"{service}.cluster.local", f"*.{service}", "localhost", "127.0.0.1")


async def make_certificate(
    objects: NamespaceObjects, names: Sequence[str], *, now: datetime, is_renewal: bool = False
) -> ServerCertificate:
    """Make what is missing of the authority, the certificate and the clients' copy.

    The certificate is renewed when it lacks a name or has less than a third of its lifetime left.

    Shapes: is_renewal — renew the certificate in any case.
    Errors: raises ConfigError as `certify` does, for a Secret without an authority to trust and for
    a missing right, and PeerUnavailable.
    """
    while True:
        authority, server = await objects.read("Secret", AUTHORITY_SECRET), await objects.read("Secret", TLS_SECRET)
        made, signer, texts = await asyncio.to_thread(_certified, authority, server, names, now, is_renewal)
        if (
            authority is None
            and signer
            and not await objects.replace(None, object_made("Secret", AUTHORITY_SECRET, signer))
        ):
            continue
        if texts != texts_of(server, _SERVER_FILES):
            if server is not None and not is_ours(server):
                raise _not_ours(objects, TLS_SECRET)
            if not await objects.replace(
                server, object_made("Secret", TLS_SECRET, texts, secret_type="kubernetes.io/tls")
            ):
                continue
        if await _settle_clients(objects, texts.get(AUTHORITY_FILE, "")):
            return made


def _certified(
    authority: Plain | None, server: Plain | None, names: Sequence[str], now: datetime, is_renewal: bool
) -> tuple[ServerCertificate, dict[str, str], dict[str, str]]:
    """Run `certify` on the Secrets' contents, laid out as files.

    Returns the certificate, and the texts of the authority's and the server's Secret.
    """
    with tempfile.TemporaryDirectory(prefix="topobus-keys-") as scratch:
        parts = (
            (Path(scratch) / "authority", authority, _AUTHORITY_FILES),
            (Path(scratch) / "server", server, _SERVER_FILES),
        )
        for folder, secret, files in parts:
            folder.mkdir(mode=0o700)
            for name, text in texts_of(secret, files).items():
                write_whole(folder / name, text)
        (signing_folder, _, _), (server_folder, _, _) = parts
        made = certify(server_folder, names, authority=signing_folder, now=now, is_renewal=is_renewal)
        signer, texts = (
            {name: (folder / name).read_text(encoding="utf-8") for name in files if (folder / name).exists()}
            for folder, _, files in parts
        )
        return made, signer, texts


async def _settle_clients(objects: NamespaceObjects, trusted: str) -> bool:
    """Write the certificates of the trusted authorities for clients.

    False when another writer was first.
    """
    present = await objects.read("ConfigMap", AUTHORITY_MAP)
    if present is not None and (not is_ours(present) or not trusted):
        return True
    if not trusted:
        raise ConfigError(
            f"Secret {objects.namespace}/{TLS_SECRET} has no {AUTHORITY_FILE}: clients have no authority to trust",
            next_step=f"put the authority's certificate into a ConfigMap {AUTHORITY_MAP}, key {AUTHORITY_FILE}",
        )
    wanted = object_made("ConfigMap", AUTHORITY_MAP, {AUTHORITY_FILE: trusted})
    return (present is not None and present.get("data") == wanted["data"]) or await objects.replace(present, wanted)


def _not_ours(objects: NamespaceObjects, name: str) -> ConfigError:
    return ConfigError(
        f"Secret {objects.namespace}/{name} was not made here, and lacks {CERTIFICATE_FILE} or {KEY_FILE}",
        next_step="have it completed by whoever made it, or delete it: then another one is made",
    )
