"""Makes the CDI file of what was prepared for a claim, and gives its devices their names in CDI.

Flows in: a claim's uid, and the edits of its devices and requests. Flows out: the file, and the
names that a container is given. Some devices get a variable whose value is their name in CDI, since
runtimes before NRI 0.10 do not say a container's CDI devices. Of a user's making it proves nothing;
the guard (`container_guard`) tells whose claim it is.
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
"""Beginning of the variables that name devices whose service is asked when a container is made."""
CPUSET_VARIABLE = "TOPOBUS_CPUSET_"
"""Beginning of the variables that name devices that bring CPUs."""
# Edits that are lists of things of which a container has each once.
_LISTS = ("device_nodes", "mounts", "hooks", "additional_gids", "net_devices")


def cdi_device_name(uid: ClaimUid, device: str) -> str:
    """Name a claim's device in CDI.

    The claim's uid is in it, since two files that define one name cancel each other out. It begins
    with a letter, which every CDI version takes.

    >>> cdi_device_name("3cec", "gpu-0")
    'claim-3cec-gpu-0'
    """
    return f"claim-{uid}-{device}"


def cdi_request_name(uid: ClaimUid, request: str) -> str:
    """Name what the devices of one request have in common.

    No device has such a name, for those have no '_'.

    >>> cdi_request_name("3cec", "big")
    'claim-3cec_request-big'
    """
    return f"claim-{uid}_request-{request}"


def cdi_whole_name(uid: ClaimUid) -> str:
    """Name what all devices of a claim have in common, for containers that name no request."""
    return f"claim-{uid}_whole"


def cdi_spec(
    uid: ClaimUid, device_class: str, prepared: Prepared, requests: Mapping[str, Prepared] = MappingProxyType({})
) -> CdiSpec | None:
    """Describe a claim's CDI file.

    None when nothing is to be edited (a runtime refuses an empty file).

    Shapes: requests — what was prepared for each request alone, where the claim has
    several. Kubelet gives a container the names of the requests that it names, so what
    lists devices stands with its request, and once more for the whole claim; the file's
    common edits are what all of them say alike.
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
        # Made for the request alone: it knows of no sibling's device.
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

    The device's own first, by which kubelet tells people of its health.
    """
    return _defined(spec, cdi_device_name(uid, device), cdi_request_name(uid, request))


def cdi_whole_names(spec: CdiSpec | None, uid: ClaimUid) -> tuple[str, ...]:
    """List the name that a container gets besides when it names no request.

    None where the claim has one request.
    """
    return _defined(spec, cdi_whole_name(uid))


def cdi_class(device_class: str) -> str:
    """Name a class in CDI."""
    # A class made of somebody else's resource may begin with a digit (`10g-nic-acme`), which CDI
    # refuses. A letter of our own keeps them apart.
    return device_class if device_class[:1].isalpha() else f"c-{device_class}"


def _defined(spec: CdiSpec | None, *names: str) -> tuple[str, ...]:
    known_names = {device.name for device in spec.devices} if spec is not None else set()
    return tuple(spec.qualified_name(name) for name in names if name in known_names) if spec is not None else ()


def _first_to_edit(*choices: ContainerEdits) -> ContainerEdits:
    """Choose edits that are some, for CDI refuses a device without.

    What a container is given twice alike does it no harm.
    """
    return next((edits for edits in choices if not edits.is_empty), ContainerEdits())


def _naming(uid: ClaimUid, device: str) -> ContainerEdits:
    """Give a device edits that has none and is attached to the sandbox: without a name in CDI
    nothing would keep its container from starting too early.
    """
    return ContainerEdits(env={f"TOPOBUS_ATTACHED_{device.upper().replace('-', '_')}": cdi_device_name(uid, device)})


def _alike(parts: Sequence[ContainerEdits]) -> ContainerEdits:
    """Find what all parts say alike."""
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
    """Leave out what is said for all."""
    lists = {name: tuple(edit for edit in getattr(edits, name) if edit not in getattr(common, name)) for name in _LISTS}
    env = {key: value for key, value in edits.env.items() if key not in common.env}
    return replace(
        ContainerEdits(env=env, intel_rdt=edits.intel_rdt if edits.intel_rdt != common.intel_rdt else None), **lists
    )


def _of_request(device_class: str, request: str, prepared: Prepared, common: ContainerEdits) -> ContainerEdits:
    """Give the edits of one request, with a list under a name of its own: a container that names
    several requests has each one's.
    """
    rest = _without(prepared.common, common)
    words = f"topobus_{device_class}_devices_{request}".upper().replace("-", "_")
    return replace(rest, env={**rest.env, words: ",".join(sorted(prepared.edits))})


def _bound(edits: ContainerEdits) -> ContainerEdits:
    """Say of each mount that it is a bind mount: a runtime takes one that does not say so for a
    file system, and the container does not start.
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
    """Name a device that matters when its container is made; the edits of others stay as they are.

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
