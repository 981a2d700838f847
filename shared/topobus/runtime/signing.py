"""Signs with Ed25519, by PyNaCl, which the extra `creds` brings: nothing else in Topobus needs it, and it is imported when a key is used for the first time.

Flows in: a seed of NATS' form, or chance. Flows out: a key pair. A process that has to log in with credentials, or a command that makes some, and has no PyNaCl, ends with
78 and says which extra brings it.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from topobus.contracts.nats_keys import KeyKind, parse_seed, public_text, seed_text
from topobus.domain.errors import ConfigError

if TYPE_CHECKING:
    from nacl.signing import SigningKey

__all__ = ["KeyPair", "need_signing"]

_SEED_BYTES = 32


def need_signing(what: str) -> None:
    """Look whether keys can be used here; `what` needs them.

    Errors: raises ConfigError that names the extra.
    """
    try:
        import nacl.signing  # noqa: F401 - whether it is there
    except ImportError as err:
        raise ConfigError(f"{what} needs PyNaCl, which is not installed", next_step="pip install '.[creds]' from the checkout") from err


class KeyPair:
    """A key pair of NATS."""

    def __init__(self, kind: KeyKind, raw: bytes) -> None:
        """Make the pair of 32 bytes of a seed.

        Errors: raises ConfigError without PyNaCl.
        """
        need_signing("a key of NATS")
        from nacl.signing import SigningKey

        self._key: SigningKey = SigningKey(raw)
        self._kind = kind
        self._raw = raw

    @classmethod
    def new(cls, kind: KeyKind) -> KeyPair:
        """Make a pair by chance."""
        return cls(kind, secrets.token_bytes(_SEED_BYTES))

    @classmethod
    def read(cls, seed: str) -> KeyPair:
        """Make the pair of a seed.

        Errors: raises ContractError for what is no seed.
        """
        return cls(*parse_seed(seed))

    @property
    def kind(self) -> KeyKind:
        """What the key is for."""
        return self._kind

    @property
    def public(self) -> str:
        """The public key, as NATS writes it."""
        return public_text(self._kind, bytes(self._key.verify_key))

    @property
    def seed(self) -> str:
        """The secret, as NATS writes it."""
        return seed_text(self._kind, self._raw)

    def sign(self, data: bytes) -> bytes:
        """Sign."""
        return bytes(self._key.sign(data).signature)
