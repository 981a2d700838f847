"""The text forms of NATS' keys and of a file of credentials: what a server and every client of NATS read and write.

Flows in: 32 raw bytes of an Ed25519 key or seed, and what they are for; or texts that somebody wrote. Flows out: the other one. Signing is not here: it needs a library, and
`topobus.runtime.signing` is the only place that imports it. Source: github.com/nats-io/nkeys (strkey.go), nats-io/jwt (creds_utils.go).
"""

from __future__ import annotations

import base64
import binascii
import json
from enum import IntEnum
from typing import Any

from msgspec import Struct

from topobus.domain.errors import ContractError

__all__ = ["Credentials", "KeyKind", "parse_credentials", "parse_seed", "public_text", "read_claims", "render_credentials", "seed_text"]


class KeyKind(IntEnum):
    """What a key is for; the value becomes its first letter."""

    ACCOUNT = 0
    OPERATOR = 14 << 3
    USER = 20 << 3


_SEED = 18 << 3
_RAW_BYTES = 32


class Credentials(Struct, frozen=True, kw_only=True):
    """What a file of credentials holds."""

    token: str
    """The user's JWT."""
    seed: str
    expires_at: float | None
    """Unix time at which no server takes it any more; None: never. As the token says: only a server looks at who signed it."""
    issued_at: float = 0.0


def public_text(kind: KeyKind, raw: bytes) -> str:
    """Write a public key.

    >>> public_text(KeyKind.USER, bytes(32))
    'UAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAABET7'
    """
    return _checked(bytes([kind]) + raw)


def seed_text(kind: KeyKind, raw: bytes) -> str:
    """Write a seed: the secret from which a key pair is made.

    >>> seed_text(KeyKind.USER, bytes(32))
    'SUAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAEQ'
    """
    return _checked(bytes([_SEED | kind >> 5, (kind & 31) << 3]) + raw)


def parse_seed(text: str) -> tuple[KeyKind, bytes]:
    """Read a seed.

    Errors: raises ContractError for what is none; the message does not repeat it.
    """
    try:
        raw = base64.b32decode(text + "=" * (-len(text) % 8))
        body, checksum = raw[:-2], raw[-2:]
        if len(body) != _RAW_BYTES + 2 or body[0] & 0xF8 != _SEED or _checksum(body) != checksum:
            raise ValueError("wrong length, kind or check sum")
        return KeyKind((body[0] & 7) << 5 | body[1] >> 3), body[2:]
    except (ValueError, IndexError) as err:
        raise ContractError(
            f"no seed of NATS: {len(text)} characters, wanted 58 that begin with S", next_step="take the whole text"
        ) from err


def render_credentials(token: str, seed: str) -> str:
    """Give the text of a .creds file, as NATS' own tools write it."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        "************************* IMPORTANT *************************\n"
        "NKEY Seed printed below can be used to sign and prove identity.\n"
        "NKEYs are sensitive and should be treated as secrets.\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n\n"
        "*************************************************************\n"
    )


def parse_credentials(text: str) -> Credentials:
    """Read a .creds file, whoever wrote it.

    Errors: raises ContractError for what is none; the message does not repeat it.
    """
    token, seed = _block(text, "USER JWT"), _block(text, "NKEY SEED")
    parse_seed(seed)
    claims = read_claims(token)
    moments = [claims.get(name) or 0 for name in ("exp", "iat")]
    if not all(isinstance(moment, int | float) for moment in moments):
        raise ContractError("the JWT says no number for exp or iat", next_step="have it made anew")
    return Credentials(token=token, seed=seed, expires_at=float(moments[0]) if moments[0] else None, issued_at=float(moments[1]))


def read_claims(token: str) -> dict[str, Any]:
    """Read what a JWT says, without asking who signed it.

    Errors: raises ContractError for what is no JWT.
    """
    parts = token.split(".")
    try:
        if len(parts) != 3:
            raise ValueError("not three parts")
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        if not isinstance(claims, dict):
            raise ValueError("not an object")
    except ValueError as err:
        raise ContractError(f"no JWT: {len(token)} characters ({err})", next_step="take the whole text") from err
    return claims


def _block(text: str, name: str) -> str:
    """Give the line between a header and its end."""
    lines = [line.strip() for line in text.splitlines()]
    for number, line in enumerate(lines[:-1]):
        if line.startswith("---") and "BEGIN" in line and line.strip("-").endswith(name) and lines[number + 1]:
            return lines[number + 1]
    raise ContractError(f"no block `BEGIN … {name}`", next_step="take a whole .creds file")


def _checked(body: bytes) -> str:
    return base64.b32encode(body + _checksum(body)).decode().rstrip("=")


def _checksum(body: bytes) -> bytes:
    """Give the CRC-16 (XMODEM), low byte first."""
    return binascii.crc_hqx(body, 0).to_bytes(2, "little")
