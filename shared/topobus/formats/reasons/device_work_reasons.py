"""Reason codes of work on single devices: refusals to an operator."""

from __future__ import annotations

from topobus.formats.reasons.reason_values import ReasonGroup, ReasonSection

__all__ = ["DEVICE_WORK_SECTION"]

DEVICE_WORK_SECTION = ReasonSection(
    title="Work on single devices",
    before="By topology and the device services, to an operator (`topobus device`); [operate a "
    "device](../how-to/operate-a-device.md).",
    groups=(
        ReasonGroup(
            ("device-held",),
            "the device, or a part of it that a reset would take along, is held or prepared; names the holders",
            ("device", "owners"),
        ),
        ReasonGroup(("not-ours",), "the class is served by somebody else's device plugin", ("resource",)),
        ReasonGroup(
            ("reset-unsupported",), "neither the device's driver nor the kernel can reset it", ("device", "driver")
        ),
        ReasonGroup(("reset-failed",), "the kernel refused to reset the PCI function", ("device", "error")),
    ),
)
