"""Makes and keeps the certificate of a NATS server and the authority (CA) that signs it, in files,
by the program `openssl`.

The server's folder gets `tls.crt`, `tls.key` and `ca.crt`, as in a Secret of cert-manager. A folder
that another program filled so is used as it is and never written. The authority's key stays in its
own folder and is needed again only to sign. Each file appears whole or not at all. `ca.crt` is
written before the certificate that it vouches for, and a key without its certificate gets one by
the next call.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import ssl
import stat
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from msgspec import Struct

from topobus.bus.login.certificate_facts import CertificateFacts, day, pem_blocks, read_certificates
from topobus.bus.login.certificate_signing import new_key, sign_authority, sign_server
from topobus.bus.login.user_keys import locked, make_folder, remove_unready, write_whole
from topobus.values.errors import ConfigError
from topobus.values.names import is_dns_subdomain

__all__ = [
    "AUTHORITY_FILE",
    "CERTIFICATE_FILE",
    "KEY_FILE",
    "SERVER_DAYS",
    "ServerCertificate",
    "accept_certificate",
    "add_authority",
    "certify",
    "drop_old_authorities",
    "is_of_somebody_else",
]

# The names of a Secret of type kubernetes.io/tls, and what cert-manager adds.
CERTIFICATE_FILE, KEY_FILE, AUTHORITY_FILE = "tls.crt", "tls.key", "ca.crt"
SERVER_DAYS = 365
"""How long a server's certificate is good; after two thirds of it another one is made."""
# The authority's key, and after it the certificate of that key, so that both change at once.
_AUTHORITY_KEY = "ca.key"
_AUTHORITY_LIFE = timedelta(days=30 * 365)
# A client whose clock is behind would take a new certificate for one that is not valid yet.
_CLOCKS_DIFFER = timedelta(hours=1)


class ServerCertificate(Struct, frozen=True, kw_only=True):
    """A server's certificate as its folder has it."""

    folder: Path
    facts: CertificateFacts
    is_ours: bool = True
    """False when another program made it: then only that program can renew it."""
    why_new: str = ""
    """Why it was made just now; empty: it was there."""


def certify(
    folder: Path,
    names: Sequence[str],
    *,
    authority: Path,
    now: datetime,
    is_for_group: bool = False,
    is_renewal: bool = False,
) -> ServerCertificate:
    """Make what is missing of an authority and of a server's certificate.

    A certificate that lacks a name, or has less than a third of its life left, is made again.

    Shapes: folder — gets the certificate, its key and the authorities to trust. names — DNS names
    and addresses; none: those that the certificate has. authority — folder of the authority, which
    no server needs. is_for_group — let the group of this process read the server's key. is_renewal
    — make a new certificate in any case, by the newest authority.
    Errors: raises ConfigError for a folder that is not ours alone, for names that are none, and
    when `openssl` is missing or fails.
    Cost: some 50 ms when something is made.
    """
    if is_of_somebody_else(folder, authority):
        if is_renewal:
            raise _not_ours(folder, authority)
        return accept_certificate(folder)
    wanted = tuple(sorted({_name(name) for name in names}))
    if not wanted and not os.path.lexists(folder / CERTIFICATE_FILE):
        raise ConfigError(
            f"{folder}: a certificate needs the names by which clients reach the server",
            next_step="give --name HOST, as often as needed",
        )
    with _both_locked(folder, authority, is_for_group):
        signer = _make_authority(authority, now)
        _write_public(folder / AUTHORITY_FILE, _bundle(authority))
        wanted = wanted or _present_names(folder)
        why = "wanted" if is_renewal else _why_renewed(folder, wanted, now)
        if why:
            _issue(folder, wanted, authority, signer, now, is_for_group=is_for_group)
        return ServerCertificate(folder=folder, facts=read_certificates(folder / CERTIFICATE_FILE)[0], why_new=why)


def add_authority(folder: Path, *, authority: Path, now: datetime) -> CertificateFacts:
    """Make another authority for later certificates, and add it to `ca.crt`, for the clients.

    The server's certificate stays.

    Errors: raises ConfigError when there is no authority of ours here, and as `certify` does.
    """
    if is_of_somebody_else(folder, authority) or not (authority / _AUTHORITY_KEY).exists():
        raise _not_ours(folder, authority)
    with _both_locked(folder, authority, is_for_group=False, keeps_mode=True):
        _make_authority(authority, now)
        facts = _new_authority(authority, now)
        _write_public(authority / AUTHORITY_FILE, _bundle(authority))
        _write_public(folder / AUTHORITY_FILE, _bundle(authority))
        return facts


def drop_old_authorities(folder: Path, *, authority: Path) -> CertificateFacts:
    """Leave only the newest authority in `ca.crt`.

    Errors: raises ConfigError when another authority signed the server's certificate: clients would
    refuse it.
    """
    if is_of_somebody_else(folder, authority) or not (authority / _AUTHORITY_KEY).exists():
        raise _not_ours(folder, authority)
    with _both_locked(folder, authority, is_for_group=False, keeps_mode=True):
        signer = read_certificates(authority / _AUTHORITY_KEY)[0]
        present = read_certificates(folder / CERTIFICATE_FILE)[0]
        if present.issuer != signer.subject:
            raise ConfigError(
                f"{folder / CERTIFICATE_FILE} is signed by {present.issuer!r}, not by the newest authority "
                f"{signer.subject!r}: clients would refuse it",
                next_step=f"topobus keys certify {folder} --renew, and have the server read it, before the old "
                "authority goes",
            )
        newest = _own_block(authority)
        for place in (authority, folder):
            _write_public(place / AUTHORITY_FILE, newest)
        return signer


def accept_certificate(folder: Path) -> ServerCertificate:
    """Read a certificate that another program keeps in this folder. Nothing is written.

    Errors: raises ConfigError when the certificate is missing, cannot be read, or is not that of
    the key.
    """
    facts = read_certificates(folder / CERTIFICATE_FILE)[0]
    if trouble := _pair_trouble(folder):
        raise ConfigError(
            f"{folder}: {CERTIFICATE_FILE} and {KEY_FILE} cannot be used together: {trouble}",
            next_step="give both of one certificate",
        )
    return ServerCertificate(folder=folder, facts=facts, is_ours=False)


def is_of_somebody_else(folder: Path, authority: Path) -> bool:
    """Return whether a server's folder was filled by another authority than the one here: by
    cert-manager, or by one of our own on another machine.

    Errors: raises ConfigError when the folder has a key without a certificate and there is no
    authority that could sign one, or when the certificate cannot be read.
    """
    # In this order: ours make the authority first.
    has_certificate = os.path.lexists(folder / CERTIFICATE_FILE)
    has_key = os.path.lexists(folder / KEY_FILE)
    has_authority = (authority / _AUTHORITY_KEY).exists()
    if not has_certificate:
        if has_key and not has_authority:
            raise ConfigError(
                f"{folder} has {KEY_FILE} and no {CERTIFICATE_FILE}, and {authority} has no authority that "
                "could sign one",
                next_step=f"put both files there, or remove {KEY_FILE}: then another one is made",
            )
        return False
    if not has_authority:
        return True
    issuer = read_certificates(folder / CERTIFICATE_FILE)[0].issuer
    return issuer not in {facts.subject for facts in _known_authorities(authority)}


def _name(text: str) -> str:
    """Return a name as a certificate has it."""
    try:
        return str(ipaddress.ip_address(text.strip("[]"))) if "%" not in text else _refuse_name(text)
    except ValueError:
        name = text.lower().rstrip(".")
        return name if is_dns_subdomain(name.removeprefix("*.")) else _refuse_name(text)


def _refuse_name(text: str) -> str:
    raise ConfigError(
        f"certificate: got the name {text!r}, wanted a host name or an address, as in nats.url",
        next_step="give it without port and without nats://",
    )


@contextlib.contextmanager
def _both_locked(folder: Path, authority: Path, is_for_group: bool, *, keeps_mode: bool = False) -> Iterator[None]:
    make_folder(authority, is_for_group=False)
    with locked(authority):
        remove_unready(authority)
        make_folder(folder, is_for_group, is_shared=keeps_mode)
        with locked(folder):
            remove_unready(folder)
            yield


def _make_authority(authority: Path, now: datetime) -> CertificateFacts:
    """Make the authority if there is none, and complete its `ca.crt`."""
    key = authority / _AUTHORITY_KEY
    if not os.path.lexists(key):
        _new_authority(authority, now)
    _check_secret(key)
    signer = read_certificates(key)[0]
    if signer.is_expired(now) or signer.not_before > now:
        raise ConfigError(
            f"the authority in {authority} is good from {day(signer.not_before)} to {day(signer.not_after)}, "
            f"and it is {day(now)}: what it signs is refused",
            next_step=f"set this machine's clock; if it is right, remove {authority} and the certificates by it: all "
            f"clients need the new {AUTHORITY_FILE}",
        )
    _write_public(authority / AUTHORITY_FILE, _bundle(authority))
    return signer


def _new_authority(authority: Path, now: datetime) -> CertificateFacts:
    key = new_key(authority)
    name = f"Topobus authority {secrets.token_hex(4)}"
    certificate = sign_authority(authority, key, name, (now - _CLOCKS_DIFFER, now + _AUTHORITY_LIFE))
    write_whole(authority / _AUTHORITY_KEY, key + certificate)
    return read_certificates(authority / _AUTHORITY_KEY)[0]


def _issue(
    folder: Path,
    names: tuple[str, ...],
    authority: Path,
    signer: CertificateFacts,
    now: datetime,
    *,
    is_for_group: bool,
) -> None:
    """Make a certificate. The key stays unless another authority signs, or there is none."""
    if not os.path.lexists(folder / KEY_FILE) or _present_issuer(folder) not in ("", signer.subject):
        write_whole(folder / KEY_FILE, new_key(folder), is_for_group=is_for_group)
    _check_secret(folder / KEY_FILE)
    life = now - _CLOCKS_DIFFER, min(now + timedelta(days=SERVER_DAYS), signer.not_after)
    certificate = sign_server(authority, folder / KEY_FILE, names, life, authority=authority / _AUTHORITY_KEY)
    write_whole(folder / CERTIFICATE_FILE, certificate, is_public=True)


def _why_renewed(folder: Path, names: tuple[str, ...], now: datetime) -> str:
    """Name the reason to make a certificate of ours again. Empty when the present one will do."""
    file = folder / CERTIFICATE_FILE
    if not os.path.lexists(file):
        return "there was none"
    facts = read_certificates(file)[0]
    if missing := sorted({*names} - {*facts.names}):
        return f"it was not for {', '.join(missing)}"
    if facts.not_before > now:
        # Made while this machine's clock was ahead.
        return f"the one before is good only from {day(facts.not_before)} on"
    if facts.is_ageing(now):
        return f"the one before {'expired' if facts.is_expired(now) else 'expires'} on {day(facts.not_after)}"
    return "it was not that of its key" if _pair_trouble(folder) else ""


def _pair_trouble(folder: Path) -> str:
    """Name the reason why a certificate and its key do not work together. Empty when they do."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A key with a password would be asked for at the terminal.
        context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE, password=lambda: "-")
    except OSError as err:
        return err.reason if isinstance(err, ssl.SSLError) and err.reason else err.strerror or str(err)
    return ""


def _present_names(folder: Path) -> tuple[str, ...]:
    file = folder / CERTIFICATE_FILE
    return read_certificates(file)[0].names if os.path.lexists(file) else ()


def _present_issuer(folder: Path) -> str:
    file = folder / CERTIFICATE_FILE
    return read_certificates(file)[0].issuer if os.path.lexists(file) else ""


def _known_authorities(authority: Path) -> tuple[CertificateFacts, ...]:
    file = authority / AUTHORITY_FILE
    return (*read_certificates(authority / _AUTHORITY_KEY), *(read_certificates(file) if file.exists() else ()))


def _own_block(authority: Path) -> str:
    return pem_blocks((authority / _AUTHORITY_KEY).read_text(encoding="ascii"))[0]


def _bundle(authority: Path) -> str:
    """Return the authorities that clients must trust: the newest one, then the earlier ones."""
    file = authority / AUTHORITY_FILE
    before = pem_blocks(file.read_text(encoding="ascii")) if file.exists() else ()
    return "".join(dict.fromkeys((_own_block(authority), *before)))


def _write_public(file: Path, text: str) -> None:
    if not file.exists() or file.read_text(encoding="ascii") != text:
        write_whole(file, text, is_public=True)


def _check_secret(file: Path) -> None:
    try:
        mode = file.stat(follow_symlinks=False).st_mode
    except OSError as err:
        raise ConfigError(
            f"certificate: cannot read {file}: {err.strerror}", next_step="give this process the right to read it"
        ) from err
    if not stat.S_ISREG(mode) or mode & 0o027:
        raise ConfigError(
            f"certificate: {file} has mode {stat.S_IMODE(mode):o}: others may read or change it, wanted 600 (or 640)",
            next_step=f"chmod 600 {file}; if somebody may have read it, remove its folder and the certificates by it",
        )


def _not_ours(folder: Path, authority: Path) -> ConfigError:
    return ConfigError(
        f"the certificate in {folder} was not made by an authority in {authority}: it cannot be renewed here",
        next_step="have its maker (cert-manager?) renew it, or name the authority's folder (--authority)",
    )
