"""The arguments of `prepare` about an owner, and its answer when the work takes longer than a call
may.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from topobus.devicekit.device_record import DeviceRecord, RecordState
from topobus.values.edits import ContainerEdits
from topobus.values.idset import CpuSet
from topobus.values.outcome import Refusal
from topobus.values.request import Owner

__all__ = ["LongWork", "PrepareContext"]


class PrepareContext(Struct, frozen=True, kw_only=True):
    """The owner of the devices, with its opaque configuration (class configs before
    claim configs).
    """

    owner: Owner
    config: tuple[dict[str, Any], ...] = ()
    """For all devices, unless `device_config` has another one for a device."""
    device_config: dict[str, tuple[dict[str, Any], ...]] = {}
    """By device, where a claim configures single requests; a device that is not named here has
    `config`."""
    records: Mapping[str, DeviceRecord] = MappingProxyType({})
    """By device: where `prepare` writes down what it changes, for `unprepare` to undo, also after a
    crash. A driver that changes nothing leaves it alone."""

    attached: frozenset[str] = frozenset()
    """Those of the devices that this owner has in a sandbox already: kubelet asks again for pods
    that run, and what left the host then is not gone."""
    free: frozenset[str] = frozenset()
    """Those of the devices that had no owner when this owner came, by the journal: what is there
    now was there before."""
    looked_at: frozenset[str] = frozenset()
    """Those of the devices that this owner only looks at (admin access): others may have them,
    by a claim or a device plugin."""
    cpus: Mapping[str, CpuSet] = MappingProxyType({})
    """Which CPUs the owner has of devices that are groups of CPUs; class `cpu` alone has some."""
    shares: Mapping[str, Mapping[str, int]] = MappingProxyType({})
    """How much the owner has of devices that it shares: device to capacity to amount. Without
    devices that it has whole; empty in `unprepare`."""
    others: Mapping[str, tuple[RecordState, ...]] = MappingProxyType({})
    """By device: the journal's entries of all other owners that have it
    now; none for the last one."""
    in_use: Callable[[], frozenset[str]] = frozenset
    """The devices of the class that have an owner by the journal at the moment of the call,
    including those that are still to be cleaned, without those of this request that are only this
    owner's. A driver that partitions a card calls it with the card's lock held, after it has
    written its own intent."""

    def config_of(self, device: str) -> tuple[dict[str, Any], ...]:
        """Give one device's configuration."""
        return self.device_config.get(device, self.config)


class LongWork(Struct, frozen=True, kw_only=True):
    """An answer of `prepare` in place of edits, for work that takes longer than a call may."""

    limit_s: float
    """Seconds after which it is refused, however far it is."""
    what: str
    """For people: `programming the region of fpga-0`."""
    work: Callable[[], Mapping[str, ContainerEdits] | Refusal]
    """Runs in a thread of its own, beside the driver's other methods, and answers as `prepare`
    does. It writes into `context.records`."""
