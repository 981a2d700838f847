"""Moves the RDMA devices of a NIC into a pod's network namespace and back, beside the interface:
`rdma.mode: exclusive`.

The kernel must be in exclusive mode for that. The mode holds for the whole node and is not set
here. The kernel itself returns a device whose namespace ended.

NOT CHECKED on a kernel with RDMA: none was at hand.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from topobus.devicekit.device_record import DeviceRecord
from topobus.nic.netlink.identity import boot_id
from topobus.nic.netlink.places import Places, open_host, open_namespace, with_netlink
from topobus.nic.rdma.rdma_netlink import RdmaNetlink, open_socket
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal, refuse

__all__ = ["RDMA_STEP", "check_rdma", "hand_over_rdma", "take_back_rdma"]

RDMA_STEP = "rdma"
"""The step's name in a device's record."""


def check_rdma(names: Sequence[str]) -> Refusal | None:
    """Refuse the exclusive mode where the device has no RDMA, or the node shares RDMA among all
    namespaces.
    """
    if not names:
        return _refuse("rdma.mode", "shared: the device has no RDMA device in sight")
    try:
        with RdmaNetlink(open_socket()) as rdma:
            mode = rdma.mode()
    except HardwareError as err:
        return _refuse("rdma.mode", f"shared: {err}")
    if mode != "exclusive":
        return _refuse(
            "rdma.mode",
            "shared: this node shares its RDMA devices; `rdma system set netns exclusive` changes that, "
            "before any device is handed over",
        )
    return None


def hand_over_rdma(places: Places, names: Sequence[str], namespace: str, record: DeviceRecord) -> Refusal | None:
    """Move RDMA devices into a sandbox's namespace."""
    refusal = check_rdma(names)
    if refusal is not None:
        return refusal
    target = open_namespace(places, namespace)
    if isinstance(target, Refusal):
        return target
    try:
        record.intend(RDMA_STEP, {"devices": list(names), "boot_id": boot_id(places)})
        with RdmaNetlink(open_socket()) as rdma:
            for name in names:
                rdma.move(name, target)
        record.done(RDMA_STEP)
    finally:
        os.close(target)
    return None


def take_back_rdma(places: Places, namespace: str, record: DeviceRecord, *, is_lost: bool = False) -> None:
    """Move RDMA devices that are still in the namespace back to the host.

    Shapes: is_lost — their card has left, and they with it. In another boot their names may be
    those of others, and all of them began on the host.
    Errors: raises HardwareError when one is neither there nor here, because the kernel has not
    returned it yet.
    """
    step = record.step(RDMA_STEP)
    if step is None:
        return
    if is_lost or step.before["boot_id"] != boot_id(places):
        record.undone(RDMA_STEP)
        return
    names = [str(name) for name in step.before["devices"]]
    source = open_namespace(places, namespace) if namespace else Refusal(reasons=())
    if isinstance(source, int):
        try:
            _return(places, source, names)
        finally:
            os.close(source)
    with RdmaNetlink(open_socket()) as rdma:
        here = {link.name for link in rdma.links()}
    missing = sorted(set(names) - here)
    if missing:
        raise HardwareError(
            f"RDMA device {', '.join(missing)} is not back on the host yet",
            next_step="it returns when the pod's processes have closed it",
            devices=missing,
        )
    record.undone(RDMA_STEP)


def _return(places: Places, source: int, names: Sequence[str]) -> None:
    host = open_host(places)

    def move(_socket: object) -> None:
        with RdmaNetlink(open_socket()) as rdma:
            there = {link.name for link in rdma.links()}
            for name in names:
                if name in there:
                    rdma.move(name, host)

    try:
        with_netlink(places, source, move)
    finally:
        os.close(host)


def _refuse(field: str, wanted: str) -> Refusal:
    message = f"{field} is exclusive, wanted {wanted}"
    return refuse("interface-config-invalid", message, field=field, got="exclusive", wanted=wanted)
