"""The Secrets that hold NATS' users and certificates in a cluster: their names, and how they are
written and read. Pure.

Each principal has a Secret of its own, so that each pod mounts only its own password. The server's
Secret is derived from all of them.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence

from topobus.bus.login.user_keys import login_text, split_login
from topobus.bus.server_config.nats_accounts import Shape, accounts
from topobus.bus.server_config.server_users import accounts_configuration, is_password, logins_of
from topobus.kubernetes.answers import Plain
from topobus.values.errors import ConfigError

__all__ = [
    "AUTHORITY_MAP",
    "AUTHORITY_SECRET",
    "LEAVES_SECRET",
    "SERVER_SECRET",
    "TLS_SECRET",
    "changed_secret",
    "classes_in",
    "decoded",
    "forgotten_secret",
    "has_previous",
    "is_ours",
    "logins_in",
    "object_made",
    "password_of",
    "password_secret",
    "server_secret_names",
    "server_secrets",
    "texts_of",
    "user_secret",
    "users_of",
]

SERVER_SECRET = "topobus-nats-server"
"""The users of the server, or of the hub, with their passwords and rights, as a file that its
configuration includes."""
LEAVES_SECRET = "topobus-nats-leaves"
"""The same for the servers of the nodes, where nodes have servers of their own."""
TLS_SECRET = "topobus-nats-tls"
"""The server's certificate, its key and the authorities to trust, as cert-manager has them:
`tls.crt`, `tls.key`, `ca.crt`."""
AUTHORITY_SECRET = "topobus-nats-authority"
"""The authority with its key. Only the Job's pod mounts it."""
AUTHORITY_MAP = "topobus-nats-ca"
"""A ConfigMap, for the clients: `ca.crt`."""
_PASSWORD = "password"
_PREVIOUS = "previous"
_USERS_FILE = "users.conf"
_CLASSES = "topobus.dev/device-classes"
_OWNER_LABEL, _OWNER = "app.kubernetes.io/managed-by", "topobus-keys"


def user_secret(principal: str) -> str:
    """Name the Secret of a principal.

    >>> user_secret("gpu")
    'topobus-nats-gpu'
    """
    return f"topobus-nats-{principal}"


def object_made(kind: str, name: str, data: Mapping[str, str], *, secret_type: str = "Opaque") -> Plain:
    """Return a Secret or ConfigMap with our labels. `data` is text, base64 in a Secret."""
    labels = {"app.kubernetes.io/part-of": "topobus", _OWNER_LABEL: _OWNER}
    made: Plain = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "labels": labels}}
    if kind == "Secret":
        coded = {key: base64.b64encode(text.encode()).decode("ascii") for key, text in sorted(data.items())}
        return made | {"type": secret_type, "data": coded}
    return made | {"data": dict(sorted(data.items()))}


def password_secret(principal: str, password: str) -> Plain:
    """Return the Secret of a principal. It has `username` for programs that read both.

    Values have no line ends, because a container may use them as environment variables.
    """
    return object_made("Secret", user_secret(principal), {_PASSWORD: password, "username": principal})


def changed_secret(present: Plain | None, principal: str, password: str, *, is_overlapping: bool) -> Plain:
    """Return the Secret of a principal with another password, to be written over the present one.

    With `is_overlapping` the previous password stays valid until `forgotten_secret`. The server
    accepts one password for each login, so the newer one belongs to the principal's other login,
    which precedes the password in the value: `gpu__2:p…` (docs/adr/0008).
    Errors: as `logins_in`.
    """
    if not is_overlapping or present is None:
        return forgotten_secret(password_secret(principal, password))
    login, counting = _login_of(present, _PASSWORD, principal)
    first, second = logins_of(principal)
    wanted = password_secret(principal, login_text(principal, first if login == second else second, password))
    before = login_text(principal, login, counting)
    return wanted | {"data": {**wanted["data"], _PREVIOUS: base64.b64encode(before.encode()).decode("ascii")}}


def forgotten_secret(present: Plain) -> Plain:
    """Return a merge patch that removes the previous password from a Secret."""
    return {**present, "data": {**present["data"], _PREVIOUS: None}}


def has_previous(secret: Plain) -> bool:
    """Return whether a Secret has a previous password that is still valid."""
    return _PREVIOUS in (secret.get("data") or {})


def logins_in(secret: Plain, principal: str) -> dict[str, str]:
    """Read the valid passwords of a principal by login: its present one, and during a rotation the
    previous one.

    The Secret may be made by another program.
    Errors: raises ConfigError when it has none that the server would accept as it is.
    """
    keys = (_PREVIOUS, _PASSWORD) if has_previous(secret) else (_PASSWORD,)
    return dict(_login_of(secret, key, principal) for key in keys)


def users_of(*, has_leaves: bool, classes: Sequence[str] = ()) -> tuple[str, ...]:
    """Name all users, sorted: those of one server for everything, or of a hub and the servers of
    nodes.

    The servers of all nodes are the user `leaf` at the hub.

    Shapes: classes — device classes that `topobus-device` serves, in addition to the built-in ones.

    >>> sorted({*users_of(has_leaves=True)} - {*users_of(has_leaves=False)})
    ['leaf', 'relay']
    """
    described = (account for shape in _shapes(has_leaves).values() for account in accounts(shape, classes=classes))
    return tuple(sorted({user.name for account in described for user in account.users}))


def server_secret_names(*, has_leaves: bool) -> tuple[str, ...]:
    """Name the Secrets of the servers."""
    return tuple(_shapes(has_leaves))


def server_secrets(passwords: Mapping[str, str], *, has_leaves: bool, classes: Sequence[str]) -> tuple[Plain, ...]:
    """Return the Secrets of the servers, which record their `classes`.

    Shapes: passwords — one for each user, by its name or by one or both of its `logins_of`.
    """
    secrets = (
        object_made("Secret", name, {_USERS_FILE: accounts_configuration(passwords, shape, classes=classes)})
        for name, shape in _shapes(has_leaves).items()
    )
    return tuple(_annotated(secret, {_CLASSES: ",".join(classes)}) if classes else secret for secret in secrets)


def classes_in(server_secret: Plain | None) -> tuple[str, ...]:
    """Read for which additional device classes a server's Secret has users.

    Empty when there is no Secret.
    """
    annotations = ((server_secret or {}).get("metadata") or {}).get("annotations") or {}
    return tuple(sorted(filter(None, str(annotations.get(_CLASSES, "")).split(","))))


def _annotated(secret: Plain, annotations: Mapping[str, str]) -> Plain:
    return secret | {"metadata": {**secret["metadata"], "annotations": dict(annotations)}}


def _shapes(has_leaves: bool) -> dict[str, Shape]:
    return {SERVER_SECRET: Shape.HUB, LEAVES_SECRET: Shape.LEAF} if has_leaves else {SERVER_SECRET: Shape.CENTRAL}


def is_ours(api_object: Plain) -> bool:
    """Return whether Topobus made an object. Only such objects are overwritten."""
    return bool((api_object["metadata"].get("labels") or {}).get(_OWNER_LABEL) == _OWNER)


def texts_of(secret: Plain | None, keys: Sequence[str]) -> dict[str, str]:
    """Read those of the named texts that a Secret has. Empty when there is no Secret.

    Errors: raises ConfigError for a value that is not text.
    """
    data = (secret or {}).get("data") or {}
    return {key: text for key in keys if secret is not None and key in data and (text := decoded(secret, key))}


def decoded(secret: Plain, key: str) -> str:
    """Read one text of a Secret.

    Errors: raises ConfigError when it is missing or not text.
    """
    name = secret["metadata"]["name"]
    coded = (secret.get("data") or {}).get(key)
    if not isinstance(coded, str):
        present = ", ".join(sorted(secret.get("data") or {})) or "nothing"
        raise ConfigError(f"Secret {name}: got {present}, wanted the key {key!r}", next_step=_remedy(name))
    try:
        return base64.b64decode(coded, validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError) as err:
        raise ConfigError(f"Secret {name}: {key} is no text", next_step=_remedy(name)) from err


def _login_of(secret: Plain, key: str, principal: str) -> tuple[str, str]:
    login, password = split_login(principal, decoded(secret, key).strip())
    if not is_password(password):
        name = secret["metadata"]["name"]
        raise ConfigError(
            f"Secret {name}: its {key} has {len(password)} characters, wanted 16 to 128 letters and digits, a "
            "letter first",
            next_step=_remedy(name),
        )
    return login, password


def password_of(secret: Plain, principal: str) -> str:
    """Read the password that a principal uses.

    Errors: as `logins_in`.
    """
    return _login_of(secret, _PASSWORD, principal)[1]


def _remedy(name: str) -> str:
    return f"delete the Secret {name}: the next run makes another one"


assert not {SERVER_SECRET, LEAVES_SECRET, TLS_SECRET, AUTHORITY_SECRET} & {
    user_secret(name) for name in users_of(has_leaves=True)
}
