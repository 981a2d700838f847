"""The accounts of `topobus.contracts.nats_accounts` as signed tokens (JWT): the form in which a server knows an operator only, and each account and user says itself who it is.

Flows in: a description of accounts, a signer for each, and a moment. Flows out: tokens, and the configuration of a server that knows them. Pure: the same values give the
same text, since Ed25519 signs without chance. What the configuration form (`nats_accounts_config`) allows the tokens allow, and nothing else: each import has its own
permission (activation) of the exporting account. Source: github.com/nats-io/jwt, version 2. See docs/adr/0036.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from topobus.contracts.nats_accounts import Account, Crossing, CrossingKind, User

__all__ = ["CONTROL_LINE_BYTES", "Signer", "account_token", "operator_configuration", "operator_token", "user_token"]

CONTROL_LINE_BYTES = 24_576
"""What a server must take as one line; topology's token at a node's own server has 12.3 KiB for the longest name of a node."""
_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
_VERSION = 2
_NO_LIMIT = -1
# As in `nats_accounts_config`: an asker waits 10 s at most unless its caller says otherwise, and the gateway waits as long as kubelet does. Nanoseconds.
_RESPONSE_LIMIT_NS = 300 * 10**9
_EXPORTER_LIMITS = ("subs", "data", "payload", "imports", "exports", "conn", "leaf")
_STORE_LIMITS = ("mem_storage", "disk_storage", "streams", "consumer")


class Signer(Protocol):
    """A key pair."""

    @property
    def public(self) -> str:
        """The public key, as NATS writes it."""
        ...

    def sign(self, data: bytes) -> bytes:
        """Sign with Ed25519."""
        ...


def operator_token(operator: Signer, system_account: str, *, issued_at: int) -> str:
    """Give the operator's own token; `system_account`: the public key of the account that is the server's own."""
    claims = {"system_account": system_account, "type": "operator", "version": _VERSION}
    return _token(operator, operator.public, "topobus", issued_at, claims)


def account_token(
    account: Account,
    operator: Signer,
    signers: Mapping[str, Signer],
    *,
    issued_at: int,
    revoked: Mapping[str, int],
) -> str:
    """Give an account's token, with its exports, imports and limits.

    Shapes: signers — of all accounts, by name; revoked — public keys of users of this account, each with the moment up to which its tokens count for nothing.
    """
    exports = [{"name": subject, "subject": subject, "type": str(kind), "token_req": True} for kind, subject in _widest(account.exports)]
    limits: dict[str, Any] = dict.fromkeys(_EXPORTER_LIMITS, _NO_LIMIT) | {"wildcards": True}
    if account.has_jetstream:
        limits |= dict.fromkeys(_STORE_LIMITS, _NO_LIMIT)
    claims: dict[str, Any] = {
        "exports": exports,
        "imports": [_import(crossing, signers, issued_at) for crossing in account.imports],
        "limits": limits,
        "default_permissions": {"pub": {}, "sub": {}},
        "type": "account",
        "version": _VERSION,
    }
    if revoked:
        claims["revocations"] = dict(sorted(revoked.items()))
    return _token(operator, signers[account.name].public, account.name, issued_at, claims)


def user_token(user: User, public: str, account: Signer, *, issued_at: int, expires_at: int | None) -> str:
    """Give a user's token, with its rights; `expires_at`: None for one that counts until it is revoked."""
    claims: dict[str, Any] = {
        "pub": {"allow": list(user.rights["publish"])},
        "sub": {"allow": list(user.rights["subscribe"])},
        **dict.fromkeys(("subs", "data", "payload"), _NO_LIMIT),
        "type": "user",
        "version": _VERSION,
    }
    if user.connection_types:
        claims["allowed_connection_types"] = list(user.connection_types)
    if user.may_respond:
        claims["resp"] = {"max": 1, "ttl": _RESPONSE_LIMIT_NS}
    return _token(account, public, user.name, issued_at, claims, expires_at=expires_at)


def operator_configuration(operator: str, system_account: str, tokens: Mapping[str, str], names: Mapping[str, str]) -> str:
    """Give the part of a server's configuration that makes it know an operator and its accounts; nothing secret is in it.

    Shapes: operator — its token; system_account — a public key; tokens — of the accounts, by public key; names — of the accounts, by public key.
    """
    lines = [
        "# Made by `topobus keys operator`. Include it in a server's configuration, without `accounts`, `authorization` or `permissions.conf`.",
        "# A user's token comes in one line, with all its rights: more than the 4096 bytes that a server takes unless told otherwise.",
        f"max_control_line: {CONTROL_LINE_BYTES}",
        f"operator: {operator}",
        f"system_account: {system_account}",
        "resolver: MEMORY",
        "resolver_preload: {",
    ]
    for public in sorted(tokens, key=lambda public: names[public]):
        lines += [f"  # {names[public]}", f"  {public}: {tokens[public]}"]
    return "\n".join([*lines, "}"]) + "\n"


def _widest(exports: Sequence[Crossing]) -> list[tuple[CrossingKind, str]]:
    """Give what is exported, without what another export of the same kind has in it: a server takes no account with both.

    Nobody reaches more by it: each import has a permission for its own subject.
    """
    exported = dict.fromkeys((crossing.kind, crossing.subject) for crossing in exports)
    return [
        (kind, subject)
        for kind, subject in exported
        if not any(kind is other and subject != wider and _is_within(subject, wider) for other, wider in exported)
    ]


def _is_within(subject: str, wider: str) -> bool:
    """Say whether all that a subject stands for another one stands for, too."""
    parts, wider_parts = subject.split("."), wider.split(".")
    if wider_parts[-1] == ">":
        return len(parts) >= len(wider_parts) and _is_within(".".join(parts[: len(wider_parts) - 1]), ".".join(wider_parts[:-1]))
    return len(parts) == len(wider_parts) and all(
        other == part or (other == "*" and part != ">") for part, other in zip(parts, wider_parts, strict=True)
    )


def _import(crossing: Crossing, signers: Mapping[str, Signer], issued_at: int) -> dict[str, Any]:
    owner, importer = signers[crossing.owner], signers[crossing.importer]
    permission = {"subject": crossing.subject, "kind": str(crossing.kind), "type": "activation", "version": _VERSION}
    claims = {
        "name": crossing.subject,
        "subject": crossing.subject,
        "account": owner.public,
        "token": _token(owner, importer.public, crossing.subject, issued_at, permission),
        "type": str(crossing.kind),
    }
    if crossing.local:
        claims["local_subject"] = crossing.local
    return claims


def _token(issuer: Signer, subject: str, name: str, issued_at: int, claims: Mapping[str, Any], *, expires_at: int | None = None) -> str:
    body: dict[str, Any] = {"iat": issued_at, "iss": issuer.public, "name": name, "nats": claims, "sub": subject}
    if expires_at is not None:
        body["exp"] = expires_at
    body["jti"] = base64.b32encode(hashlib.sha256(_json(body)).digest()).decode().rstrip("=")
    signed = f"{_part(_json(_HEADER))}.{_part(_json(body))}"
    return f"{signed}.{_part(issuer.sign(signed.encode()))}"


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
