"""Device classes: those with a service of their own, those that `topobus-device --class NAME`
serves, and those of other vendors' device plugins.

The name alone decides which principal serves a class, so that both sides of a request and the NATS
server's permissions agree without a message: a name with a hyphen (`gpu-nvidia`) is a class that
the gateway made of another vendor's resource, and every other class has a service that connects
under the class's own name (docs/adr/0029).
"""

from __future__ import annotations

import re

__all__ = ["DEVICE_SERVICES", "class_complaint", "class_server", "has_own_service", "principal_role"]

DEVICE_SERVICES = ("gpu", "nic", "fpga", "cpu")
"""The classes that Topobus ships a service for."""
FOREIGN_SERVER = "gateway"
"""The service that serves classes of other vendors' device plugins."""

# The name is a NATS user, a token of subjects, a part of variables (TOPOBUS_NPU__…) and of an
# account's name; 20 characters leave room in a socket's path.
_NAME = re.compile(r"[a-z][a-z0-9]{0,19}")
# Other clients connect under these names: other processes, the server itself, NATS' users that are
# no process, and variables that count for every service.
_TAKEN = frozenset(
    {
        "all",
        "cli",
        "console",
        "controller",
        "core",
        "device",
        "discovery",
        "gateway",
        "leaf",
        "nats",
        "relay",
        "topobus",
        "topology",
        "user",
        "users",
        "verdicts",
    }
)


def class_complaint(device_class: str) -> str:
    """Explain why `topobus-device` cannot serve a class of this name.

    Empty when it can, or when the class has a service of its own.

    >>> class_complaint("npu"), class_complaint("gpu")
    ('', '')
    >>> class_complaint("smart-card")
    "device class 'smart-card': wanted 1 to 20 lowercase letters and digits, a letter first (a hyphen marks classes of other vendors' device plugins)"
    """  # noqa: E501
    if not _NAME.fullmatch(device_class):
        return (
            f"device class {device_class!r}: wanted 1 to 20 lowercase letters and digits, a letter first "
            "(a hyphen marks classes of other vendors' device plugins)"
        )
    return (
        f"device class {device_class!r}: the name belongs to another process of Topobus"
        if device_class in _TAKEN
        else ""
    )


def has_own_service(device_class: str) -> bool:
    """Say whether a device service serves the class, a built-in one or `topobus-device`.

    >>> has_own_service("gpu"), has_own_service("npu"), has_own_service("gpu-nvidia")
    (True, True, False)
    """
    return not class_complaint(device_class)


def class_server(device_class: str) -> str:
    """Name the principal that serves a class: its own service, or the gateway.

    >>> class_server("gpu"), class_server("npu"), class_server("gpu-nvidia")
    ('gpu', 'npu', 'gateway')
    """
    return device_class if has_own_service(device_class) else FOREIGN_SERVER


def principal_role(principal: str) -> str:
    """Name the principal whose rights the catalogue lists for this one: all device services have
    the rights of the first, each for its own class.

    >>> principal_role("npu"), principal_role("nic"), principal_role("gateway")
    ('gpu', 'gpu', 'gateway')
    """
    return DEVICE_SERVICES[0] if has_own_service(principal) else principal
