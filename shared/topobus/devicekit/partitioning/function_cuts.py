"""Makes virtual functions when a claim gets one of them, and removes them for a request that wants
the physical one.

The kernel changes their number only by way of 0, which removes all of them. So functions are made
where there are none, and removed for a request of the physical function, or when the last is
deallocated.

A crash leaves nothing to repair: the kernel ends a write of sriov_numvfs as a whole, so the
functions exist or not, and both are offered.
Source: Documentation/PCI/pci-iov-howto.rst; sriov_numvfs, sriov_offset, sriov_stride,
sriov_vf_device in Documentation/ABI/testing/sysfs-bus-pci.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, structs

from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.partitioning.card_cuts import PART, SETTLE_S, CardCuts
from topobus.devicekit.pauses import look_until
from topobus.devicekit.prepare_context import PrepareContext
from topobus.process.logging import get_logger
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.machine import Machine, PciDevice
from topobus.values.outcome import Refusal, refuse
from topobus.values.pci import PciAddress

__all__ = ["CUT_LIMIT_S", "FunctionCuts", "FunctionWish", "planned_functions"]

_COUNT = "functions"
"""Step: the number of virtual functions is being changed."""
CUT_LIMIT_S = 2 * SETTLE_S
"""Seconds that one card takes at most: a wait for its lock, and one for its functions."""


class FunctionWish(Struct, frozen=True, kw_only=True):
    """The state of one physical function that a request needs."""

    name: str
    """The device of the physical function."""
    parts: tuple[tuple[PciAddress, str], ...]
    """Its virtual functions with their devices, in the kernel's order, as many as the operator
    wants."""
    is_whole: bool
    devices: tuple[str, ...]
    removes: bool = False
    """Whether the functions go when the last of them is given back."""

    @property
    def own_parts(self) -> tuple[PciAddress, ...]:
        """The virtual functions that the request wants."""
        return tuple(part for part, device in self.parts if device in self.devices)

    @property
    def count(self) -> int:
        """How many virtual functions there must be."""
        return 0 if self.is_whole else len(self.parts)


class FunctionCuts(CardCuts[FunctionWish]):
    """The physical functions of one driver."""

    def __init__(
        self,
        users: Callable[[Tree, PciAddress, Sequence[PciAddress]], Sequence[str]],
        is_ready: Callable[[Tree, PciAddress], str],
    ) -> None:
        """Keep the checks of this class's functions.

        Shapes: users — returns, for people, the users of a physical function, or of one of its
        virtual ones, besides owners of ours; is_ready — returns what a virtual function still
        lacks, or nothing.
        """
        super().__init__()
        self._users = users
        self._is_ready = is_ready

    def are_as_wanted(self, tree: Tree, wishes: Mapping[PciAddress, FunctionWish]) -> bool:
        """Return whether the functions exist, and those of the request are ready."""
        return not any(self._lacks(tree, address, wish, wish.own_parts) for address, wish in wishes.items())

    def describe(self, address: PciAddress, wish: FunctionWish) -> str:
        """Describe the number of functions that there must be."""
        return f"{address} with {wish.count} virtual functions"

    def undo(
        self,
        tree: Tree,
        address: PciAddress,
        wish: FunctionWish,
        record: DeviceRecord,
        in_use: Callable[[], frozenset[str]],
    ) -> None:
        """Remove an owner. With the last owner of a card the functions are removed, if the wish
        asks for that.

        Errors: raises HardwareError while the card is being changed for another owner.
        """
        part = record.step(PART)
        if part is not None and part.is_done and wish.removes and not wish.is_whole:
            with self.turn_to_undo(address):
                self._remove(tree, address, wish, in_use())
        self.forget(record)

    def forget(self, record: DeviceRecord) -> None:
        """Remove an owner whose card is not cut on demand any more."""
        record.undone(_COUNT)
        record.undone(PART)

    def bring(self, tree: Tree, address: PciAddress, wish: FunctionWish, context: PrepareContext) -> Refusal | None:
        """Make the functions, or remove them."""
        present = _present(tree, address)
        if present != wish.count:
            if present and not wish.is_whole:
                text = (
                    f"{address} has {present} virtual functions by now, and {wish.devices[0]} was one of "
                    f"{wish.count}; ask again when the inventory shows them"
                )
                return refuse("device-not-offered", text, devices=wish.devices)
            refusal = self._refuse_users(tree, address, wish, present, context.in_use())
            if refusal is not None:
                return refusal
            record = context.records.get(wish.devices[0], DeviceRecord())
            record.intend(_COUNT, {"count": present, "to": wish.count})
            with self.locks.changing(address):
                refusal = self._write(tree, address, wish.count) or self._settle(
                    tree, address, wish, [part for part, _ in wish.parts]
                )
            if refusal is None:
                record.done(_COUNT)
            return refusal
        return self._settle(tree, address, wish, wish.own_parts)

    def _refuse_users(
        self, tree: Tree, address: PciAddress, wish: FunctionWish, present: int, in_use: frozenset[str]
    ) -> Refusal | None:
        # The owner of another virtual function does not conflict with a request for one: after a
        # reboot all of them find the card without any.
        siblings = {device for _, device in wish.parts} if wish.is_whole else set()
        rivals = tuple(sorted(in_use & ({wish.name} | siblings) - set(wish.devices)))
        users = tuple(self._users(tree, address, _virtual(tree, address))) if not rivals else ()
        if not rivals and not users:
            return None
        why = f"{', '.join(rivals)} is held" if rivals else "; ".join(users)
        text = f"{address} has {present} virtual functions and needs {wish.count}, but is in use: {why}"
        return refuse("card-in-use", text, address=str(address), devices=rivals, users=users)

    def _settle(
        self, tree: Tree, address: PciAddress, wish: FunctionWish, parts: Sequence[PciAddress]
    ) -> Refusal | None:
        """Wait until these functions are ready.

        A sibling that does not get ready in time does not matter.
        """
        lacks = look_until(lambda: _done(self._lacks(tree, address, wish, parts)), self.pauses, SETTLE_S)
        if isinstance(lacks, str) and (own := self._lacks(tree, address, wish, wish.own_parts)):
            text = f"{address}: {own} after {SETTLE_S:g} s; the claim can be asked for again"
            return refuse("functions-unsettled", text, address=str(address), wanted=wish.count)
        return None

    def _write(self, tree: Tree, address: PciAddress, wanted: int) -> Refusal | None:
        try:
            self.write(tree.path(f"{pci_folder(address)}/sriov_numvfs"), str(wanted))
        except OSError as err:
            text = f"the driver of {address} does not make {wanted} virtual functions: {err.strerror}"
            return refuse("functions-refused", text, address=str(address), wanted=wanted, error=err.errno or 0)
        return None

    def _remove(self, tree: Tree, address: PciAddress, wish: FunctionWish, in_use: frozenset[str]) -> None:
        """Remove the functions, if none has a user.

        Where that fails they stay, and the next claim finds them.
        """
        present = _present(tree, address)
        if not present or in_use & ({wish.name} | {device for _, device in wish.parts}):
            return
        users = self._users(tree, address, _virtual(tree, address))
        with self.locks.changing(address):
            refusal = None if users else self._write(tree, address, 0)
        if users or refusal is not None:
            why = "; ".join(users) if refusal is None else refusal.reasons[0].message
            get_logger().warning(
                "functions.kept", address=str(address), why=why, next_step="nothing: the next claim finds them"
            )

    def _lacks(self, tree: Tree, address: PciAddress, wish: FunctionWish, parts: Sequence[PciAddress]) -> str:
        """Describe what a physical function lacks to be as wanted, with these of its virtual ones
        ready.

        Empty when it lacks nothing.
        """
        fresh = Tree(tree.settings)
        try:
            present, virtual = _present(fresh, address), _virtual(fresh, address)
            if present != wish.count or len(virtual) != present:
                return f"it has {len(virtual)} of {wish.count} virtual functions"
            wanted = [part for part, _ in wish.parts] if not wish.is_whole else []
            if virtual != wanted:
                return (
                    f"its virtual functions are {', '.join(map(str, virtual))}, expected were "
                    f"{', '.join(map(str, wanted))}"
                )
            return next((f"{part}: {why}" for part in parts if (why := self._is_ready(fresh, part))), "")
        except HardwareError as err:
            return err.message


def planned_functions(tree: Tree, machine: Machine, physical: PciDevice, count: int) -> tuple[PciDevice, ...]:
    """Return the virtual functions that a physical one has, or would have, as discovery would
    describe them.

    Empty where the kernel does not show their addresses.

    Errors: raises HardwareError for a file that holds no number.
    """
    folder = pci_folder(physical.address)
    by_address = {device.address: device for device in machine.pci_devices}
    # A number that another program has set stays until the physical function is requested, because
    # a function may have a holder that we do not know.
    addresses = _virtual(tree, physical.address)
    if not addresses:
        offset, stride = tree.read_int(f"{folder}/sriov_offset"), tree.read_int(f"{folder}/sriov_stride")
        if not offset or (not stride and count > 1):
            return ()
        addresses = [_routed(physical.address, offset + index * (stride or 0)) for index in range(count)]
    kind = tree.read_int(f"{folder}/sriov_vf_device", 16)
    return tuple(
        by_address.get(address)
        or structs.replace(
            physical,
            address=address,
            device=physical.device if kind is None else kind,
            physfn=physical.address,
            driver="",
            iommu_group=None,
        )
        for address in addresses
    )


def _routed(physical: PciAddress, distance: int) -> PciAddress:
    """Find the function at a distance of routing ids: 8 bits of bus, 5 of device, 3 of function.

    >>> str(_routed(PciAddress.parse("0000:3b:00.0"), 17))
    '0000:3b:02.1'
    """
    number = (physical.bus << 8 | physical.device << 3 | physical.function) + distance
    return PciAddress(physical.domain, number >> 8 & 0xFF, number >> 3 & 0x1F, number & 0x7)


def _present(tree: Tree, address: PciAddress) -> int:
    return Tree(tree.settings).read_int(f"{pci_folder(address)}/sriov_numvfs") or 0


def _virtual(tree: Tree, address: PciAddress) -> list[PciAddress]:
    """List the virtual functions that are there, in the kernel's order."""
    folder = pci_folder(address)
    names = [
        name
        for name in Tree(tree.settings).names(folder)
        if name.startswith("virtfn") and name.removeprefix("virtfn").isdecimal()
    ]
    links = [
        Tree(tree.settings).link_name(f"{folder}/{name}") for name in sorted(names, key=lambda name: int(name[6:]))
    ]
    # A function that went away between the two looks is left out.
    return [PciAddress.parse(link) for link in links if link]


def _done(lacks: str) -> tuple[bool | None, str]:
    return (None, lacks) if lacks else (True, "")
