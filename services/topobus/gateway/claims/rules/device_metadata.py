"""Files that describe a claim's devices to its containers (KEP-5304): their content, where
containers find them, and the CDI devices that mount them.

Each request has one document. The CDI file that mounts it uses the gateway's own names.
Source: k8s.io/dynamic-resource-allocation kubeletplugin/metadata.go and api/metadata (v1alpha1),
1.36: a stream of JSON objects, one for each version, newest first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from topobus.formats.containers.cdi import CdiDevice, CdiSpec
from topobus.gateway.claims.rules.claim_allocation import AllocatedDevice
from topobus.gateway.claims.rules.claim_cdi import CDI_VENDOR, cdi_class
from topobus.gateway.claims.rules.device_status import network_data
from topobus.gateway.containers.rules.guarded_names import METADATA_FOLDER
from topobus.values.edits import ContainerEdits, Mount
from topobus.values.names import ClaimUid
from topobus.values.sandbox import AttachedInterface

__all__ = [
    "DescribedClaim",
    "MetadataVersion",
    "described_spec",
    "documents",
    "generation_of",
    "metadata_device_name",
    "metadata_path",
]

MetadataVersion = Literal["v1alpha1"]
"""Versions of metadata.resource.k8s.io that can be written."""

_GROUP = "metadata.resource.k8s.io"


class DescribedClaim(Struct, frozen=True, kw_only=True):
    """A claim at one driver, with what its containers may learn of it."""

    namespace: str
    name: str
    uid: ClaimUid
    driver: str
    devices: tuple[AllocatedDevice, ...]
    pod_claim_name: str = ""
    """The name by which its pod knows the claim, if it was made from a template. Empty: the
    claim's own."""
    attributes: Mapping[str, Mapping[str, Any]] = {}
    """By device, in the form of a ResourceSlice."""
    interfaces: Mapping[str, AttachedInterface] = {}
    """By device."""


def documents(claim: DescribedClaim, versions: Iterable[str], generations: Mapping[str, int]) -> dict[str, bytes]:
    """Return the file of each request, by the request's name without the part of an alternative.

    Shapes: generations — of the files to be written, by request; a missing one is the first.
    """
    by_request: dict[str, list[AllocatedDevice]] = {}
    for device in claim.devices:
        by_request.setdefault(device.request, []).append(device)
    return {
        request: b"".join(_encoded(claim, version, devices, generations.get(request, 1)) for version in versions)
        for request, devices in by_request.items()
    }


def generation_of(document: bytes) -> int:
    """Read the generation of a file. 0 when the file is not one of ours.

    >>> generation_of(b'{"metadata": {"generation": 3}} {"another": "version"}'), generation_of(b"{")
    (3, 0)
    """
    try:
        first, _ = json.JSONDecoder().raw_decode(document.decode())
        generation = first["metadata"]["generation"]
    except (ValueError, TypeError, LookupError):
        return 0
    return generation if isinstance(generation, int) and generation > 0 else 0


def metadata_path(driver: str, claim_name: str, pod_claim_name: str, request: str) -> str:
    """Return the path at which a container finds the file of a request.

    >>> metadata_path("topobus.dev", "nets-x7f2k", "nets", "nic")
    '/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/nets/nic/topobus.dev-metadata.json'
    """
    folder, name = ("resourceclaimtemplates", pod_claim_name) if pod_claim_name else ("resourceclaims", claim_name)
    return f"{METADATA_FOLDER}/{folder}/{name}/{request}/{driver}-metadata.json"


def metadata_device_name(uid: ClaimUid, request: str) -> str:
    """Return the name of the CDI device that mounts a request's file.

    It is no device's name, because those contain no '_'.

    >>> metadata_device_name("3cec", "big")
    'claim-3cec_metadata-big'
    """
    return f"claim-{uid}_metadata-{request}"


def described_spec(spec: CdiSpec | None, claim: DescribedClaim, device_class: str, files: Mapping[str, str]) -> CdiSpec:
    """Add the mounts of a claim's files to its CDI file.

    Shapes: spec — None: there are no other edits; files — request to the file's path on the host.
    """
    mounts = tuple(
        CdiDevice(
            name=metadata_device_name(claim.uid, request),
            edits=ContainerEdits(
                mounts=(
                    Mount(
                        host_path=path,
                        container_path=metadata_path(claim.driver, claim.name, claim.pod_claim_name, request),
                        options=("ro", "bind"),
                    ),
                )
            ),
        )
        for request, path in sorted(files.items())
    )
    base = spec or CdiSpec(vendor=CDI_VENDOR, device_class=cdi_class(device_class), devices=())
    return replace(base, devices=(*base.devices, *mounts))


def _encoded(claim: DescribedClaim, version: str, devices: Iterable[AllocatedDevice], generation: int) -> bytes:
    shown = [(device, _device(claim, device)) for device in devices]
    # With the part of the chosen alternative, as the allocation writes it.
    names = dict.fromkeys(
        f"{device.request}/{device.alternative}" if device.alternative else device.request for device, _ in shown
    )
    document: dict[str, Any] = {
        "kind": "DeviceMetadata",
        "apiVersion": f"{_GROUP}/{version}",
        "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid, "generation": generation},
    }
    if claim.pod_claim_name:
        document["podClaimName"] = claim.pod_claim_name
    document["requests"] = [
        {
            "name": name,
            "devices": [
                plain
                for device, plain in shown
                if name == (f"{device.request}/{device.alternative}" if device.alternative else device.request)
            ],
        }
        for name in names
    ]
    return (json.dumps(document, indent=2) + "\n").encode()


def _device(claim: DescribedClaim, device: AllocatedDevice) -> dict[str, Any]:
    plain: dict[str, Any] = {"driver": claim.driver, "pool": device.pool, "name": device.device}
    attributes = claim.attributes.get(device.device)
    if attributes:
        plain["attributes"] = dict(attributes)
    interface = claim.interfaces.get(device.device)
    if interface is not None:
        # Values that the API would refuse in a status are left out of the file as well.
        network, _ = network_data(interface)
        if network:
            plain["networkData"] = network
    return plain
