"""Observes a node from the outside: every revision of its ledger, its CDI files, and the answers to
clients.

It reads the ledger by a connection of its own that no fault affects. Each client reports what it
was given and when it began to give it back. The result is the violations. It knows no more of the
product than its formats.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lab.chaos.ledger_objects import double_holdings, held_by_owner
from topobus.bus.bus import Bus, ChangeKind
from topobus.formats.messages.catalogue import LEDGER
from topobus.values.errors import PeerUnavailable
from topobus.values.ledger import Holders
from topobus.values.request import OwnerKind

__all__ = ["Grant", "NodeObserver", "cdi_devices", "named_devices"]

_LOOK_S = 0.1
_NAMED = re.compile(r"^TOPOBUS_(?:GPU|NIC|FPGA|CPU)_DEVICES=(.*)$")


@dataclass(eq=False)
class Grant:
    """What a client was given: `name` for people, `kind` and `key` as the ledger names its owner
    (an allocation of kubelet's is known by its devices).
    """

    name: str
    kind: OwnerKind
    key: str
    devices: frozenset[str]
    has_cdi_file: bool = True
    """Whether a claim's CDI file names its devices: not where no kubelet asked for it."""
    told_at: tuple[int, int] | None = None
    """Epoch and sequence of a ledger that was read after the client's answer. None while it has not
    been read."""


@dataclass
class NodeObserver:
    """Checks what must hold at every moment.

    The first violations are kept, with the time when they were seen.
    """

    bus: Bus
    node: str
    cdi_dir: Path
    violations: list[str] = field(default_factory=list)
    revisions: int = 0
    epochs: set[int] = field(default_factory=set)
    grants: set[Grant] = field(default_factory=set)
    granted: int = 0
    is_store_put_back: bool = False
    """While this is set, the store shows an earlier time."""

    @asynccontextmanager
    async def observing(self) -> AsyncIterator[None]:
        """Observe until the block ends."""
        observing = asyncio.create_task(self.run())
        try:
            yield
        finally:
            observing.cancel()
            await asyncio.gather(observing, return_exceptions=True)

    async def run(self) -> None:
        """Observe until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_ledger())
            group.create_task(self._look_at_files())

    async def grant(self, grant: Grant) -> None:
        """Record that a client was given these devices. No other client may have them, and the
        ledger must show the same from now on.
        """
        for other in self.grants:
            if both := other.devices & grant.devices:
                self._tell(f"{grant.name} was given {', '.join(sorted(both))}, which {other.name} has")
        self.grants.add(grant)
        self.granted += 1
        if not self.is_store_put_back:
            ledger = await self.read()
            if grant in self.grants and not self.is_store_put_back:
                grant.told_at = (ledger.epoch, ledger.sequence)
                self._check_kept(grant, ledger)

    async def is_held(self, grant: Grant) -> bool:
        """Return whether the ledger has what a client is about to be noted with."""
        return grant.devices <= _held(await self.read(), grant)

    def give_back(self, grant: Grant) -> None:
        """Record that a client is about to give back what it has."""
        self.grants.discard(grant)

    async def store_is_put_back(self) -> tuple[int, int]:
        """Record that the store is about to show an earlier time. Returns what it shows now."""
        ledger = await self.read()
        self.is_store_put_back = True
        return ledger.epoch, ledger.sequence

    async def until_written_back(self, before: tuple[int, int], limit_s: float) -> None:
        """Wait until the ledger is as new again as it was before, and check that it has everything
        that clients were given.
        """
        try:
            async with asyncio.timeout(limit_s):
                ledger = await self.read()
                while (ledger.epoch, ledger.sequence) < before:
                    await asyncio.sleep(_LOOK_S)
                    ledger = await self.read()
        except TimeoutError:
            self._tell(f"the ledger is not written back {limit_s:g} s after the store was put back to an earlier time")
            return
        self.is_store_put_back = False
        for grant in tuple(self.grants):
            grant.told_at = grant.told_at or (ledger.epoch, ledger.sequence)
            self._check_kept(grant, ledger)

    def ledger_is_lost(self) -> None:
        """Record that topology is about to start from an older ledger, which proves nothing until
        `until_recovered`.
        """
        self.is_store_put_back = True
        for grant in self.grants:
            grant.told_at = None

    async def until_recovered(self, limit_s: float) -> int:
        """Wait until a ledger that starts from an older copy has again everything that kubelet or
        the gateway knows.

        Returns how many placed pods it has lost for good. kubelet knows what it lists, and the
        gateway what it has prepared. Of a pod that `place` placed since the copy, only the ledger
        knew.
        """
        recoverable = [grant for grant in self.grants if grant.kind is not OwnerKind.POD]
        ledger = await self.read()
        try:
            async with asyncio.timeout(limit_s):
                while any(grant.devices - _held(ledger, grant) for grant in recoverable):
                    await asyncio.sleep(_LOOK_S)
                    ledger = await self.read()
        except TimeoutError:
            lacking = sorted(
                f"{grant.name}: {' '.join(sorted(missing))}"
                for grant in recoverable
                if (missing := grant.devices - _held(ledger, grant))
            )
            self._tell(
                f"{limit_s:g} s after topology began from an older ledger, it does not have {'; '.join(lacking)}"
            )
        lost = [grant for grant in self.grants if grant.kind is OwnerKind.POD and grant.devices - _held(ledger, grant)]
        self.grants.difference_update(lost)
        self.is_store_put_back = False
        for grant in self.grants:
            grant.told_at = (ledger.epoch, ledger.sequence)
        return len(lost)

    async def is_gone(self, key: str) -> bool:
        """Say whether an owner no longer holds anything.

        False while the store shows an earlier time: the ledger that the service writes back may
        have the owner.
        """
        was_put_back = self.is_store_put_back
        ledger = await self.read()
        return not was_put_back and not self.is_store_put_back and key not in ledger.allocations

    async def differences(self) -> list[str]:
        """Compare the ledger and the CDI files with what clients have now."""
        grants = set(self.grants)
        ledger = await self.read()
        held = held_by_owner(ledger)
        by_plugin = {key for key in held if ledger.allocations[key].owner.kind is OwnerKind.DEVICE_PLUGIN}
        named = {key: each.devices for key, each in held.items() if key not in by_plugin}
        wanted = {grant.key: grant.devices for grant in grants if grant.kind is not OwnerKind.DEVICE_PLUGIN}
        problems: list[str] = []
        if named != wanted:
            problems.append(f"the ledger has {_listed(named)}, wanted {_listed(wanted)}")
        plugin = frozenset(name for key in by_plugin for name in held[key].devices)
        wanted_plugin = frozenset(
            name for grant in grants if grant.kind is OwnerKind.DEVICE_PLUGIN for name in grant.devices
        )
        if plugin != wanted_plugin:
            problems.append(f"the ledger has {sorted(plugin)} as kubelet's, wanted {sorted(wanted_plugin)}")
        files = await asyncio.to_thread(cdi_devices, self.cdi_dir)
        claims = {
            grant.key.rpartition("/")[2]: grant.devices
            for grant in grants
            if grant.kind is OwnerKind.CLAIM and grant.has_cdi_file
        }
        if files != claims:
            problems.append(f"CDI files give {_listed(files)}, wanted {_listed(claims)}")
        return problems

    async def read(self) -> Holders:
        """Read the ledger past all faults, as soon as the server is alive.

        After a restore of the store, it lacks what the node's service is about to write back.
        """
        while True:
            try:
                entry = await self.bus.get(LEDGER.read_as(Holders), node=self.node)
            except PeerUnavailable:
                await asyncio.sleep(_LOOK_S)
                continue
            return entry.value if entry is not None else Holders(node=self.node, epoch=0)

    async def _follow_ledger(self) -> None:
        async with aclosing(self.bus.watch(LEDGER.read_as(Holders), node=self.node)) as changes:
            async for change in changes:
                if change.kind is not ChangeKind.PUT or change.value is None:
                    continue
                ledger = change.value
                self.revisions += 1
                self.epochs.add(ledger.epoch)
                for double in double_holdings(ledger):
                    self._tell(f"epoch {ledger.epoch}, sequence {ledger.sequence} of the ledger: {double}")
                for grant in tuple(self.grants):
                    self._check_kept(grant, ledger)

    def _check_kept(self, grant: Grant, ledger: Holders) -> None:
        """Check that a later ledger has what was acknowledged.

        A value of an earlier time (the store was restored) does not count, as it will be
        overwritten.
        """
        if grant.told_at is None or (ledger.epoch, ledger.sequence) < grant.told_at:
            return
        if missing := grant.devices - _held(ledger, grant):
            self._tell(
                f"{grant.name} was granted {', '.join(sorted(missing))} at epoch {grant.told_at[0]}, "
                f"sequence {grant.told_at[1]}: gone at epoch {ledger.epoch}, sequence {ledger.sequence}"
            )

    async def _look_at_files(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            holders: dict[str, str] = {}
            for uid, devices in (await asyncio.to_thread(cdi_devices, self.cdi_dir)).items():
                for device in devices:
                    if device in holders:
                        self._tell(f"the CDI files of claims {holders[device]} and {uid} both have {device}")
                    holders[device] = uid

    def _tell(self, what: str) -> None:
        if what not in self.violations and len(self.violations) < 20:
            self.violations.append(what)


def _held(ledger: Holders, grant: Grant) -> frozenset[str]:
    """Return what the client has by the ledger.

    kubelet's Allocate names no pod, so all its owners count as one.
    """
    held = held_by_owner(ledger)
    if grant.kind is not OwnerKind.DEVICE_PLUGIN:
        return held[grant.key].devices if grant.key in held else frozenset()
    keys = [key for key, allocation in ledger.allocations.items() if allocation.owner.kind is OwnerKind.DEVICE_PLUGIN]
    return frozenset(name for key in keys for name in held[key].devices)


def cdi_devices(folder: Path) -> dict[str, frozenset[str]]:
    """Read which devices the CDI files of each claim offer: claim uid to device names.

    A file that disappears meanwhile is ignored.
    """
    claims: dict[str, set[str]] = {}
    for file in sorted(folder.glob("*.json")):
        try:
            spec = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError):
            # The file is being replaced. One that stays unreadable is noticed at the end, when
            # files are compared with claims.
            continue
        uid = file.stem.rpartition("_")[2]
        edits = [
            spec.get("containerEdits", {}),
            *(device.get("containerEdits", {}) for device in spec.get("devices", ())),
        ]
        for edit in edits:
            if devices := named_devices(edit.get("env", ())):
                claims.setdefault(uid, set()).update(devices)
    return {uid: frozenset(devices) for uid, devices in claims.items()}


def named_devices(variables: Iterable[str]) -> frozenset[str]:
    """Read which devices a container's variables name.

    >>> sorted(named_devices(["TOPOBUS_GPU_DEVICES=gpu-0,gpu-1", "TOPOBUS_GPU_0_DEVICES=gpu-9"]))
    ['gpu-0', 'gpu-1']
    """
    matches = (_NAMED.match(variable) for variable in variables)
    return frozenset(name for match in matches if match for name in match[1].split(",") if name)


def _listed(devices: dict[str, frozenset[str]]) -> str:
    return ", ".join(f"{key}: {' '.join(sorted(names))}" for key, names in sorted(devices.items())) or "nothing"
