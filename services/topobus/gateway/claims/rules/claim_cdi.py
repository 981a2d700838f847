"""Builds the CDI file of what was prepared for a claim, and gives its devices their CDI names.

Some devices get a variable whose value is their CDI name, because runtimes before NRI 0.10 do not
report a container's CDI devices. A user can set such a variable, so it proves nothing. The guard
(`container_guard`) identifies the claim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from msgspec.structs import replace

from topobus.formats.containers.cdi import CdiDevice, CdiSpec
from topobus.formats.messages.messages import Prepared
from topobus.values.edits import ContainerEdits
from topobus.values.names import ClaimUid

__all__ = [
    "ADJUST_VARIABLE",
    "CDI_VENDOR",
    "CPUSET_VARIABLE",
    "cdi_class",
    "cdi_device_name",
    "cdi_names",
    "cdi_request_name",
    "cdi_spec",
    "cdi_whole_name",
    "cdi_whole_names",
]

CDI_VENDOR = "topobus.dev"
ADJUST_VARIABLE = "TOPOBUS_ADJUST_"
"""Prefix of the variables that name devices whose service is called when a container is created."""
CPUSET_VARIABLE = "TOPOBUS_CPUSET_"
"""Prefix of the variables that name devices with CPUs."""
# Edits that are lists, of which a container gets each element once.
_LISTS = ("device_nodes", "mounts", "hooks", "additional_gids", "net_devices")


def cdi_device_name(uid: ClaimUid, device: str) -> str:
    """Return the CDI name of a claim's device.

    It contains the claim's uid, because two files that define the same name cancel each other out.
    It begins with a letter, which every CDI version accepts.

    >>> cdi_device_name("3cec", "gpu-0")
    'claim-3cec-gpu-0'
    """
    return f"claim-{uid}-{device}"


def cdi_request_name(uid: ClaimUid, request: str) -> str:
    """Return the CDI name of what the devices of one request have in common.

    It is no device's name, because those contain no '_'.

    >>> cdi_request_name("3cec", "big")
    'claim-3cec_request-big'
    """
    return f"claim-{uid}_request-{request}"


def cdi_whole_name(uid: ClaimUid) -> str:
    """Return the CDI name of all devices' common part, for containers that name no request."""
    return f"claim-{uid}_whole"


def cdi_spec(
    uid: ClaimUid, device_class: str, prepared: Prepared, requests: Mapping[str, Prepared] = MappingProxyType({})
) -> CdiSpec | None:
    """Build a claim's CDI file.

    None when nothing is to be edited (a runtime refuses an empty file).

    Shapes: requests — what was prepared for each request alone, where the claim has several.
    Kubelet gives a container the names of the requests that it names. So an edit that lists devices
    is part of its request, and once more of the whole claim. The file's common edits are those that
    all requests share.
    """
    common = (
        prepared.common
        if len(requests) < 2
        else _alike((prepared.common, *(request.common for request in requests.values())))
    )
    nameless = {name: _naming(uid, name) for name in prepared.to_attach}
    own = {name: (edits, prepared.common) for name, edits in prepared.edits.items()}
    joined: list[tuple[str, ContainerEdits]] = []
    if len(requests) > 1:
        # Made for the request alone, so it contains no device of another request.
        own = {
            name: (edits, _without(request.common, common))
            for request in reversed(tuple(requests.values()))
            for name, edits in request.edits.items()
        }
        joined = [
            (cdi_request_name(uid, request), _of_request(device_class, request, other_request, common))
            for request, other_request in requests.items()
        ]
        joined.append((cdi_whole_name(uid), _without(prepared.common, common)))
    devices = [
        (
            cdi_device_name(uid, name),
            _named(
                _first_to_edit(edits, rest, common, nameless.get(name, edits)),
                name,
                cdi_device_name(uid, name),
                is_adjusted=name in prepared.to_adjust,
            ),
        )
        for name, (edits, rest) in sorted(own.items())
    ]
    entries = tuple(
        CdiDevice(name=name, edits=_bound(edits)) for name, edits in (*devices, *joined) if not edits.is_empty
    )
    if not entries:
        return None
    return CdiSpec(
        vendor=CDI_VENDOR,
        device_class=cdi_class(device_class),
        devices=entries,
        common=_bound(_without_annotations(common)),
    )


def cdi_names(spec: CdiSpec | None, uid: ClaimUid, device: str, request: str) -> tuple[str, ...]:
    """List the names that give a container one device of a request.

    The device's own name comes first, because kubelet reports the device's health by it.
    """
    return _defined(spec, cdi_device_name(uid, device), cdi_request_name(uid, request))


def cdi_whole_names(spec: CdiSpec | None, uid: ClaimUid) -> tuple[str, ...]:
    """Return the additional name for a container that names no request.

    Empty where the claim has only one request.
    """
    return _defined(spec, cdi_whole_name(uid))


def cdi_class(device_class: str) -> str:
    """Return the CDI name of a class."""
    # A class made from another vendor's resource may begin with a digit (`10g-nic-acme`), which CDI
    # refuses. The prefix avoids this and a collision with another class.
    return device_class if device_class[:1].isalpha() else f"c-{device_class}"


def _defined(spec: CdiSpec | None, *names: str) -> tuple[str, ...]:
    known_names = {device.name for device in spec.devices} if spec is not None else set()
    return tuple(spec.qualified_name(name) for name in names if name in known_names) if spec is not None else ()


def _first_to_edit(*choices: ContainerEdits) -> ContainerEdits:
    """Choose the first edits that are not empty, because CDI refuses a device without edits.

    Giving a container the same edit twice is harmless.
    """
    return next((edits for edits in choices if not edits.is_empty), ContainerEdits())


def _naming(uid: ClaimUid, device: str) -> ContainerEdits:
    """Return edits that only name a device that is attached to the sandbox and has no edits of its
    own. Without a CDI name nothing would prevent its container from starting too early.
    """
    return ContainerEdits(env={f"TOPOBUS_ATTACHED_{device.upper().replace('-', '_')}": cdi_device_name(uid, device)})


def _alike(parts: Sequence[ContainerEdits]) -> ContainerEdits:
    """Return the edits that all parts share."""
    first, *others = parts
    lists = {
        name: tuple(edit for edit in getattr(first, name) if all(edit in getattr(other, name) for other in others))
        for name in _LISTS
    }
    env = {
        key: value
        for key, value in first.env.items()
        if all(container_edits.env.get(key) == value for container_edits in others)
    }
    is_rdt_alike = all(container_edits.intel_rdt == first.intel_rdt for container_edits in others)
    return replace(ContainerEdits(env=env, intel_rdt=first.intel_rdt if is_rdt_alike else None), **lists)


def _without(edits: ContainerEdits, common: ContainerEdits) -> ContainerEdits:
    """Remove the edits that are common to all."""
    lists = {name: tuple(edit for edit in getattr(edits, name) if edit not in getattr(common, name)) for name in _LISTS}
    env = {key: value for key, value in edits.env.items() if key not in common.env}
    return replace(
        ContainerEdits(env=env, intel_rdt=edits.intel_rdt if edits.intel_rdt != common.intel_rdt else None), **lists
    )


def _of_request(device_class: str, request: str, prepared: Prepared, common: ContainerEdits) -> ContainerEdits:
    """Return the edits of one request, with a device list under a variable of its own, so that a
    container that names several requests gets the list of each.
    """
    rest = _without(prepared.common, common)
    words = f"topobus_{device_class}_devices_{request}".upper().replace("-", "_")
    return replace(rest, env={**rest.env, words: ",".join(sorted(prepared.edits))})


def _bound(edits: ContainerEdits) -> ContainerEdits:
    """Mark each mount as a bind mount. A runtime treats an unmarked mount as a file system, and the
    container does not start.
    """
    if all(mount.kind or {"bind", "rbind"} & set(mount.options) for mount in edits.mounts):
        return edits
    mounts = [
        mount
        if mount.kind or {"bind", "rbind"} & set(mount.options)
        else replace(mount, options=(*mount.options, "rbind"))
        for mount in edits.mounts
    ]
    return replace(edits, mounts=tuple(mounts))


def _without_annotations(edits: ContainerEdits) -> ContainerEdits:
    return replace(edits, annotations={})


def _named(edits: ContainerEdits, device: str, cdi_name: str, *, is_adjusted: bool) -> ContainerEdits:
    """Add a device's name to its edits if the device matters when its container is created. Other
    edits are unchanged.

    >>> _named(ContainerEdits(), "card-0", "claim-3cec-card-0", is_adjusted=True).env
    {'TOPOBUS_ADJUST_CARD_0': 'claim-3cec-card-0'}
    """
    prefixes = [
        prefix
        for prefix, is_wanted in ((CPUSET_VARIABLE, edits.cpuset is not None), (ADJUST_VARIABLE, is_adjusted))
        if is_wanted
    ]
    added = {f"{prefix}{device.upper().replace('-', '_')}": cdi_name for prefix in prefixes}
    return replace(edits, env={**edits.env, **added}) if added else edits
