"""Reads the facts of a certificate: its names, its dates, and who signed it.

Nothing is verified here, so a certificate may be forged. Python's `ssl` gives these facts only for
a certificate that it has verified, and they are needed for just those that it refused.
Source: RFC 5280 section 4.1, X.690.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from topobus.values.errors import ConfigError

__all__ = ["CertificateFacts", "day", "parse_certificate", "pem_blocks", "read_certificates"]

_SEQUENCE, _OID = 0x30, 0x06
_UTC_TIME, _GENERAL_TIME = 0x17, 0x18
# [0] before the serial number is the version, [3] after the key are the extensions.
_VERSION, _EXTENSIONS = 0xA0, 0xA3
# GeneralName: dNSName [2], iPAddress [7].
_DNS, _ADDRESS = 0x82, 0x87
_COMMON_NAME = bytes.fromhex("550403")
_ALTERNATIVE_NAMES = bytes.fromhex("551d11")
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")
# A bundle of authorities has some kilobytes; the system's own has 250 KiB.
_MOST_BYTES = 1024 * 1024


class CertificateFacts(Struct, frozen=True, kw_only=True):
    """The names, dates and signer of one certificate."""

    names: tuple[str, ...]
    """DNS names and addresses that it is for, sorted."""
    not_before: datetime
    not_after: datetime
    subject: str
    """The common name; empty: none."""
    issuer: str
    """The common name of the authority that signed it, from the certificate."""

    def is_expired(self, now: datetime) -> bool:
        """Return whether its validity has ended."""
        return now > self.not_after

    def is_ageing(self, now: datetime) -> bool:
        """Say whether less than a third of its life is left."""
        return (self.not_after - now) < (self.not_after - self.not_before) / 3


def day(when: datetime) -> str:
    """Give a date and time as all of our messages show it.

    >>> day(datetime(2026, 11, 23, 14, 27, tzinfo=UTC))
    '2026-11-23 14:27 UTC'
    """
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def pem_blocks(text: str) -> tuple[str, ...]:
    """Give the certificates in a PEM text, each with its frame and a line end, in their order."""
    return tuple(f"{match[0]}\n" for match in _PEM.finditer(text))


def read_certificates(file: Path) -> tuple[CertificateFacts, ...]:
    """Read all certificates of a PEM file.

    Errors: raises ConfigError for a file that cannot be read, has no certificate, or has a block
    that cannot be parsed.
    """
    try:
        with file.open("rb") as opened:
            text = opened.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError as err:
        raise ConfigError(
            f"certificate: cannot read {file}: {err.strerror}", next_step="give this process the right to read it"
        ) from err
    blocks = pem_blocks(text)
    try:
        certificates = tuple(parse_certificate(ssl.PEM_cert_to_DER_cert(block)) for block in blocks)
    except ValueError as err:
        raise ConfigError(
            f"certificate: {file} has one that cannot be read: {err}", next_step="give a PEM file"
        ) from err
    if not certificates:
        raise ConfigError(
            f"certificate: {file} has none", next_step="give a PEM file: it begins with -----BEGIN CERTIFICATE-----"
        )
    return certificates


def parse_certificate(der: bytes) -> CertificateFacts:
    """Read a certificate.

    Errors: raises ValueError for bytes that are no certificate.
    """
    try:
        return _parse(der)
    except (IndexError, UnicodeDecodeError) as err:
        raise ValueError("it is cut off, or no certificate") from err


def _parse(der: bytes) -> CertificateFacts:
    certificate = _inside(der, _SEQUENCE)
    fields = list(_elements(_inside(certificate, _SEQUENCE)))
    if fields[0][0] == _VERSION:
        fields = fields[1:]
    # Serial number, signature's algorithm, issuer, validity, subject, key; then what is optional.
    (_, issuer), (_, validity), (_, subject) = fields[2:5]
    not_before, not_after = (_time(tag, content) for tag, content in _elements(validity))
    extensions = next((content for tag, content in fields[6:] if tag == _EXTENSIONS), b"")
    return CertificateFacts(
        names=tuple(sorted(_alternative_names(extensions))),
        not_before=not_before,
        not_after=not_after,
        subject=_common_name(subject),
        issuer=_common_name(issuer),
    )


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Give each element's tag and content."""
    at = 0
    while at < len(data):
        tag, length = data[at], data[at + 1]
        at += 2
        if length & 0x80:
            octets = length & 0x7F
            if not 1 <= octets <= 4:
                raise ValueError("a length of it is none")
            length = int.from_bytes(data[at : at + octets])
            at += octets
        if at + length > len(data):
            raise ValueError("it is cut off")
        yield tag, data[at : at + length]
        at += length


def _inside(data: bytes, wanted: int) -> bytes:
    tag, content = next(_elements(data), (0, b""))
    if tag != wanted:
        raise ValueError(f"wanted an element {wanted:#x}, got {tag:#x}")
    return content


def _time(tag: int, content: bytes) -> datetime:
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        # RFC 5280 4.1.2.5.1: 50 and later are of the last century.
        text = f"{'19' if text[:2] >= '50' else '20'}{text}"
    elif tag != _GENERAL_TIME:
        raise ValueError("a date of it is none")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _common_name(name: bytes) -> str:
    for _, relative in _elements(name):
        for _, pair in _elements(relative):
            (tag, key), (_, value) = _elements(pair)
            if tag == _OID and key == _COMMON_NAME:
                return value.decode("utf-8", "replace")
    return ""


def _alternative_names(extensions: bytes) -> Iterator[str]:
    if not extensions:
        return
    for _, extension in _elements(_inside(extensions, _SEQUENCE)):
        parts = list(_elements(extension))
        if parts[0] != (_OID, _ALTERNATIVE_NAMES):
            continue
        for tag, value in _elements(_inside(parts[-1][1], _SEQUENCE)):
            if tag == _DNS:
                yield value.decode("ascii")
            elif tag == _ADDRESS:
                yield str(ipaddress.ip_address(value))
