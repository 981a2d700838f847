"""Makes and changes the Secrets of NATS' users in one namespace of a cluster.

The Secret of a principal is only ever created, unless a new password is requested. So the next run
completes a run that was killed, and of two runs at the same time the second uses what the first one
made. The server's Secret is derived from all others and written by compare-and-set on its version,
which is read before the passwords. A run that changes a password writes the server's Secret
afterwards, so an older state never overwrites a newer one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from msgspec import Struct

from topobus.bus.login.user_keys import new_password
from topobus.bus.server_config.server_users import takes_second_name
from topobus.keys.namespace_objects import NamespaceObjects
from topobus.keys.secret_objects import (
    LEAVES_SECRET,
    SERVER_SECRET,
    changed_secret,
    classes_in,
    forgotten_secret,
    has_previous,
    is_ours,
    logins_in,
    password_of,
    password_secret,
    server_secret_names,
    server_secrets,
    user_secret,
    users_of,
)
from topobus.kubernetes.answers import Plain
from topobus.values.errors import ConfigError

__all__ = ["forget_previous_passwords", "make_users", "rotate_users", "user_password"]


class _Form(Struct, frozen=True, kw_only=True):
    """What there are users for."""

    has_leaves: bool
    """Whether nodes have servers of their own."""
    classes: tuple[str, ...]
    """Device classes in addition to the built-in ones."""


async def make_users(objects: NamespaceObjects, *, has_leaves: bool = False, classes: Iterable[str] = ()) -> None:
    """Make the missing Secrets, and derive the servers' Secrets from the others.

    Shapes: has_leaves — nodes have servers of their own, and the central one is their hub. classes
    — device classes that `topobus-device` serves, in addition to those for which the server's
    Secret has users.
    Errors: raises ConfigError for a Secret that cannot be used and for a missing right,
    PeerUnavailable when the API server does not answer.
    """
    form = _Form(has_leaves=has_leaves, classes=tuple(sorted({*await _classes(objects), *classes})))
    await _passwords(objects, form)
    await _settle_servers(objects, form)


async def rotate_users(
    objects: NamespaceObjects, principals: Iterable[str], *, server_after_s: float, is_overlapping: bool = False
) -> tuple[str, ...]:
    """Make new passwords (for all users, when none is named), and after a while write the servers'
    files.

    Returns the names of the users.

    Shapes: is_overlapping — the previous passwords stay valid until `forget_previous_passwords`.
    When no user is named, only Topobus' own users are rotated, because other programs do not know
    the second login name.

    Units: server_after_s — by then the nodes have delivered the new passwords to the pods. The
    server closes the connections of these users when it reads its file. A pod that still had the
    old password would be refused until it has the new one.
    Errors: as `make_users`, and ConfigError before anything is changed for a Secret that another
    program made. After an interruption, `make_users` writes the server's file.
    """
    form = await _present_form(objects)
    everybody = users_of(has_leaves=form.has_leaves, classes=form.classes)
    wanted = tuple(principals) or tuple(user for user in everybody if not is_overlapping or takes_second_name(user))
    if unknown := sorted({*wanted} - {*everybody}):
        raise ConfigError(
            f"namespace {objects.namespace} has no user {', '.join(unknown)}",
            next_step=f"known are {', '.join(everybody)}",
        )
    await _passwords(objects, form)
    for principal in wanted:
        await _own(objects, principal)
    for principal in wanted:
        while True:
            present = await _own(objects, principal)
            if await objects.replace(
                present, changed_secret(present, principal, new_password(), is_overlapping=is_overlapping)
            ):
                break
            # Another writer changed it at the same moment. The last write counts.
    await asyncio.sleep(server_after_s)
    await _settle_servers(objects, form)
    return wanted


async def forget_previous_passwords(objects: NamespaceObjects) -> tuple[str, ...]:
    """Invalidate the passwords from before a rotation with an overlap, in the Secrets and then in
    the servers' files.

    Returns the users that had one.
    Errors: as `make_users`. After an interruption, `make_users` writes the servers' files.
    """
    form = await _present_form(objects)
    forgotten = []
    for principal in users_of(has_leaves=form.has_leaves, classes=form.classes):
        while True:
            present = await objects.read("Secret", user_secret(principal))
            if present is None or not is_ours(present) or not has_previous(present):
                break
            if await objects.replace(present, forgotten_secret(present)):
                forgotten.append(principal)
                break
    await _settle_servers(objects, form)
    return tuple(forgotten)


async def user_password(objects: NamespaceObjects, principal: str) -> str:
    """Read the password of a principal.

    Errors: as `make_users`, and ConfigError when it has none.
    """
    secret = await objects.read("Secret", user_secret(principal))
    if secret is None:
        raise ConfigError(
            f"namespace {objects.namespace} has no Secret {user_secret(principal)}",
            next_step=f"topobus keys secrets make {objects.namespace}",
        )
    return password_of(secret, principal)


async def _own(objects: NamespaceObjects, principal: str) -> Plain | None:
    """Return a principal's Secret.

    Errors: raises ConfigError when another program made it.
    """
    present = await objects.read("Secret", user_secret(principal))
    if present is not None and not is_ours(present):
        raise ConfigError(
            f"Secret {objects.namespace}/{user_secret(principal)} was not made here",
            next_step=f"change it where it is made; then topobus keys secrets make {objects.namespace}",
        )
    return present


async def _classes(objects: NamespaceObjects) -> tuple[str, ...]:
    return classes_in(await objects.read("Secret", SERVER_SECRET))


async def _present_form(objects: NamespaceObjects) -> _Form:
    """Return what there are Secrets for now."""
    has_leaves = await objects.read("Secret", LEAVES_SECRET) is not None
    return _Form(has_leaves=has_leaves, classes=await _classes(objects))


async def _passwords(objects: NamespaceObjects, form: _Form) -> dict[str, str]:
    """Return the valid passwords by login, and make those that are missing."""
    passwords: dict[str, str] = {}
    for user in users_of(has_leaves=form.has_leaves, classes=form.classes):
        passwords |= logins_in(await objects.made(password_secret(user, new_password())), user)
    return passwords


async def _settle_servers(objects: NamespaceObjects, form: _Form) -> None:
    """Bring the servers' users in line with the passwords."""
    while not await _settled(objects, form):
        # Another writer was first: read and write again.
        continue


async def _settled(objects: NamespaceObjects, form: _Form) -> bool:
    """Write the servers' Secrets once. False when one had changed meanwhile."""
    before = {name: await objects.read("Secret", name) for name in server_secret_names(has_leaves=form.has_leaves)}
    for wanted in server_secrets(await _passwords(objects, form), has_leaves=form.has_leaves, classes=form.classes):
        present = before[wanted["metadata"]["name"]]
        if present is not None and (not is_ours(present) or present.get("data") == wanted["data"]):
            # A Secret that another program made is not ours to update.
            continue
        if not await objects.replace(present, wanted):
            return False
    return True
