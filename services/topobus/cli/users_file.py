"""The file of users that a nats-server includes, as `topobus keys` writes it: for which shape of
server, which nodes, with accounts or without.

The first line of a file records its form. An existing file keeps its form unless an option changes
it. So making a password again cannot turn a server with streams into one that does not see them,
and adding a node cannot remove another node's users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from topobus.bus.login.user_keys import write_whole
from topobus.bus.server_config.nats_accounts import Shape, accounts
from topobus.bus.server_config.nats_permissions import PRINCIPALS
from topobus.bus.server_config.server_users import accounts_configuration, server_configuration
from topobus.cli.exits import InputError, UsageError
from topobus.formats.messages.device_classes import DEVICE_SERVICES, class_complaint
from topobus.values.errors import ContractError

__all__ = ["UsersForm", "changed_form", "extra_classes", "user_names", "write_users"]

_FORM = "# topobus keys: "


class UsersForm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file of users is for."""

    shape: Shape = Shape.CENTRAL
    nodes: tuple[str, ...] = ()
    """Central, hub: the nodes with users of their own. Leaf: the node whose server it is, or none
    for a file that fits any."""
    has_accounts: bool = True
    classes: tuple[str, ...] = ()
    """Device classes besides ours, each with users of its own (`topobus-device --class`)."""


def changed_form(
    file: Path | None,
    *,
    shape: Shape | None = None,
    has_accounts: bool | None = None,
    nodes: Sequence[str] = (),
    left_out: Sequence[str] = (),
    classes: Sequence[str] = (),
) -> UsersForm:
    """Return the form of a file with the wanted changes: nodes and classes are added to those that
    it has.

    Errors: raises InputError for a file that cannot be read, UsageError for an unknown form.
    """
    before = _read_form(file) if file is not None else UsersForm()
    form = UsersForm(
        shape=before.shape if shape is None else shape,
        nodes=tuple(sorted({*before.nodes, *nodes} - set(left_out))),
        has_accounts=before.has_accounts if has_accounts is None else has_accounts,
        classes=tuple(sorted({*before.classes, *extra_classes(classes)})),
    )
    if not form.has_accounts and form != UsersForm(has_accounts=False, classes=form.classes):
        raise UsageError(
            "--one-account is for one server without named nodes",
            next_step="leave it out: hubs and leaves have accounts",
        )
    try:
        user_names(form)
    except (ValueError, ContractError) as err:
        raise UsageError(f"--node: {err}", next_step="a leaf has one node; leave one out with --without-node") from err
    return form


def extra_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return those device classes that have no service among ours, sorted.

    Errors: raises UsageError for a name that `topobus-device` cannot serve.
    """
    if complaint := next(filter(None, map(class_complaint, classes)), ""):
        raise UsageError(f"--class: {complaint}", next_step="choose another name; your driver has it in device_class")
    return tuple(sorted({*classes} - {*DEVICE_SERVICES}))


def user_names(form: UsersForm) -> tuple[str, ...]:
    """Name all users of a form, sorted."""
    if not form.has_accounts:
        return tuple(sorted((*PRINCIPALS, *form.classes)))
    return tuple(
        sorted(
            user.name
            for account in accounts(form.shape, nodes=form.nodes, classes=form.classes)
            for user in account.users
        )
    )


def write_users(file: Path, form: UsersForm, passwords: Mapping[str, str]) -> None:
    """Write the file, readable by its owner only. `passwords` has at least those of all users."""
    text = (
        accounts_configuration(passwords, form.shape, nodes=form.nodes, classes=form.classes)
        if form.has_accounts
        else server_configuration(passwords, classes=form.classes)
    )
    write_whole(file, f"{_FORM}{msgspec.json.encode(form).decode()}\n{text}")


def _read_form(file: Path) -> UsersForm:
    try:
        first = file.read_text(encoding="utf-8").partition("\n")[0]
        return msgspec.json.decode(first.removeprefix(_FORM), type=UsersForm)
    except FileNotFoundError:
        return UsersForm()
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as err:
        raise InputError(
            f"cannot read what {file} is for, from its first line: {err}",
            next_step="remove it: it is written again with the same passwords",
        ) from err
