"""A function goes to VFIO for a claim and comes back: what is refused, what a container gets, and
what a kill leaves.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.kernel_writes import KernelWrites
from support.looks import other_threads
from support.passthrough_bench import (
    ALLOWED,
    ASKED,
    BRIDGE,
    BUS,
    FIRST,
    FOURTH,
    GROUPS,
    OTHER,
    SECOND,
    THIRD,
    PassthroughBench,
    codes,
    nodes_of,
)
from support.sriov_kernel import PHYSICAL, SriovKernel, virtual_address
from support.sysfs_trees import write
from topobus.devicekit.settings import FunctionRule, PassthroughRule, PassthroughSettings
from topobus.formats.messages.messages import Prepared
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.values.device import DeviceRole
from topobus.values.pci import PciAddress
from topobus.values.pools import Condition
from topobus.values.request import Owner, OwnerKind


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[KernelWrites]:
    """Give a kernel that obeys."""
    (tmp_path / "machine").mkdir()
    with KernelWrites(tmp_path / "machine") as kernel:
        yield kernel


@pytest.fixture
def bench(kernel: KernelWrites) -> PassthroughBench:
    """Give four GPUs."""
    return PassthroughBench(kernel.root, kernel)


@pytest.mark.parametrize("device_class", ["gpu", "nic", "fpga"])
async def test_function_goes_to_vfio_and_comes_back(kernel: KernelWrites, device_class: str) -> None:
    """The container gets the group's node and VFIO's, and the address in the variables that
    launchers read.

    Afterwards its own driver has it, and the journal is empty.
    """
    bench = PassthroughBench(kernel.root, kernel, device_class)
    async with bench.life():
        prepared = await bench.prepare(FIRST)
        held = bench.held_by()
        refusal = await bench.unprepare(FIRST)

    capital = device_class.upper()
    assert nodes_of(prepared) == ["/dev/vfio/41", "/dev/vfio/vfio"]
    assert prepared.edits[bench.name(FIRST)].env == {f"TOPOBUS_{capital}_0000_0A_00_0": FIRST}
    assert prepared.common.env == {
        f"TOPOBUS_{capital}_DEVICES": bench.name(FIRST),
        f"PCI_RESOURCE_TOPOBUS_DEV_{capital}": FIRST,
        f"TOPOBUS_{capital}_PCI_ADDRESSES": FIRST,
        f"TOPOBUS_{capital}_PASSTHROUGH": "vfio",
    }
    assert held == {FIRST: "vfio-pci", **{address: bench.own_driver for address in GROUPS if address != FIRST}}
    assert refusal is None
    assert bench.is_home
    assert bench.journal_of(FIRST) is None


async def test_container_gets_the_functions_own_node_when_it_asks_for_iommufd(bench: PassthroughBench) -> None:
    """No group, no container of VFIO: /dev/iommu and the node that VFIO made for this function."""
    async with bench.life():
        prepared = await bench.prepare(SECOND, config={**ASKED, "backend": "iommufd"})
        await bench.unprepare(SECOND)

    assert nodes_of(prepared) == ["/dev/vfio/devices/vfio0", "/dev/iommu"]
    assert prepared.common.env["TOPOBUS_GPU_PASSTHROUGH"] == "iommufd"


async def test_group_is_given_whole_or_not_at_all(bench: PassthroughBench) -> None:
    """The refusal names the function that the claim lacks; with both of them the bridge above
    stands in nobody's way.
    """
    async with bench.life():
        alone = await bench.prepare(THIRD)
        is_untouched = bench.is_home
        both = await bench.prepare(THIRD, FOURTH)
        again = await bench.prepare(FOURTH)
        await bench.unprepare(THIRD, FOURTH)

    assert codes(alone) == ["passthrough-group"]
    assert f"{FOURTH} (i915)" in alone.reasons[0].message
    assert BRIDGE not in alone.reasons[0].message
    assert is_untouched
    assert nodes_of(both) == ["/dev/vfio/43", "/dev/vfio/43", "/dev/vfio/vfio"]
    # A claim with several requests is asked for each of them, too.
    assert nodes_of(again) == ["/dev/vfio/43", "/dev/vfio/vfio"]
    assert bench.is_home


async def test_function_that_is_set_aside_for_nobody_stands_in_nobodys_way(bench: PassthroughBench) -> None:
    """What pci-stub holds (a GPU's sound, by the operator's will) is nobody's, and the kernel takes
    such a group for whole.
    """
    bench.drivers.add_driver("pci-stub")
    for text, file in (
        ("pci-stub", f"devices/{FOURTH}/driver_override"),
        (FOURTH, "drivers/i915/unbind"),
        (FOURTH, "drivers_probe"),
    ):
        (bench.root / BUS / file).write_text(text)
        bench.kernel.settle()
    async with bench.life():
        prepared = await bench.prepare(THIRD)
        await bench.unprepare(THIRD)

    assert nodes_of(prepared) == ["/dev/vfio/43", "/dev/vfio/vfio"]
    assert bench.held_by()[THIRD] == "i915"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**ASKED, "bakend": "vfio"}, 'PassthroughParameters.bakend: unknown field, did you mean "backend"?'),
        ({**ASKED, "backend": "uio"}, "Invalid enum value 'uio'"),
        (
            {**ASKED, "apiVersion": "topobus.dev/v2"},
            "PassthroughParameters.apiVersion is 'topobus.dev/v2', wanted 'topobus.dev/v1'",
        ),
    ],
    ids=["unknown-field", "unknown-backend", "unknown-version"],
)
async def test_wrong_parameters_are_refused_by_name(
    bench: PassthroughBench, config: dict[str, Any], words: str
) -> None:
    """Nothing in them is passed over in silence, and nothing is changed."""
    async with bench.life():
        refusal = await bench.prepare(FIRST, config=config)

    assert codes(refusal) == ["passthrough-malformed"]
    assert words in refusal.reasons[0].message
    assert bench.drivers.log == [f"{bench.own_driver} takes {address}" for address in GROUPS] + [
        f"pcieport takes {BRIDGE}"
    ]


async def test_nothing_is_switched_when_the_operator_has_not_allowed_it(bench: PassthroughBench) -> None:
    """By default no function is; a rule allows what it is true of."""
    bench.passthrough = PassthroughSettings()
    async with bench.life():
        by_default = await bench.prepare(FIRST)
    rule = PassthroughRule(where=(Condition(field="pci", one_of=(SECOND,)),))
    bench.passthrough = msgspec.structs.replace(ALLOWED, allow=(rule,))
    async with bench.life():
        another = await bench.prepare(FIRST)
        allowed = await bench.prepare(SECOND)
        await bench.unprepare(SECOND)

    assert (codes(by_default), codes(another)) == (["passthrough-forbidden"], ["passthrough-forbidden"])
    assert isinstance(allowed, Prepared)


@pytest.mark.parametrize("what", ["driver", "group", "iommufd"])
async def test_node_that_cannot_is_told_what_it_lacks(bench: PassthroughBench, what: str) -> None:
    """No kernel driver, no IOMMU, no iommufd: refused before anything is changed."""
    if what == "driver":
        rule = PassthroughRule(where=ALLOWED.allow[0].where, kernel_driver="nvgrace-gpu-vfio-pci")
        bench.passthrough = msgspec.structs.replace(ALLOWED, allow=(rule,))
    elif what == "group":
        (bench.root / BUS / "devices" / FIRST / "iommu_group").unlink()
    else:
        (bench.root / "dev/iommu").unlink()
    async with bench.life():
        refusal = await bench.prepare(FIRST, config={**ASKED, "backend": "iommufd"})

    assert codes(refusal) == ["passthrough-unsupported"]
    assert bench.is_home


async def test_claim_waits_until_nobody_has_the_device_open(bench: PassthroughBench) -> None:
    """A process that has its node open is waited for, and nothing is switched before it has closed
    it.
    """
    bench.open_node(4711, "python3", "dri/renderD128")
    async with bench.life():
        while not isinstance(begun := await bench.ask(FIRST), Accepted) or bench.journal_of(FIRST) is None:
            await other_threads()
        held = bench.held_by()[FIRST]
        bench.close_node(4711)
        prepared = await bench.prepare(FIRST)
        await bench.unprepare(FIRST)

    assert begun.what == f"giving {bench.name(FIRST)} to vfio"
    assert held == "i915"
    assert isinstance(prepared, Prepared)


async def test_busy_function_stays_with_its_driver_and_the_user_is_named(bench: PassthroughBench) -> None:
    """After the limit the refusal says which process of which program has which node open."""
    bench.passthrough = msgspec.structs.replace(ALLOWED, idle_s=0.01)
    bench.open_node(4711, "python3", "dri/renderD128")
    async with bench.life():
        refusal = await bench.prepare(FIRST)

    assert codes(refusal) == ["passthrough-busy"]
    assert "process 4711 (python3) has /dev/dri/renderD128 open" in refusal.reasons[0].message
    assert bench.is_home
    assert bench.journal_of(FIRST) is None


ROUTE = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"proc/net/route": f"{ROUTE}eth0 0000000A 00000000 0001 0 0 0 00FFFFFF 0 0 0"},
            "the node has an address or a route over eth0",
        ),
        (
            {"proc/net/route": f"{ROUTE}eth0 00000000 0100000A 0003 0 0 0 00000000 0 0 0"},
            "the default route of this node goes over eth0",
        ),
    ],
    ids=["addresses", "default-route"],
)
async def test_interface_that_the_node_uses_is_not_taken_away(
    kernel: KernelWrites, files: dict[str, object], words: str
) -> None:
    """A NIC with addresses, or one that came to carry the default route after it was offered, stays
    the node's.
    """
    bench = PassthroughBench(kernel.root, kernel, "nic")
    bench.passthrough = msgspec.structs.replace(ALLOWED, idle_s=0.01)
    write(bench.root, files)
    async with bench.life():
        refusal = await bench.prepare(FIRST)

    assert codes(refusal) == ["passthrough-busy"]
    assert words in refusal.reasons[0].message
    assert bench.is_home


async def test_interface_in_another_namespace_counts_as_used(kernel: KernelWrites) -> None:
    """What a pod has, the node does not see: its folder is empty, and unbinding would take it from
    the pod.
    """
    bench = PassthroughBench(kernel.root, kernel, "nic")
    bench.passthrough = msgspec.structs.replace(ALLOWED, idle_s=0.01)
    shutil.rmtree(bench.root / BUS / "devices" / FIRST / "net" / "eth0")
    async with bench.life():
        refusal = await bench.prepare(FIRST)

    assert "its interface is in another network namespace" in refusal.reasons[0].message
    assert bench.is_home


async def test_function_is_back_with_its_driver_when_vfio_does_not_take_it(bench: PassthroughBench) -> None:
    """The kernel's own word stands in the refusal.

    Of two functions the one that was switched already goes back, too.
    """
    async with bench.life():
        bench.kernel.refuse(f"{BUS}/drivers/vfio-pci/bind")
        refusal = await bench.prepare(FIRST)
        was_home = bench.is_home
        bench.kernel.accept(f"{BUS}/drivers/vfio-pci/bind")
        prepared = await bench.prepare(FIRST)
        await bench.unprepare(FIRST)

    assert codes(refusal) == ["passthrough-failed"]
    assert f"{FIRST} cannot be written: Is a directory" in refusal.reasons[0].message
    assert was_home
    assert isinstance(prepared, Prepared)
    assert bench.is_home


async def test_function_that_cannot_be_given_back_is_nobodys_until_it_is(bench: PassthroughBench) -> None:
    """Its driver does not take it back: undoing is refused with the reason and the device is dirty.

    As soon as the driver takes it the next owner has it.
    """
    bind = f"{BUS}/drivers/{bench.own_driver}/bind"
    async with bench.life():
        await bench.prepare(FIRST)
        bench.kernel.refuse(bind)
        refusal = await bench.unprepare(FIRST)
        while bench.name(FIRST) not in bench.hands.observations():
            await other_threads()
        seen = bench.hands.observations()[bench.name(FIRST)]
        other = await bench.prepare(FIRST, owner=OTHER, config=None)
        bench.kernel.accept(bind)
        given = await bench.prepare(FIRST, owner=OTHER, config=None)

    assert codes(refusal) == ["driver-failed"]
    assert "Is a directory" in refusal.reasons[0].message
    assert (seen.reason, codes(other)) == ("dirty", ["undo-failed"])
    assert bench.is_home
    assert nodes_of(given) == ["/dev/dri/renderD128"]


async def test_function_that_a_machine_still_has_open_is_not_taken_from_it(bench: PassthroughBench) -> None:
    """The kernel would wait in `unbind` for ever.

    The refusal names the process, and the next try succeeds when it has gone.
    """
    async with bench.life():
        await bench.prepare(FIRST)
        bench.open_node(4712, "qemu-kvm", "vfio/41")
        # Another machine's group has a number that begins alike.
        bench.open_node(4713, "qemu-kvm", "vfio/4")
        refusal = await bench.unprepare(FIRST)
        held = bench.held_by()[FIRST]
        bench.close_node(4712)
        again = await bench.unprepare(FIRST)

    assert "process 4712 (qemu-kvm) has /dev/vfio/41 open" in refusal.reasons[0].message
    assert "4713" not in refusal.reasons[0].message
    assert (held, again) == ("vfio-pci", None)
    assert bench.is_home


async def test_nobody_else_gets_what_a_machine_has(bench: PassthroughBench) -> None:
    """Another claim is refused with the holder's name, as a container's device or for a machine of
    its own.

    The holder may ask again and gets the same.
    """
    async with bench.life():
        prepared = await bench.prepare(FIRST)
        for_container = await bench.prepare(FIRST, owner=OTHER, config=None)
        for_machine = await bench.prepare(FIRST, owner=OTHER)
        again = await bench.prepare(FIRST)
        await bench.unprepare(FIRST, owner=OTHER)
        held = bench.held_by()[FIRST]
        await bench.unprepare(FIRST)

    assert (codes(for_container), codes(for_machine)) == (["device-passed-through"], ["device-passed-through"])
    assert again == prepared
    assert held == "vfio-pci"
    assert bench.is_home


async def test_claim_has_its_function_after_a_restart_and_after_a_reboot(bench: PassthroughBench) -> None:
    """A restart finds it with VFIO and changes nothing.

    After a reboot it is with its own driver, is switched again, and goes
    back to that driver at the end.
    """
    async with bench.life():
        await bench.prepare(FIRST)
    log = list(bench.drivers.log)
    async with bench.life():
        after_restart = await bench.prepare(FIRST)
        log_after_restart = list(bench.drivers.log)
    for text, file in (
        ("", f"devices/{FIRST}/driver_override"),
        (FIRST, "drivers/vfio-pci/unbind"),
        (FIRST, "drivers_probe"),
    ):
        (bench.root / BUS / file).write_text(text)
        bench.kernel.settle()
    async with bench.life():
        after_reboot = await bench.prepare(FIRST)
        held = bench.held_by()[FIRST]
        await bench.unprepare(FIRST)

    assert isinstance(after_restart, Prepared)
    assert log_after_restart == log
    assert nodes_of(after_reboot) == ["/dev/vfio/41", "/dev/vfio/vfio"]
    assert held == "vfio-pci"
    assert bench.is_home


async def test_function_goes_back_to_the_driver_and_override_that_it_had(bench: PassthroughBench) -> None:
    """An override that an operator had set before is there again, and not lost."""
    (bench.root / BUS / "devices" / FIRST / "driver_override").write_text("i915")
    bench.kernel.settle()
    async with bench.life():
        await bench.prepare(FIRST)
        during = bench.overrides()
        await bench.unprepare(FIRST)

    assert during == {FIRST: "vfio-pci"}
    assert (bench.held_by()[FIRST], bench.overrides()) == ("i915", {FIRST: "i915"})


async def test_function_under_vfio_by_the_operator_is_given_as_it_is(kernel: KernelWrites) -> None:
    """Who holds a NIC for machines himself has nothing switched: the claim gets its group, and it
    stays with VFIO afterwards.
    """
    bench = PassthroughBench(kernel.root, kernel, "nic")
    for text, file in (
        ("vfio-pci", f"devices/{FIRST}/driver_override"),
        (FIRST, "drivers/mlx5_core/unbind"),
        (FIRST, "drivers_probe"),
    ):
        (bench.root / BUS / file).write_text(text)
        bench.kernel.settle()
    bench.look()
    bench.passthrough = PassthroughSettings()
    async with bench.life():
        prepared = await bench.prepare(FIRST)
        await bench.unprepare(FIRST)

    assert bench.devices[bench.name(FIRST)].role is DeviceRole.PASSTHROUGH
    assert nodes_of(prepared) == ["/dev/vfio/41", "/dev/vfio/vfio"]
    assert bench.held_by()[FIRST] == "vfio-pci"


async def test_pods_by_resource_never_switch_anything(bench: PassthroughBench) -> None:
    """Kubelet's Allocate brings no configuration; should something bring one in its name, it is
    refused.
    """
    owner = Owner(kind=OwnerKind.DEVICE_PLUGIN, name="topobus.dev/gpu", uid="u3")
    async with bench.life():
        refusal = await bench.prepare(FIRST, owner=owner)

    assert codes(refusal) == ["passthrough-malformed"]
    assert bench.is_home


@pytest.fixture
def cut(kernel: KernelWrites) -> tuple[PassthroughBench, SriovKernel]:
    """Give NICs, one of which is cut into virtual functions on demand.

    Each function has a group of its own.
    """
    bench, card = PassthroughBench(kernel.root, kernel, "nic"), SriovKernel(kernel.root)
    groups = iter(range(60, 90))

    def add(address: PciAddress) -> None:
        bench.drivers.add_function(str(address), "ice", group=next(groups), shown=(f"{BUS}/devices/{address}/net",))

    add(PHYSICAL)
    card.on_ready = add
    card.follow(kernel)
    assert isinstance(bench.driver, PciNetdevDriver)
    bench.driver.on_demand_functions.rules = (
        FunctionRule(where=(Condition(field="pci", equals=str(PHYSICAL)),), count=2),
    )
    bench.machine = msgspec.structs.replace(bench.machine, pci_devices=(*bench.machine.pci_devices, card.physical))
    bench.look()
    return bench, card


async def test_virtual_function_is_made_and_passed_when_a_machine_wants_one(
    cut: tuple[PassthroughBench, SriovKernel],
) -> None:
    """It is a part of its card and a function with a group of its own: made for the claim, given,
    and back with its driver afterwards; its sibling is another claim's.
    """
    bench, card = cut
    part, sibling = (str(virtual_address(index)) for index in range(2))
    async with bench.life():
        passed = await bench.prepare(part)
        held = bench.drivers.driver_of(part)
        other = await bench.prepare(sibling, owner=OTHER, config=None)
        card_too = await bench.prepare(
            str(PHYSICAL), owner=Owner(kind=OwnerKind.CLAIM, namespace="default", name="third", uid="u3")
        )
        refusals = [await bench.unprepare(part), await bench.unprepare(sibling, owner=OTHER)]
        bench.kernel.settle()

    assert nodes_of(passed) == ["/dev/vfio/61", "/dev/vfio/vfio"]
    assert (held, bench.drivers.driver_of(part)) == ("vfio-pci", "ice")
    assert isinstance(other, Prepared)
    assert codes(card_too) == ["card-in-use"]
    assert refusals == [None, None]
    assert [bench.journal_of(address) for address in (part, sibling)] == [None, None]
    assert card.writes == [2]


async def test_card_that_is_cut_on_demand_is_passed_whole_when_nobody_has_a_function_of_it(
    cut: tuple[PassthroughBench, SriovKernel],
) -> None:
    """Idle virtual functions are removed for a machine that gets the card, as for any other claim
    of it.
    """
    bench, card = cut
    async with bench.life():
        await bench.prepare(str(virtual_address(0)), config=None)
        await bench.unprepare(str(virtual_address(0)))
        passed = await bench.prepare(str(PHYSICAL))
        held = bench.drivers.driver_of(str(PHYSICAL))
        refusal = await bench.unprepare(str(PHYSICAL))
        bench.kernel.settle()

    assert nodes_of(passed) == ["/dev/vfio/60", "/dev/vfio/vfio"]
    assert (held, bench.drivers.driver_of(str(PHYSICAL))) == ("vfio-pci", "ice")
    assert refusal is None
    assert card.writes == [2, 0]
