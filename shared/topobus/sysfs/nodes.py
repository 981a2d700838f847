"""Paths of device nodes as a container and its runtime use them.

A driver names a node relative to dev (`dri/renderD128`). The runtime creates it from the host's own /dev, also where this process sees that folder
elsewhere (a service in a container reads it below another root).
"""

from __future__ import annotations

from topobus.domain.edits import DeviceNode

__all__ = ["device_node"]


def device_node(name: str, *, permissions: str = "rw") -> DeviceNode:
    """Make the edit that gives a container one device node, under the same path as on the host.

    >>> device_node("infiniband/uverbs0").path
    '/dev/infiniband/uverbs0'
    """
    return DeviceNode(path=f"/dev/{name}", permissions=permissions)
