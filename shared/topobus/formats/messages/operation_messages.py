"""The messages by which an operator works on single devices: requested from a node's topology,
performed by the class's device service, and the state that remains.
"""

from __future__ import annotations

from msgspec import Struct

from topobus.values.health import DeviceHealth
from topobus.values.maintenance import DeviceOperation, Maintenance
from topobus.values.outcome import Refusal
from topobus.values.verdict import KeptVerdict

__all__ = [
    "ClassMaintenance",
    "OperateReply",
    "OperateRequest",
    "Operated",
    "PerformReply",
    "PerformRequest",
    "PerformedOperation",
]


class Operated(Struct, frozen=True, kw_only=True, tag="operated", tag_field="outcome"):
    """The operation is done, and its effect is published."""

    health: DeviceHealth
    """The device's health afterwards."""
    maintenance: Maintenance | None = None
    """The operator's maintenance that applies now; None: the device is offered."""
    is_changed: bool = True
    """False: it was so before."""


class OperateRequest(Struct, frozen=True, kw_only=True):
    """Perform an operation on one device of this node."""

    op_id: str
    operation: DeviceOperation


class OperateReply(Struct, frozen=True, kw_only=True):
    """The outcome. The operation is done once for one op_id."""

    decision_id: str
    node: str
    result: Operated | Refusal


class PerformRequest(Struct, frozen=True, kw_only=True):
    """Perform an operation that is already decided and whose decision event cannot be lost any
    more.
    """

    op_id: str
    operation: DeviceOperation
    time: str
    """RFC 3339, UTC: when it was decided."""


class PerformReply(Struct, frozen=True, kw_only=True):
    """The answer, the same for the same op_id once it is done.

    A refusal is not kept: the same operation may succeed later.
    """

    result: Operated | Refusal


class PerformedOperation(Struct, frozen=True, kw_only=True):
    """One operation with its answer, for a repeated request."""

    op_id: str
    operation: DeviceOperation
    time: str
    result: Operated


class ClassMaintenance(Struct, frozen=True, kw_only=True):
    """The maintenance that an operator requested for the devices of one class on one node, and the
    verdicts of others on them.

    It outlives the device service, and devices that leave.
    """

    node: str
    device_class: str
    devices: dict[str, Maintenance] = {}
    """By device, also of one that is not there now."""
    operations: tuple[PerformedOperation, ...] = ()
    """The newest that were done, oldest first."""
    verdicts: tuple[KeptVerdict, ...] = ()
    """The newest of each source, device and dimension."""
