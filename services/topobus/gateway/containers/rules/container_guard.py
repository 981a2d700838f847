"""The guard of a claim's containers: a mount that no runtime can make, so that no container starts
without the gateway's consent.

A container runtime continues without its plugins. While the gateway is away, no component pins a
container's CPUs or checks whether its interface is in the pod. So the CDI file of a claim that
needs this has one more mount, of a host path that cannot be created. The gateway removes the mount
when the runtime shows it a new container (NRI CreateContainer), and only then can the container
start.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from topobus.formats.containers.cdi import CdiSpec
from topobus.gateway.containers.rules.guarded_names import GUARD_FOLDER, GUARD_SOURCE
from topobus.values.edits import Mount
from topobus.values.names import ClaimUid

__all__ = ["guard_mount", "guarded", "guarded_claims"]


def guard_mount(uid: ClaimUid, device_class: str) -> Mount:
    """Return the mount that prevents containers of a claim from starting.

    A runtime's error shows both of its paths.

    >>> guard_mount("3cec", "nic").container_path
    '/run/topobus/guard/nic/3cec'
    """
    return Mount(host_path=GUARD_SOURCE, container_path=f"{GUARD_FOLDER}/{device_class}/{uid}")


def guarded(spec: CdiSpec, uid: ClaimUid, device_class: str) -> CdiSpec:
    """Add the guard to all parts that a container can name, so that it cannot be avoided."""
    mount = guard_mount(uid, device_class)
    return replace(
        spec,
        devices=tuple(
            replace(device, edits=replace(device.edits, mounts=(*device.edits.mounts, mount)))
            for device in spec.devices
        ),
    )


def guarded_claims(mounts: Iterable[tuple[str, str]]) -> tuple[tuple[ClaimUid, str], ...]:
    """Return the claims whose guard a container has, each by uid and class.

    Shapes: mounts — source and destination of each. A mount from another source at such a path is
    not a guard.

    >>> guarded_claims([("/proc/topobus-gateway-has-not-seen-this-container", "/run/topobus/guard/nic/3cec"), ("/etc", "/run/topobus/guard/nic/77")])
    (('3cec', 'nic'),)
    """  # noqa: E501
    claims: dict[tuple[ClaimUid, str], None] = {}
    for source, destination in mounts:
        device_class, slash, uid = destination.removeprefix(f"{GUARD_FOLDER}/").partition("/")
        if source == GUARD_SOURCE and destination.startswith(f"{GUARD_FOLDER}/") and slash:
            claims[ClaimUid(uid), device_class] = None
    return tuple(claims)
