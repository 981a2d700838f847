"""Joins the container edits of several devices into one, for the Allocate answer and for a claim's
CDI file.

The result is a Refusal when two devices contradict each other, because kubelet and container
runtimes would keep one of two conflicting values without a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from topobus.formats.messages.messages import Prepared
from topobus.values.edits import ContainerEdits, Cpuset, DeviceNode, Hook, IntelRdt, Mount, NetDevice
from topobus.values.outcome import Refusal, refuse

__all__ = ["container_edits", "differences", "foreign_variables", "join"]


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
    env: dict[str, str] = {}
    annotations: dict[str, str] = {}
    nodes: dict[str, DeviceNode] = {}
    mounts: dict[str, Mount] = {}
    interfaces: dict[str, NetDevice] = {}
    hooks: dict[Hook, None] = {}
    gids: dict[int, None] = {}
    cpuset: Cpuset | None = None
    rdt: IntelRdt | None = None
    conflicts: list[str] = []
    for part in parts:
        conflicts += [f"variable {key}" for key, value in part.env.items() if env.setdefault(key, value) != value]
        conflicts += [
            f"annotation {key}"
            for key, value in part.annotations.items()
            if annotations.setdefault(key, value) != value
        ]
        conflicts += [
            f"device node {node.path}" for node in part.device_nodes if nodes.setdefault(node.path, node) != node
        ]
        conflicts += [
            f"mount {mount.container_path}"
            for mount in part.mounts
            if mounts.setdefault(mount.container_path, mount) != mount
        ]
        conflicts += [
            f"network device {device.name}"
            for device in part.net_devices
            if interfaces.setdefault(device.name, device) != device
        ]
        conflicts += (
            ["cache and memory bandwidth"]
            if part.intel_rdt is not None and (rdt := rdt or part.intel_rdt) != part.intel_rdt
            else []
        )
        # A program runs once, however many devices name it in the same way.
        hooks |= dict.fromkeys(part.hooks)
        gids |= dict.fromkeys(part.additional_gids)
        if part.cpuset is not None:
            cpuset = part.cpuset if cpuset is None else cpuset | part.cpuset
    if conflicts:
        edits = tuple(sorted(set(conflicts)))
        text = f"two devices of one container contradict each other in {', '.join(edits)}"
        return refuse("edits-conflict", text, edits=edits)
    return ContainerEdits(
        env=env,
        annotations=annotations,
        device_nodes=tuple(nodes.values()),
        mounts=tuple(mounts.values()),
        cpuset=cpuset,
        hooks=tuple(hooks),
        additional_gids=tuple(gids),
        net_devices=tuple(interfaces.values()),
        intel_rdt=rdt,
    )


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
