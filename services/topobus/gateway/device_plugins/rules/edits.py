"""Joins the container edits of several devices into one, for the Allocate answer and for a claim's
CDI file.

The result is a Refusal when two devices contradict each other, because kubelet and container
runtimes would keep one of two conflicting values without a message.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from typing import TypeVar

from topobus.formats.messages.messages import Prepared
from topobus.values.edits import ContainerEdits, DeviceNode
from topobus.values.outcome import Refusal, refuse

__all__ = ["container_edits", "differences", "foreign_variables", "join"]

V = TypeVar("V")


def container_edits(prepared: Prepared, names: Iterable[str]) -> ContainerEdits | Refusal:
    """Join the common edits and those of the named devices.

    Refused when a device is missing or two of them disagree.
    """
    wanted = sorted(names)
    missing = tuple(name for name in wanted if name not in prepared.edits)
    if missing:
        text = f"the device service prepared nothing for {', '.join(missing)}"
        return refuse("prepare-incomplete", text, devices=missing)
    return join((prepared.common, *(prepared.edits[name] for name in wanted)))


def join(parts: Iterable[ContainerEdits]) -> ContainerEdits | Refusal:
    """Join edits of one container. Equal edits appear once.

    >>> join([ContainerEdits(env={"A": "1"}), ContainerEdits(env={"B": "2"})]).env
    {'A': '1', 'B': '2'}
    """
    parts = tuple(parts)
    conflicts: list[str] = []
    env = _united("variable", (item for part in parts for item in part.env.items()), conflicts)
    annotations = _united("annotation", (item for part in parts for item in part.annotations.items()), conflicts)
    nodes = _united("device node", ((node.path, node) for part in parts for node in part.device_nodes), conflicts)
    mounts = _united("mount", ((mount.container_path, mount) for part in parts for mount in part.mounts), conflicts)
    devices = ((device.name, device) for part in parts for device in part.net_devices)
    interfaces = _united("network device", devices, conflicts)
    rdts = [part.intel_rdt for part in parts if part.intel_rdt is not None]
    if any(rdt != rdts[0] for rdt in rdts):
        conflicts.append("cache and memory bandwidth")
    if conflicts:
        edits = tuple(sorted(set(conflicts)))
        text = f"two devices of one container contradict each other in {', '.join(edits)}"
        return refuse("edits-conflict", text, edits=edits)
    cpusets = [part.cpuset for part in parts if part.cpuset is not None]
    return ContainerEdits(
        env=env,
        annotations=annotations,
        device_nodes=tuple(nodes.values()),
        mounts=tuple(mounts.values()),
        cpuset=functools.reduce(operator.or_, cpusets) if cpusets else None,
        # A program runs once, however many devices name it in the same way.
        hooks=tuple(dict.fromkeys(hook for part in parts for hook in part.hooks)),
        additional_gids=tuple(dict.fromkeys(gid for part in parts for gid in part.additional_gids)),
        net_devices=tuple(interfaces.values()),
        intel_rdt=rdts[0] if rdts else None,
    )


def _united(what: str, items: Iterable[tuple[str, V]], conflicts: list[str]) -> dict[str, V]:
    """Join edits by name. Names with two different edits are added to `conflicts`."""
    united: dict[str, V] = {}
    conflicts += [f"{what} {name}" for name, value in items if united.setdefault(name, value) != value]
    return united


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
