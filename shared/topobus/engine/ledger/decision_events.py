"""Decisions as values: their ids, and the events that report them.

A decision's id is a hash of its inputs. A retry after a crash therefore computes the same
id, and the event goes out once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from topobus.formats.messages.messages import DecisionEvent
from topobus.values.device_sharing import HeldShare
from topobus.values.ledger import Ledger, OperationRecord
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, PodRequest

__all__ = ["decision_id", "event_of", "request_of_devices"]


def decision_id(ledger: Ledger, op_id: str, *, is_dry_run: bool = False) -> str:
    """Make the id of the decision that is about to be made on this ledger.

    >>> decision_id(Ledger(node="n1"), "op-1") == decision_id(Ledger(node="n1"), "op-1")
    True
    """
    parts = (ledger.node, str(ledger.epoch), str(ledger.sequence), op_id, "dry-run" if is_dry_run else "")
    return "d-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def event_of(node: str, op_id: str, record: OperationRecord) -> DecisionEvent | None:
    """Make the event of a stored operation.

    None when it was announced and its inputs are dropped.
    """
    pending = record.pending
    if pending is None:
        return None
    return DecisionEvent(
        id=record.decision_id,
        verb=record.verb,
        node=node,
        op_id=op_id,
        time=pending.time,
        owner=pending.owner,
        request=pending.request,
        view=pending.view,
        outcome=record.outcome,
        ledger_sequence=pending.ledger_sequence,
        user=pending.user,
        operation=pending.operation,
        health=pending.health,
    )


def request_of_devices(
    owner: Owner,
    devices: Mapping[str, tuple[str, ...]],
    shared: Mapping[str, tuple[str, ...]],
    shares: Mapping[str, Mapping[str, HeldShare]],
    *,
    is_shared: bool,
) -> PodRequest:
    """Write an adoption as a request, so that its event shows the adopted devices: whole ones, and
    how much of shared ones.
    """
    wanted: list[DeviceRequest] = []
    for device_class, names in sorted(devices.items()):
        parts = tuple(name for name in names if name in shared.get(device_class, ()))
        whole = tuple(name for name in names if name not in parts)
        if whole or not parts:
            wanted.append(DeviceRequest(device_class=device_class, count=len(whole), names=whole, is_shared=is_shared))
        if parts:
            amounts = {
                name: share.amounts for name, share in sorted(shares.get(device_class, {}).items()) if name in parts
            }
            wanted.append(
                DeviceRequest(device_class=device_class, count=len(parts), names=parts, by_share=True, amounts=amounts)
            )
    return PodRequest(owner=owner, containers=(ContainerRequest(name="", devices=tuple(wanted)),))
