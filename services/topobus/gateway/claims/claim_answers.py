"""Builds kubelet's answer for a prepared claim from its checkpoint entries.

Each device comes with the CDI names of its request. One more entry has the CDI name for containers
that name no request.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from topobus.gateway.claims.rules.claim_cdi import CDI_VENDOR, cdi_class, cdi_names, cdi_whole_names
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.claims.rules.device_metadata import metadata_device_name

__all__ = ["WHOLE_CLAIM", "PreparedDevice", "answer_of"]

WHOLE_CLAIM = "_whole"
"""The request name under which the edits common to all requests are listed. No container can
name it (it is no DNS label), and kubelet gives it to those that name none:
pkg/kubelet/cm/dra/claiminfo.go, cdiDevicesAsList."""


class PreparedDevice(Struct, frozen=True, kw_only=True):
    """One device in kubelet's answer."""

    request: str
    pool: str
    device: str
    cdi_devices: tuple[str, ...]
    share_id: str = ""


def answer_of(entries: Iterable[ClaimEntry]) -> tuple[PreparedDevice, ...]:
    """List the devices of a prepared claim of all classes in the form that kubelet gets. The parts
    of a shape are one device to it.
    """
    joined: dict[tuple[str, str, str, str], PreparedDevice] = {}
    for prepared in itertools.chain.from_iterable(map(_answer_of_class, entries)):
        key = (prepared.request, prepared.pool, prepared.device, prepared.share_id)
        earlier = joined[key].cdi_devices if key in joined else ()
        # The parts of a class have the name of their request in common.
        names = tuple(dict.fromkeys((*earlier, *prepared.cdi_devices)))
        joined[key] = msgspec.structs.replace(prepared, cdi_devices=names)
    # The lists of the whole claim override those of its requests, which may have come later.
    return tuple(sorted(joined.values(), key=lambda prepared: prepared.request == WHOLE_CLAIM))


def _answer_of_class(entry: ClaimEntry) -> list[PreparedDevice]:
    # The file of a request comes with its first device, which every container that names the
    # request gets.
    firsts = {device.request: device for device in reversed(entry.devices)} if entry.has_metadata else {}
    devices = [
        PreparedDevice(
            request=device.request,
            pool=device.pool,
            device=device.allocated,
            cdi_devices=(
                *cdi_names(entry.cdi, entry.uid, device.device, device.request),
                *([_metadata_name(entry, device.request)] if firsts.get(device.request) is device else []),
            ),
            share_id=device.share_id,
        )
        for device in entry.devices
    ]
    whole = cdi_whole_names(entry.cdi, entry.uid)
    if whole:
        devices.append(msgspec.structs.replace(devices[-1], request=WHOLE_CLAIM, cdi_devices=whole))
    return devices


def _metadata_name(entry: ClaimEntry, request: str) -> str:
    return f"{CDI_VENDOR}/{cdi_class(entry.device_class)}={metadata_device_name(entry.uid, request)}"
