"""Which devices a command line means, and what it is told when it means none or too many."""

from __future__ import annotations

import pytest
from msgspec import structs

from topobus.cli.exits import NotFoundError, UsageError
from topobus.cli.objects.device_selection import Selection, choose_devices
from topobus.formats.messages.operation_messages import ClassMaintenance
from topobus.values.device import Device, Inventory
from topobus.values.idset import NodeSet
from topobus.values.maintenance import DeviceVerb, Maintenance
from topobus.values.pci import PciAddress


def inventory(node: str, *names: str, device_class: str = "gpu", driver: str = "nvidia") -> Inventory:
    """Devices of one class."""
    devices = tuple(
        Device(
            name=name,
            device_class=device_class,
            driver=driver,
            numa_nodes=NodeSet(index),
            attributes={"index": index, "mig": index > 0},
        )
        for index, name in enumerate(names)
    )
    return Inventory(node=node, device_class=device_class, generation=1, devices=devices)


SYSTEM = (
    inventory("n1", "gpu-0", "gpu-1"),
    inventory("n2", "gpu-0"),
    inventory("n2", "nic-0", device_class="nic", driver="pci-netdev"),
)
GONE = ClassMaintenance(
    node="n1", device_class="gpu", devices={"gpu-9": Maintenance(verb=DeviceVerb.EXCLUDE, why="burnt", who="ada")}
)


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        (Selection(names=("gpu-1",)), ["n1/gpu-1"]),
        (Selection(names=("gpu-0",), node="n2"), ["n2/gpu-0"]),
        (Selection(names=("gpu-1", "nic-0", "gpu-1")), ["n1/gpu-1", "n2/nic-0"]),
        (Selection(device_class="gpu"), ["n1/gpu-0", "n1/gpu-1", "n1/gpu-9", "n2/gpu-0"]),
        (Selection(device_class="gpu", node="n2"), ["n2/gpu-0"]),
        (Selection(where=("driver=nvid*",), node="n1"), ["n1/gpu-0", "n1/gpu-1"]),
        (Selection(where=("numa_node=1",)), ["n1/gpu-1"]),
        (Selection(where=("attributes.index=1", "attributes.mig=true")), ["n1/gpu-1"]),
        (Selection(names=("gpu-9",)), ["n1/gpu-9"]),
    ],
)
def test_devices_are_chosen_when_names_or_selectors_mean_them(selection: Selection, names: list[str]) -> None:
    """Sorted by node, each once.

    One that is kept back and gone is meant by its name and its class,
    and by no selector on its fields.
    """
    chosen = choose_devices(selection, SYSTEM, [GONE])

    assert [f"{device.node}/{device.device}" for device in chosen] == names


@pytest.mark.parametrize("name", ["41:00.0", "0000:41:00.0", "0000:41:00.0".upper()])
def test_device_is_chosen_by_its_pci_address_when_it_is_written_as_lspci_does(name: str) -> None:
    """The whole card is meant, none of its parts, and no function of another domain."""
    card = Device(name="gpu-0000-41-00-0", device_class="gpu", pci=PciAddress.parse("41:00.0"))
    part = structs.replace(card, name="gpu-0000-41-00-0-part", parent=card.name)
    other = Device(name="gpu-0001-41-00-0", device_class="gpu", pci=PciAddress.parse("0001:41:00.0"))

    chosen = choose_devices(
        Selection(names=(name,)), [Inventory(node="n1", device_class="gpu", generation=1, devices=(card, part, other))]
    )

    assert [device.device for device in chosen] == ["gpu-0000-41-00-0"]


@pytest.mark.parametrize(
    ("selection", "error", "text", "next_step"),
    [
        (Selection(), UsageError, "no device is named", "--class"),
        (Selection(names=("gpu-0",)), UsageError, "2 devices are named gpu-0: on n1 (gpu), n2 (gpu)", "--node"),
        (Selection(names=("gpu-2",), node="n1"), NotFoundError, "no device 'gpu-2' on node n1", "did you mean gpu-"),
        (Selection(device_class="fpga"), NotFoundError, "unknown device class 'fpga'", "known are gpu, nic"),
        (Selection(device_class="gpus"), NotFoundError, "unknown device class 'gpus'", "did you mean gpu?"),
        (Selection(names=("gpu-0",), node="n9"), NotFoundError, "unknown node 'n9'", "known are n1, n2"),
        (
            Selection(device_class="nic", node="n1"),
            NotFoundError,
            "no device of class nic on node n1",
            "topobus inventory",
        ),
        (Selection(where=("maker=nvidia",)), UsageError, "maker", "pools.md"),
        (Selection(where=("driver",)), UsageError, "wanted FIELD=VALUE", "driver=nvidia"),
    ],
)
def test_selection_is_an_error_when_it_means_none_or_several(
    selection: Selection, error: type[UsageError | NotFoundError], text: str, next_step: str
) -> None:
    """The message says what was looked for and where; the next step says what to do."""
    with pytest.raises(error) as caught:
        choose_devices(selection, SYSTEM)

    assert text in caught.value.message
    assert next_step in caught.value.next_step
