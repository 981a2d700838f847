"""The guard of a claim's containers: a mount that no runtime can make, so that no container starts
that the gateway has not let pass.

A container runtime goes on without its plugins: while the gateway is away nobody pins a container's
CPUs or looks whether its interface is in the pod. So the CDI file of a claim that needs this names
one mount more, of a host path that nobody can create. The gateway takes the mount out when the
runtime shows it a new container (NRI CreateContainer), and only then can that start.
Flows in: a claim's CDI file, a container's mounts. Flows out: the file with the guard,
and whose guards a container has.
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
    """Make the mount that keeps containers of a claim from starting.

    A runtime's error shows both of its paths.

    >>> guard_mount("3cec", "nic").container_path
    '/run/topobus/guard/nic/3cec'
    """
    return Mount(host_path=GUARD_SOURCE, container_path=f"{GUARD_FOLDER}/{device_class}/{uid}")


def guarded(spec: CdiSpec, uid: ClaimUid, device_class: str) -> CdiSpec:
    """Add the guard to all that a container can name: there is no way past it."""
    mount = guard_mount(uid, device_class)
    return replace(
        spec,
        devices=tuple(
            replace(device, edits=replace(device.edits, mounts=(*device.edits.mounts, mount)))
            for device in spec.devices
        ),
    )


def guarded_claims(mounts: Iterable[tuple[str, str]]) -> tuple[tuple[ClaimUid, str], ...]:
    """Name the claims whose guard a container has, each by uid and class.

    Shapes: mounts — source and destination of each; a mount of another source on
    such a place is somebody else's.

    >>> guarded_claims([("/proc/topobus-gateway-has-not-seen-this-container", "/run/topobus/guard/nic/3cec"), ("/etc", "/run/topobus/guard/nic/77")])
    (('3cec', 'nic'),)
    """  # noqa: E501
    claims: dict[tuple[ClaimUid, str], None] = {}
    for source, destination in mounts:
        device_class, slash, uid = destination.removeprefix(f"{GUARD_FOLDER}/").partition("/")
        if source == GUARD_SOURCE and destination.startswith(f"{GUARD_FOLDER}/") and slash:
            claims[ClaimUid(uid), device_class] = None
    return tuple(claims)
