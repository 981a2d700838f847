"""Chooses the container edits of an Allocate answer, and compares them with what kubelet replays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from topobus.formats.messages.messages import Prepared
from topobus.values.edits import ContainerEdits, DeviceNode, join_edits
from topobus.values.outcome import Refusal, refuse

__all__ = ["container_edits", "differences", "foreign_variables"]


def container_edits(prepared: Prepared, names: Iterable[str]) -> ContainerEdits | Refusal:
    """Join the common edits and those of the named devices.

    Refused when a device is missing or two of them disagree.
    """
    wanted = sorted(names)
    missing = tuple(name for name in wanted if name not in prepared.edits)
    if missing:
        text = f"the device service prepared nothing for {', '.join(missing)}"
        return refuse("prepare-incomplete", text, devices=missing)
    return join_edits((prepared.common, *(prepared.edits[name] for name in wanted)))


def differences(given: ContainerEdits, now: ContainerEdits) -> tuple[str, ...]:
    """List in short sentences which edits of a container are no longer right.

    Additional edits are ignored, because they do no harm.

    >>> differences(ContainerEdits(device_nodes=(DeviceNode(path="/dev/nvidia0"),)), ContainerEdits(device_nodes=(DeviceNode(path="/dev/nvidia1"),)))
    ('device node /dev/nvidia0 is not its own any more',)
    """  # noqa: E501
    changes = [
        f"variable {key} was {value!r} and is {now.env[key]!r}"
        if key in now.env
        else f"variable {key} is not its own any more"
        for key, value in sorted(given.env.items())
        if now.env.get(key) != value
    ]
    changes += [
        f"annotation {key} was {value!r}"
        for key, value in sorted(given.annotations.items())
        if now.annotations.get(key) != value
    ]
    nodes, mounts = (
        {_node(device_node) for device_node in now.device_nodes},
        {(mount.host_path, mount.container_path) for mount in now.mounts},
    )
    changes += [
        f"device node {device_node.host_path or device_node.path} is not its own any more"
        for device_node in given.device_nodes
        if _node(device_node) not in nodes
    ]
    changes += [
        f"mount {mount.host_path} is not its own any more"
        for mount in given.mounts
        if (mount.host_path, mount.container_path) not in mounts
    ]
    changes += [f"hook {hook.path} is not its own any more" for hook in given.hooks if hook not in now.hooks]
    changes += [
        f"network device {device.host_name} is not its own any more"
        for device in given.net_devices
        if device not in now.net_devices
    ]
    return tuple(changes)


def foreign_variables(edits: ContainerEdits, device_class: str, owners: Mapping[str, str]) -> tuple[str, ...]:
    """List variables that another class has set before, because in one container kubelet would keep
    only the first of the two.

    Shapes: owners — variable to the class that set it first.
    """
    return tuple(key for key in sorted(edits.env) if owners.get(key, device_class) != device_class)


def _node(device_node: DeviceNode) -> tuple[str, str]:
    return device_node.path, device_node.host_path or device_node.path
