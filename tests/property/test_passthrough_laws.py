"""Laws of passthrough: over any history of claims, kills and drivers that others flip, no function
is offered or given as what it is not, and each ends as it was before its claim.

A service dies in the middle of its writes, the journal's or the kernel's; from then on nothing that
it does reaches the machine, and the next one starts. In between another program gives idle
functions to VFIO, to nobody, or back.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.kernel_writes import KernelWrites
from support.laws import examples
from support.mortal_journal import Fate, MortalJournal
from support.passthrough_bench import (
    ALLOWED,
    BUS,
    FIRST,
    FOURTH,
    GROUPS,
    OTHER,
    OWNER,
    SECOND,
    THIRD,
    PassthroughBench,
    codes,
    nodes_of,
)
from topobus.devicekit.passthrough.function_switch import FunctionSwitch
from topobus.formats.messages.messages import Prepared
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import DeviceRole
from topobus.values.outcome import Refusal
from topobus.values.request import Owner

OWNERS = (OWNER, OTHER)
SETS = ((FIRST,), (SECOND,), (FIRST, SECOND), (THIRD,), (THIRD, FOURTH), (FIRST, THIRD, FOURTH))
VFIO, NATIVE, NOBODY = "vfio-pci", "own", ""
# More writes than any verb has: then it does not die.
_LATE = 60
_NEVER = 1_000_000

Act = tuple[Any, ...]
takes = st.tuples(st.just("take"), st.sampled_from(OWNERS), st.sampled_from(SETS), st.integers(1, _LATE))
uses = st.tuples(st.just("use"), st.sampled_from(OWNERS), st.sampled_from([(address,) for address in GROUPS]))
leaves = st.tuples(st.just("leave"), st.sampled_from(OWNERS), st.integers(1, _LATE))
flips = st.tuples(st.just("flip"), st.sampled_from(sorted(GROUPS)), st.sampled_from([VFIO, NATIVE, NATIVE, NOBODY]))


class _History:
    """Four functions, who has them by a model, and the services that come and go."""

    def __init__(self, root: Path, kernel: KernelWrites, device_class: str, fates: dict[int, Fate]) -> None:
        self.bench = PassthroughBench(root, kernel, device_class)
        self.fates = fates
        self._settings: list[HardwareSettings] = []
        self.bench.passthrough = msgspec.structs.replace(ALLOWED, idle_s=0.5)
        self.held: dict[Owner, set[str]] = {owner: set() for owner in OWNERS}
        """What each owner has, or may have after a death."""
        self.expected = dict.fromkeys(GROUPS, self.bench.own_driver)
        """By function: who had it when nobody had claimed it."""
        self.deaths = 0

    async def run(self, acts: list[Act]) -> None:
        """Play a history, and let everybody go at its end."""
        for act in [*acts, *(("leave", owner, _NEVER) for owner in OWNERS)]:
            await self._act(act)
            await self._check()
        held = self.bench.held_by()
        assert held == self.expected
        assert all(
            self.bench.journal_of(address) is None or not self.bench.journal_of(address)["owners"] for address in GROUPS
        )  # type: ignore[index]

    async def _act(self, act: Act) -> None:
        if act[0] == "flip":
            self._flip(act[1], act[2])
            return
        self.bench.look()
        fate = self._new_life(act[-1] if act[0] != "use" else _NEVER)
        async with self.bench.life(journal=MortalJournal(self.bench.journal_folder, fate)):
            owner = act[1]
            if act[0] == "leave":
                refusal = (
                    await self.bench.unprepare(*sorted(self.held[owner]), owner=owner) if self.held[owner] else None
                )
                assert refusal is None or fate.is_dead
                self.held[owner] = self.held[owner] if fate.is_dead else set()
            else:
                await self._take(owner, act[2], fate, is_machine=act[0] == "take")
            self.deaths += fate.end()
        # What was written before the death, the kernel does.
        self.bench.kernel.settle()

    def _new_life(self, left: int) -> Fate:
        """Give the next process its fate.

        The settings of its tree tell the kernel's writers whose they are.
        """
        settings = HardwareSettings(root=str(self.bench.root))
        self._settings.append(settings)
        self.bench.tree = Tree(settings)
        fate = self.fates[id(settings)] = Fate(left)
        return fate

    async def _take(self, owner: Owner, addresses: tuple[str, ...], fate: Fate, *, is_machine: bool) -> None:
        others = {address for other in OWNERS if other != owner for address in self.held[other]}
        if set(addresses) & (others | self.held[owner]):
            # The ledger gives nothing twice; and what one has one does not ask for in another way.
            return
        if any(self.bench.name(address) not in self.bench.devices for address in addresses):
            return
        result = await (
            self.bench.prepare(*addresses, owner=owner)
            if is_machine
            else self.bench.prepare(*addresses, owner=owner, config=None)
        )
        # Nobody uses a function in these histories.
        assert codes(result) != ["passthrough-busy"], result
        if isinstance(result, Prepared):
            self._check_nodes(result, addresses, is_machine=is_machine)
        if isinstance(result, Prepared) or fate.is_dead:
            self.held[owner] |= set(addresses)

    def _check_nodes(self, prepared: Prepared, addresses: tuple[str, ...], *, is_machine: bool) -> None:
        held = self.bench.held_by()
        has_groups = {f"/dev/vfio/{GROUPS[address]}" for address in addresses} <= set(nodes_of(prepared))
        roles = {self.bench.devices[self.bench.name(address)].role for address in addresses}
        if is_machine:
            assert has_groups
            assert {held[address] for address in addresses} == {VFIO}
        else:
            # A NIC that its operator gave to VFIO is offered as that, and given as that.
            assert has_groups is (roles == {DeviceRole.PASSTHROUGH})
            assert ({held[address] for address in addresses} == {VFIO}) is has_groups

    async def _check(self) -> None:
        """What a service offers now, and gives to a stranger, is what the function is."""
        held = self.bench.held_by()
        offered = {
            device.name: device
            for device in self.bench.driver.discover(Tree(self.bench.tree.settings), self.bench.machine).devices
        }
        for address, driver in held.items():
            device = offered.get(self.bench.name(address))
            if driver == VFIO:
                assert device is None or device.role is DeviceRole.PASSTHROUGH
            else:
                assert device is not None
                assert device.role is DeviceRole.COMPUTE

    def _flip(self, address: str, driver: str) -> None:
        """Let another program give an idle function to somebody else."""
        if any(address in addresses for addresses in self.held.values()):
            return
        wanted = self.bench.own_driver if driver == NATIVE else driver
        present = self.bench.drivers.driver_of(address)
        folder = f"devices/{address}"
        self._write("\n" if driver != VFIO else VFIO, f"{folder}/driver_override")
        if present and present != wanted:
            self._write(address, f"drivers/{present}/unbind")
        if wanted and present != wanted:
            self._write(address, f"drivers/{wanted}/bind")
        self.expected[address] = wanted

    def _write(self, text: str, file: str) -> None:
        (self.bench.root / BUS / file).write_text(text)
        self.bench.kernel.settle()


def _play(device_class: str, acts: list[Act]) -> _History:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        root = Path(folder) / "machine"
        root.mkdir()
        fates: dict[int, Fate] = {}
        write = FunctionSwitch._write

        def mortal(switch: FunctionSwitch, file: str, text: str) -> None:
            fates[id(switch.tree.settings)].write(lambda: write(switch, file, text))

        patch.setattr(FunctionSwitch, "_write", mortal)
        with KernelWrites(root) as kernel:
            history = _History(root, kernel, device_class, fates)
            asyncio.run(history.run(acts))
            return history


@pytest.mark.parametrize("device_class", ["gpu", "nic"])
@settings(max_examples=examples(25), deadline=None)
@given(acts=st.lists(st.one_of(takes, takes, leaves, uses, flips), min_size=1, max_size=7))
def test_functions_end_as_they_were_and_are_never_given_as_what_they_are_not(
    device_class: str, acts: list[Act]
) -> None:
    """Whatever happens in between: a machine gets VFIO's nodes of functions that VFIO has, a
    container gets none, and each function ends with the driver of before.
    """
    _play(device_class, acts)


@pytest.mark.parametrize("step", range(1, 26, 4))
def test_history_with_a_death_at_a_known_step_ends_as_it_began(step: int) -> None:
    """The law's deaths are worth their name: each of these histories has one, while a claim comes
    or while it goes.
    """
    coming = _play("gpu", [("take", OWNER, (THIRD, FOURTH), step)])
    going = _play("gpu", [("take", OWNER, (THIRD, FOURTH), _LATE), ("leave", OWNER, min(step, 20))])

    assert (coming.deaths, going.deaths) == (1, 1)


def test_refusal_of_the_law_is_no_accident() -> None:
    """A claim that lacks a function of the group is refused in these histories, too, and leaves
    nothing.
    """

    async def refuse(bench: PassthroughBench) -> Any:
        async with bench.life():
            return await bench.prepare(THIRD)

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "machine"
        root.mkdir()
        with KernelWrites(root) as kernel:
            refusal = asyncio.run(refuse(PassthroughBench(root, kernel)))

    assert isinstance(refusal, Refusal)
    assert codes(refusal) == ["passthrough-group"]
