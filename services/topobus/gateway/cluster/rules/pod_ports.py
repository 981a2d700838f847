"""Reads from a pod what the container runtime does not give its plugins: host ports, as the
scheduler counts them, and rates that its author wrote.

Source: k8s.io/kubernetes pkg/scheduler/util GetHostPorts, 1.36: containers, and those init
containers that run as long as the pod (restartPolicy Always).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from topobus.formats.first_read import ready
from topobus.formats.messages.messages import ApiObject
from topobus.values.sandbox import BANDWIDTH_ANNOTATIONS, HostPort

__all__ = ["bandwidth_of", "host_ports_of"]


def host_ports_of(pod: ApiObject) -> tuple[HostPort, ...]:
    """List the ports of the host that lead to a pod's containers, each once.

    Empty for a pod in the host's own network, whose ports are open already.

    >>> port = {"hostPort": 8080, "containerPort": 80}
    >>> [str(port.host_port) for port in host_ports_of(ApiObject(api_version="v1", kind="Pod", metadata={}, spec={"containers": [{"ports": [port, port]}]}))]
    ['8080']
    """  # noqa: E501
    if pod.spec.get("hostNetwork") is True:
        return ()
    ports: dict[HostPort, None] = {}
    for container in _lasting_containers(pod):
        for port in _mappings(container.get("ports")):
            if port.get("hostPort"):
                ports[_host_port(port)] = None
    return tuple(ports)


def bandwidth_of(pod: ApiObject) -> dict[str, str]:
    """Read the pod's annotations of BANDWIDTH_ANNOTATIONS."""
    annotations = pod.metadata.get("annotations")
    texts = annotations if isinstance(annotations, Mapping) else {}
    return {key: texts[key] for key in BANDWIDTH_ANNOTATIONS if isinstance(texts.get(key), str)}


def _lasting_containers(pod: ApiObject) -> Iterator[Mapping[str, Any]]:
    yield from (
        container
        for container in _mappings(pod.spec.get("initContainers"))
        if container.get("restartPolicy") == "Always"
    )
    yield from _mappings(pod.spec.get("containers"))


def _host_port(port: Mapping[str, Any]) -> HostPort:
    """Read a port that an API server has accepted.

    Errors: raises msgspec.ValidationError for a port that it would not accept.
    """
    plain = {
        "host_port": port.get("hostPort"),
        "container_port": port.get("containerPort"),
        "protocol": str(port.get("protocol") or "TCP").lower(),
        "host_ip": port.get("hostIP") or "",
    }
    return msgspec.convert(plain, ready(HostPort))


def _mappings(entries: object) -> list[Mapping[str, Any]]:
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
