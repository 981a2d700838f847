"""An index from devices to their holders, from claims and ledgers.

It also has the amounts in use of shared devices. It is indexed by pool, since a node reaches its
own pools only: the cost of a query does not depend on the claims of other nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from topobus.controller.state.links import Links
from topobus.engine.allocation.values import DeviceId, PoolId
from topobus.engine.claims.attempts import allocation_of
from topobus.engine.claims.lifecycle import owner_of
from topobus.engine.claims.stored import Stored
from topobus.formats.kubernetes.classic.classic_handles import as_structured
from topobus.formats.kubernetes.objects import ATTEMPT_ANNOTATION, metadata_of
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError
from topobus.values.quantity import Quantity

__all__ = ["ClaimHoldings", "Shift"]


class Shift(NamedTuple):
    """The pools that a change of a claim affects."""

    touched: frozenset[PoolId] = frozenset()
    """Pools in which a device was taken or released."""
    freed: frozenset[PoolId] = frozenset()
    """Those in which a device was released."""


@dataclass(frozen=True)
class _Held:
    """What one claim holds."""

    source: ApiObject | None = None
    """The claim that this was read from."""
    uid: str = ""
    holder: str = ""
    devices: frozenset[DeviceId] = frozenset()
    shares: tuple[tuple[DeviceId, tuple[tuple[str, Quantity], ...]], ...] = ()

    @property
    def pools(self) -> frozenset[str]:
        return frozenset(device.pool for device in (*self.devices, *(device for device, _ in self.shares)))


class ClaimHoldings:
    """What all claims hold, by an allocation or an attempt."""

    def __init__(self) -> None:
        self._claims: dict[Hashable, _Held] = {}
        self._pools: Links[Hashable, str] = Links()

    def holds(self, key: Hashable) -> bool:
        """Say whether a claim holds anything."""
        return key in self._claims

    def put(self, key: Hashable, claim: Stored | None) -> Shift:
        """Store a claim, or remove it with None. Returns the pools that this changes.

        A claim that cannot be read holds nothing here, for the ledger has what it holds.
        """
        counted = self._claims.get(key)
        if counted is not None and claim is not None and counted.source is claim.value:
            return Shift()  # assumed before it was written, and written unchanged
        before = self._claims.pop(key, _Held())
        after = _read(claim) if claim is not None else _Held()
        if after.pools:
            self._claims[key] = after
        self._pools.put(key, after.pools)
        shared, still_shared = set(before.shares), set(after.shares)
        freed = [*(before.devices - after.devices), *(device for device, _ in shared - still_shared)]
        taken = [*(after.devices - before.devices), *(device for device, _ in still_shared - shared)]
        gave = frozenset([PoolId(device_id.driver, device_id.pool) for device_id in freed])
        return Shift(gave | frozenset([PoolId(device_id.driver, device_id.pool) for device_id in taken]), gave)

    def holders(self, pools: Iterable[str], *, except_uids: Collection[str]) -> dict[DeviceId, str]:
        """Map devices of these pools to their holders, except for some claims."""
        return {device: held.holder for held in self._others(pools, except_uids) for device in held.devices}

    def consumed(self, pools: Iterable[str], *, except_uids: Collection[str]) -> dict[DeviceId, dict[str, Quantity]]:
        """Add up the shares in use of devices of these pools, except for some claims."""
        quantities: dict[DeviceId, dict[str, Quantity]] = {}
        for held in self._others(pools, except_uids):
            for device, amounts in held.shares:
                used = quantities.setdefault(device, {})
                for name, amount in amounts:
                    used[name] = used.get(name, Quantity(0)) + amount
        return quantities

    def _others(self, pools: Iterable[str], except_uids: Collection[str]) -> list[_Held]:
        keys = {key for pool in pools for key in self._pools.keys_of(pool)}
        return [self._claims[key] for key in sorted(keys, key=str) if self._claims[key].uid not in except_uids]


def _read(stored: Stored) -> _Held:
    try:
        value = as_structured(stored.value)
        if not value.status.get("allocation") and ATTEMPT_ANNOTATION not in metadata_of(value).annotations:
            return _Held()  # most claims that arrive: nothing to read
        # Parsed here and not kept: most claims are never read again, and their parts would keep the
        # garbage collector busy.
        allocation, owner = allocation_of(value), owner_of(value)
        results = allocation.devices.results if allocation is not None else ()
        return _Held(
            stored.value,
            owner.uid,
            str(owner),
            frozenset(
                DeviceId.of(granted) for granted in results if not granted.admin_access and granted.share_id is None
            ),
            tuple(
                (
                    DeviceId.of(granted),
                    tuple((name, Quantity.parse(amount)) for name, amount in sorted(granted.consumed_capacity.items())),
                )
                for granted in results
                if granted.share_id is not None
            ),
        )
    except (ContractError, ValueError):
        return _Held()
