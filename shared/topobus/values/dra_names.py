"""The names by which Kubernetes knows Topobus' devices: one DRA driver for a node, its two pools, and
the class in each device's name.

An allocation names a device by driver, pool and device alone, so what else must be known of it,
even when its inventory is gone, lies in these names: the node in the pool's, the class in the
device's.
"""

from __future__ import annotations

__all__ = [
    "CPU_CLASS",
    "DRIVER",
    "class_of_device",
    "class_of_group",
    "foreign_device",
    "group_of_class",
    "is_of_node",
    "node_of_pool",
    "pool_of_class",
]

DRIVER = "topobus.dev"
"""The DRA driver of every class, and the domain of its devices' attributes and capacities."""
CPU_CLASS = "cpu"
"""The class whose devices are logical CPUs, in a pool of their own."""
# A pool's name is several DNS subdomains with slashes between, a node's is one.
_CPU_POOL = "/cpu"
# Separates the class of another vendor's device, whose name has hyphens (`gpu-nvidia--dev-0`).
_FOREIGN = "--"


def class_of_device(driver: str, device: str) -> str | None:
    """Read a device's class from its name. Return None for another driver's device.

    >>> class_of_device("topobus.dev", "gpu-0000-3b-00-0"), class_of_device("topobus.dev", "gpu-nvidia--dev-0")
    ('gpu', 'gpu-nvidia')
    >>> class_of_device("gpu.example.com", "gpu-0"), class_of_device("topobus.dev", "gpu0")
    (None, 'gpu0')
    """
    # A name that tells no class is its own class: it is still ours, and no service serves that class.
    return device.partition(_FOREIGN if _FOREIGN in device else "-")[0] if driver == DRIVER else None


def foreign_device(device_class: str, name: str) -> str:
    """Name a device of another vendor's plugin.

    >>> foreign_device("gpu-nvidia", "dev-0")
    'gpu-nvidia--dev-0'
    """
    return f"{device_class}{_FOREIGN}{name}"


def pool_of_class(node: str, device_class: str) -> str:
    """Name the pool of a node that has the devices of a class: its CPUs' or that of all others.

    >>> pool_of_class("node-a", "gpu"), pool_of_class("node-a", "cpu")
    ('node-a', 'node-a/cpu')
    """
    return f"{node}{_CPU_POOL}" if device_class == CPU_CLASS else node


def node_of_pool(pool: str) -> str:
    """Name the node of one of our pools.

    >>> node_of_pool("node-a"), node_of_pool("node-a/cpu")
    ('node-a', 'node-a')
    """
    return pool.removesuffix(_CPU_POOL)


def is_of_node(driver: str, pool: str, node: str) -> bool:
    """Say whether a pool is one of a node's own.

    >>> is_of_node("topobus.dev", "node-a/cpu", "node-a"), is_of_node("gpu.example.com", "node-a", "node-a")
    (True, False)
    """
    return driver == DRIVER and node_of_pool(pool) == node


def group_of_class(device_class: str) -> str:
    """Name a class as Kubernetes' objects do: its DeviceClass, the API group of its parameters, and
    its driver in the classic API.

    >>> group_of_class("gpu")
    'gpu.topobus.dev'
    """
    return f"{device_class}.{DRIVER}"


def class_of_group(name: str) -> str | None:
    """Name the class behind the name of a DeviceClass or API group. Return None for a foreign one.

    >>> class_of_group("gpu.topobus.dev")
    'gpu'
    >>> [class_of_group(name) for name in ("gpu.example.com", "topobus.dev", "gpu.resource.topobus.dev")]
    [None, None, None]
    """
    device_class = name.removesuffix(f".{DRIVER}")
    return device_class if device_class and device_class != name and "." not in device_class else None
