"""Host ports: which of a pod's ports the pods on a node have taken.

Pure. Source: kube-scheduler's NodePorts plugin, util.GetHostPorts and HostPortInfo.CheckConflict,
1.36. Containers and sidecars count, plain init containers do not. Two ports conflict when protocol
and number are the same, and also the address, or when one of them is for all addresses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from topobus.values.outcome import Reason

__all__ = ["ANY_ADDRESS", "HostPort", "host_ports_of", "taken_ports", "why_ports_taken"]

ANY_ADDRESS = "0.0.0.0"
_MAX_PORT = 65535


class HostPort(NamedTuple):
    """One port of a node, as a container asks for it."""

    address: str
    protocol: str
    port: int

    def __str__(self) -> str:
        where = "" if self.address == ANY_ADDRESS else f"{self.address}:"
        return f"{where}{self.port}/{self.protocol}"


def host_ports_of(spec: Mapping[str, Any]) -> tuple[HostPort, ...]:
    """List the host ports of a pod's spec, each once.

    A malformed part asks for nothing, because the API server has checked it.

    >>> [str(port) for port in host_ports_of({"containers": [{"ports": [{"hostPort": 80}, {"containerPort": 8080}]}]})]
    ['80/TCP']
    """
    ports: dict[HostPort, None] = {}
    for part in ("initContainers", "containers"):
        containers = spec.get(part)
        for container in containers if isinstance(containers, list) else ():
            if not isinstance(container, Mapping) or (
                part == "initContainers" and container.get("restartPolicy") != "Always"
            ):
                continue
            listed = container.get("ports")
            for port in listed if isinstance(listed, list) else ():
                number = port.get("hostPort") if isinstance(port, Mapping) else None
                if isinstance(number, int) and not isinstance(number, bool) and 0 < number <= _MAX_PORT:
                    ports[
                        HostPort(str(port.get("hostIP") or ANY_ADDRESS), str(port.get("protocol") or "TCP"), number)
                    ] = None
    return tuple(ports)


def taken_ports(wanted: Collection[HostPort], used: Collection[HostPort]) -> tuple[HostPort, ...]:
    """List the wanted ports that conflict with a port in use, in the order in which they are
    wanted.
    """
    return tuple(port for port in wanted if any(_conflict(port, other) for other in used))


def why_ports_taken(node: str, wanted: Collection[HostPort], used: Collection[HostPort]) -> Reason | None:
    """Explain which of a pod's host ports are taken on a node. None when none is."""
    taken = taken_ports(wanted, used)
    if not taken:
        return None
    shown = tuple(map(str, taken))
    ports = f"host port{'s' if len(shown) > 1 else ''} {', '.join(shown)}"
    message = f"node {node}: {ports} of {len(wanted)} wanted {'are' if len(shown) > 1 else 'is'} taken by pods there"
    return Reason(
        code="host-port-taken",
        message=message,
        facts={"node": node, "ports": shown, "wanted": len(wanted), "hindrances": len(shown)},
    )


def _conflict(one_port: HostPort, other: HostPort) -> bool:
    return one_port[1:] == other[1:] and (
        one_port.address == other.address or ANY_ADDRESS in (one_port.address, other.address)
    )
