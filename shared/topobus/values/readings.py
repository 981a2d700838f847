"""Readings of a device: what its hardware counts and measures, in plain units, for people who graph
it.

A reading decides nothing: health has its own observations. A quantity that a device does not tell
has no reading, and is never 0.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

__all__ = ["Quantity", "Reading"]


class Quantity(StrEnum):
    """What is read. The value is the end of the metric's name, and has the unit; `_total` counts
    since the device or its driver began.
    """

    UTILIZATION = "utilization_ratio"
    MEMORY_UTILIZATION = "memory_utilization_ratio"
    MEMORY_USED = "memory_used_bytes"
    MEMORY_SIZE = "memory_size_bytes"
    POWER = "power_watts"
    ENERGY = "energy_joules_total"
    TEMPERATURE = "temperature_celsius"
    CLOCK = "clock_hertz"
    RECEIVED = "received_bytes_total"
    SENT = "sent_bytes_total"
    MEMORY_ERRORS = "memory_errors_total"
    LINK_ERRORS = "link_errors_total"
    LINK_DROPS = "link_drops_total"


class Reading(Struct, frozen=True, kw_only=True):
    """One number of one device."""

    quantity: Quantity
    value: float
    part: str = ""
    """Of what, where a quantity has several: `core` or `memory` of a temperature and a clock,
    `pcie`, `nvlink`, `network` or `rdma` of bytes, `corrected` or `uncorrected` of memory errors,
    `received` or `sent` of a link's."""
