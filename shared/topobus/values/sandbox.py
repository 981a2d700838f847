"""A pod's sandbox as the container runtime reports it, and the network interface that a device is
inside it.

The gateway and the device services share these values. Of the annotations, which a pod's author may
have written, only the few keys that are read are kept.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

__all__ = ["BANDWIDTH_ANNOTATIONS", "AttachedInterface", "ContainerName", "HostPort", "Sandbox"]

BANDWIDTH_ANNOTATIONS = ("kubernetes.io/ingress-bandwidth", "kubernetes.io/egress-bandwidth")
"""The only annotations of a pod that anybody here reads."""

_Port = Annotated[int, Meta(ge=1, le=65535)]


class HostPort(Struct, frozen=True, kw_only=True):
    """A port of the host that leads to a container's."""

    host_port: _Port
    container_port: _Port
    protocol: str = "tcp"
    """`tcp`, `udp` or `sctp`."""
    host_ip: str = ""
    """Empty: all addresses of the host."""


class Sandbox(Struct, frozen=True, kw_only=True):
    """A pod's sandbox."""

    id: str
    """The runtime's: a pod that is started again has another one."""
    uid: str
    """The pod's."""
    namespace: str
    name: str
    network_namespace: str = ""
    """Path on the host, from the runtime; empty: the host's own."""
    annotations: dict[str, str] = {}
    """Those of BANDWIDTH_ANNOTATIONS that the pod has."""
    host_ports: tuple[HostPort, ...] = ()
    ports_unknown: str = ""
    """Why `host_ports` may lack some; empty: they are all that the pod has. A driver that would
    have to open them then refuses the sandbox."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class ContainerName(Struct, frozen=True, kw_only=True):
    """Which container of which pod is about to be made."""

    namespace: str
    pod: str
    """The pod's name."""
    pod_uid: str
    name: str
    """The container's."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.pod}/{self.name}"


class AttachedInterface(Struct, frozen=True, kw_only=True):
    """What a device became inside a pod."""

    name: str
    """Of the interface, as the pod sees it."""
    mac: str = ""
    """Lower case, with colons; empty: it has none."""
    addresses: tuple[str, ...] = ()
    """With their prefixes: `10.1.2.3/24`, `fd00::3/64`."""
    mtu: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0
    """Bytes; 0: not known."""
