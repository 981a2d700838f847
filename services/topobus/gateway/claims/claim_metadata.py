"""Keeps the files that describe claims' devices to their containers, on a disk that survives a
reboot. Each request has a file, which is replaced as a whole.

A CDI file mounts them into containers. A claim whose files cannot be written is prepared without
them and the failure is logged, because containers can start without this information. At start,
files that belong to no claim are removed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from topobus.devicekit.containers.cdi_files import write
from topobus.formats.containers.cdi import CdiSpec
from topobus.formats.kubernetes.slices import slice_device
from topobus.gateway.claims.rules.claim_allocation import AllocatedDevice
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.claims.rules.device_metadata import DescribedClaim, described_spec, documents, generation_of
from topobus.gateway.disk import DiskWork
from topobus.process.logging import get_logger
from topobus.values.device import Inventory
from topobus.values.dra_names import DRIVER
from topobus.values.names import ClaimUid, is_dns_subdomain
from topobus.values.sandbox import AttachedInterface

__all__ = ["ClaimMetadata"]

# With a claim's uid.
_OURS = re.compile(r"claim_[0-9A-Za-z.-]+")


class ClaimMetadata:
    """The files of all claims of this node."""

    def __init__(
        self,
        folder: Path,
        versions: tuple[str, ...],
        inventories: Callable[[], Mapping[str, Inventory]],
        of_claim: Callable[[ClaimUid], Iterable[ClaimEntry]],
    ) -> None:
        """`versions` to write (empty: no new files), `inventories` as the source of attributes,
        `of_claim` returns the entries of a claim, of which a request may have devices of several.
        """
        self._of_claim = of_claim
        self._folder = folder
        self._versions = versions
        self._inventories = inventories
        self._disk = DiskWork()

    async def restore(self, entries: Iterable[ClaimEntry]) -> None:
        """Write missing files, without attributes where no inventory is known yet, and remove those
        of claims that no longer exist.
        """
        wanted = [entry for entry in entries if entry.has_metadata]
        try:
            await asyncio.to_thread(_remove_others, self._folder, {_name(entry) for entry in wanted})
        except OSError as err:
            get_logger().warning("metadata.unreadable", folder=str(self._folder), error=str(err))
        for entry in wanted:
            await self.mend(entry)

    async def describe(self, entry: ClaimEntry) -> bool:
        """Write the files of a claim that is being prepared. False when it gets none."""
        if not self._versions or not is_dns_subdomain(entry.name):
            return False
        return await self._write(entry, {})

    async def attached(self, entry: ClaimEntry, interfaces: Mapping[str, AttachedInterface]) -> None:
        """Write what the devices became in the pod's sandbox.

        It runs before the sandbox's containers are created, because a container keeps the file with
        which it was created.
        """
        if entry.has_metadata:
            await self._write(entry, interfaces)

    async def mend(self, entry: ClaimEntry) -> None:
        """Write files that were removed, because a container would not start without them."""
        if not entry.has_metadata:
            return
        missing = await asyncio.to_thread(_missing, self.files(entry).values())
        if missing:
            get_logger().warning("metadata.mended", claim_uid=entry.uid, files=missing)
            await self._write(entry, _interfaces(entry))

    async def delete(self, entry: ClaimEntry) -> None:
        """Remove a claim's files.

        Errors: raises OSError.
        """
        if entry.has_metadata:
            await self._disk.do(lambda: asyncio.to_thread(_remove, self._folder / _name(entry)))

    async def finish(self) -> None:
        """Wait until all writes have ended."""
        await self._disk.finish()

    def files(self, entry: ClaimEntry) -> dict[str, str]:
        """Return the paths of a claim's files, by request."""
        return {device.request: str(self._folder / _name(entry) / f"{device.request}.json") for device in entry.devices}

    def described(self, entry: ClaimEntry) -> CdiSpec | None:
        """Return a claim's CDI file with the mounts of its files."""
        if not entry.has_metadata:
            return entry.cdi
        return described_spec(entry.cdi, _claim(entry, entry.devices, {}, {}), entry.device_class, self.files(entry))

    async def _write(self, entry: ClaimEntry, interfaces: Mapping[str, AttachedInterface]) -> bool:
        # A claim that has files keeps them after the setting was changed.
        versions = self._versions or ("v1alpha1",)
        requests = {device.request for device in entry.devices}
        devices = list(entry.devices)
        for other in self._of_claim(entry.uid):
            if other.device_class != entry.device_class:
                devices += [device for device in other.devices if device.request in requests]
                interfaces = {**_interfaces(other), **interfaces}
        claim = _claim(entry, sorted(devices, key=_place), self._attributes(devices), interfaces)
        try:
            await self._disk.do(lambda: asyncio.to_thread(_write_all, self._folder / _name(entry), claim, versions))
        except OSError as err:
            get_logger().warning(
                "metadata.unwritten",
                claim_uid=entry.uid,
                claim=str(entry.claim),
                error=str(err),
                next_step="set metadata.dir",
            )
            return False
        return True

    def _attributes(self, devices: Iterable[AllocatedDevice]) -> dict[str, dict[str, Any]]:
        inventories = self._inventories()
        own_devices = [
            inventory.device(allocated.device)
            for allocated in devices
            if (inventory := inventories.get(allocated.device_class)) is not None
        ]
        return {
            device.name: {
                key: msgspec.to_builtins(attribute) for key, attribute in slice_device(device).attributes.items()
            }
            for device in own_devices
            if device is not None
        }


def _claim(
    entry: ClaimEntry,
    devices: Iterable[AllocatedDevice],
    attributes: Mapping[str, Mapping[str, Any]],
    interfaces: Mapping[str, AttachedInterface],
) -> DescribedClaim:
    return DescribedClaim(
        namespace=entry.namespace,
        name=entry.name,
        uid=entry.uid,
        driver=DRIVER,
        devices=tuple(devices),
        pod_claim_name=entry.pod_claim_name,
        attributes=attributes,
        interfaces=interfaces,
    )


def _place(device: AllocatedDevice) -> tuple[str, str]:
    # The same whichever class writes the file.
    return device.request, device.device_class


def _interfaces(entry: ClaimEntry) -> Mapping[str, AttachedInterface]:
    return entry.attachment.interfaces if entry.attachment is not None else {}


def _write_all(folder: Path, claim: DescribedClaim, versions: tuple[str, ...]) -> None:
    """Write each file whose content has changed. Its generation counts the changes."""
    for request in dict.fromkeys(device.request for device in claim.devices):
        path = folder / f"{request}.json"
        present = path.read_bytes() if path.is_file() else b""
        generation = generation_of(present)
        if generation and documents(claim, versions, {request: generation})[request] == present:
            continue
        write(folder, path.name, documents(claim, versions, {request: generation + 1})[request])


def _missing(paths: Iterable[str]) -> list[str]:
    return [path for path in paths if not Path(path).is_file()]


def _remove(folder: Path) -> None:
    """Remove a claim's folder with its files. A folder that holds anything else stays.

    Errors: raises OSError.
    """
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.suffix in (".json", ".tmp") and path.is_file():
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _remove_others(folder: Path, wanted: Collection[str]) -> None:
    """Remove the folders of claims that no longer exist.

    Only folders with names of our form are removed, because the setting may name a folder that
    other programs use.

    Errors: raises OSError.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if _OURS.fullmatch(path.name) and path.name not in wanted and path.is_dir() and not path.is_symlink():
            _remove(path)


def _name(entry: ClaimEntry) -> str:
    return f"claim_{entry.uid}".replace("/", "-")
