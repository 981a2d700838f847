"""Chooses the paths of a DRA driver's two sockets.

They contain the gateway's instance id (its pod's uid), so that an old and a new gateway can run
side by side during a roll-over. Paths that would not fit into a socket address (108 bytes) are
shortened in two steps. Kubelet reads the paths from the registration, so no other program has to
compute them.
"""

from __future__ import annotations

import hashlib

from msgspec import Struct

__all__ = ["SOCKET_PATH_LIMIT", "DriverSockets", "driver_sockets", "is_instance_name", "stale_patterns"]

# sun_path of unix(7) has 108 bytes, the last one NUL. A longer name fails only at bind, with an
# unhelpful message.
SOCKET_PATH_LIMIT = 107

_HASH_LENGTH = 8
_INSTANCE_LIMIT = 63


class DriverSockets(Struct, frozen=True, kw_only=True):
    """The sockets of one driver of one gateway."""

    service: str
    """kubelet calls it for claims and health."""
    registration: str
    """kubelet's plugin watcher finds it, and requests the service socket's path through it."""


def driver_sockets(plugins_dir: str, registry_dir: str, driver: str, instance: str) -> DriverSockets:
    """Return a driver's sockets. Without an instance they are named after the driver alone.

    The name contains the whole uid where it fits, else a hash of it, else a hash of driver and uid.
    The caller must refuse a folder that is too long even for that.

    >>> driver_sockets("/k/plugins", "/k/plugins_registry", "topobus.dev", "3cec").service
    '/k/plugins/topobus.dev/dra-3cec.sock'
    """
    tails = (f"-{instance}", f"-{_hash(instance)}") if instance else ("",)
    short = f"tb{_hash(f'{driver}/{instance}')}.sock"
    return DriverSockets(
        service=_first_that_fits(
            [*(f"{plugins_dir}/{driver}/dra{tail}.sock" for tail in tails), f"{plugins_dir}/{short}"]
        ),
        registration=_first_that_fits(
            [*(f"{registry_dir}/{driver}{tail}-reg.sock" for tail in tails), f"{registry_dir}/{short}"]
        ),
    )


def is_instance_name(text: str) -> bool:
    """Return whether a text can be part of a file name: letters, digits, '-', '_' and '.', 63 at
    most.

    >>> is_instance_name("3cec39ef-a300"), is_instance_name("../x")
    (True, False)
    """
    return (
        len(text) <= _INSTANCE_LIMIT
        and all(character.isascii() and (character.isalnum() or character in "-_.") for character in text)
        and ".." not in text
    )


def stale_patterns(driver: str) -> tuple[str, str]:
    """Return the patterns of the service and registration sockets that any gateway makes for a
    driver. The shortest form of a name is not covered, because it does not contain the driver.
    """
    return "dra*.sock", f"{driver}*-reg.sock"


def _first_that_fits(paths: list[str]) -> str:
    return next((path for path in paths if len(path.encode()) <= SOCKET_PATH_LIMIT), paths[-1])


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]
