"""Promises of stored values: small ones as they always were, large ones compressed, and nothing
that unpacks into a reader's whole memory.
"""

from __future__ import annotations

import gzip
import zlib
from hashlib import sha512
from pathlib import Path

import pytest
from msgspec import structs

from topobus.cpu.plugins.linux_cpu import LinuxCpuDriver
from topobus.formats.messages.catalogue import INVENTORY, LEDGER, MACHINE
from topobus.formats.messages.codec import encode
from topobus.formats.messages.stored import MAX_UNPACKED_BYTES, from_stored, objection, to_stored
from topobus.gateway.device_plugins.rules.foreign import ForeignDevice, foreign_devices
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device, Inventory
from topobus.values.errors import ContractError
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.idset import CpuSet
from topobus.values.ledger import Ledger
from topobus.values.machine import Cpu, Machine, NumaNode

SICK = DeviceHealth(
    state=HealthState.UNKNOWN,
    conditions=(
        Condition(
            dimension=Dimension.DRIVER,
            state=HealthState.UNKNOWN,
            reason="driver-failed",
            message="driver widget-acme failed in discover: HardwareError: the device plugin of acme.example/widget "
            "is not connected (it ended the stream) "
            "(is it running, and in our folder?)",
            since="2026-11-22T15:00:00Z",
        ),
    ),
)


def inventory(count: int, health: DeviceHealth = SICK) -> Inventory:
    """A class of somebody else's plugin with so many devices."""
    listed = [
        ForeignDevice(id=f"GPU-{number * 2654435761 % 2**32:08x}-{number:012x}", nodes=(number % 2,))
        for number in range(count)
    ]
    devices = foreign_devices("widget-acme", "acme.example/widget", listed)
    return Inventory(
        node="n",
        device_class="widget-acme",
        generation=1,
        devices=tuple(structs.replace(device, health=health) for device in devices),
    )


def test_value_is_plain_json_when_it_fits() -> None:
    """People with NATS' own tools can read it."""
    value = inventory(500)

    assert to_stored(INVENTORY, value, where="x") == encode(value)
    assert from_stored(INVENTORY, encode(value), where="x") == value


@pytest.mark.parametrize("count", [1_200, 6_000, 8_192])
def test_value_is_compressed_when_it_is_larger_than_the_bucket_takes(count: int) -> None:
    """Thousands of sick devices fit, come back as they were, and make the same bytes each time."""
    value = inventory(count)
    stored = to_stored(INVENTORY, value, where="x")

    assert len(encode(value)) > INVENTORY.max_value_bytes
    assert len(stored) < INVENTORY.max_value_bytes
    assert from_stored(INVENTORY, stored, where="x") == value
    assert to_stored(INVENTORY, value, where="x") == stored
    # No time and no name in the header (RFC 1952).
    assert stored[3:8] == bytes(5)


def test_value_of_a_state_that_is_always_plain_is_refused_when_it_is_too_large() -> None:
    """A ledger is read by readers of all ages, and bounded otherwise: neither written nor read
    compressed.
    """
    value = Ledger(node="n", operations={}, allocations={})
    packed = gzip.compress(encode(value))

    assert not LEDGER.may_be_compressed
    with pytest.raises(ContractError, match="cannot read this"):
        from_stored(LEDGER, packed, where="x")


def test_value_is_refused_when_it_does_not_fit_compressed_either() -> None:
    """What cannot be told apart from noise cannot be made smaller.

    The error has both sizes and the limit.
    """
    noise = tuple(
        Device(
            name=f"d-{number}",
            device_class="c",
            uuid="".join(sha512(f"{number} {part}".encode()).hexdigest() for part in range(7)),
        )
        for number in range(2_000)
    )
    value = Inventory(node="n", device_class="c", generation=1, devices=noise)

    with pytest.raises(ContractError, match=r"the value has \d+ bytes, \d+ compressed, the bucket takes 524288"):
        to_stored(INVENTORY, value, where="x")
    assert "the bucket takes" in objection(INVENTORY, value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(zlib.compressobj(wbits=31).compress(b"") + b"", "ends too early", id="cut-off"),
        pytest.param(gzip.compress(b"{}")[:-4], "ends too early", id="without-its-end"),
        pytest.param(gzip.compress(b"{}") + gzip.compress(b"{}"), "has more after its end", id="two-of-them"),
        pytest.param(b"\x1f\x8b" + b"\x00" * 20, "cannot unpack", id="garbage"),
        pytest.param(gzip.compress(b"{}")[:-8] + b"\0" * 8, "cannot unpack", id="wrong-checksum"),
        pytest.param(gzip.compress(b" " * (MAX_UNPACKED_BYTES + 1)), "more than 16777216 bytes", id="bomb"),
        pytest.param(gzip.compress(b"not json"), "cannot read this", id="no-json-inside"),
        pytest.param(gzip.compress(gzip.compress(b"{}")), "cannot read this", id="packed-twice"),
    ],
)
def test_stored_bytes_are_refused_when_they_unpack_to_nothing_good(data: bytes, words: str) -> None:
    """A few kilobytes in the bucket cost a reader neither its memory nor its life."""
    with pytest.raises(ContractError, match=words):
        from_stored(INVENTORY, data, where="x")


def test_bomb_is_not_unpacked_beyond_the_limit() -> None:
    """A gigabyte in a megabyte is given up at the limit, not after it."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    first, other = (packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    # A full flush forgets what came before, so each further megabyte is the same bytes.
    bomb = first + other * 1023

    with pytest.raises(ContractError, match="unpacks to more than") as refused:
        from_stored(INVENTORY, bomb, where="x")
    assert refused.value.facts["size_bytes"] == len(bomb)


def test_objection_names_what_no_reader_would_take() -> None:
    """More devices than a message may have is found by who would write them, before anybody has to
    read them.
    """
    assert objection(INVENTORY, inventory(8_192)) == ""
    assert "8192" in objection(INVENTORY, inventory(8_193))


@pytest.mark.parametrize("count", [1_200, 4_096])
def test_machine_and_inventory_fit_when_a_node_has_thousands_of_cpus(count: int, tmp_path: Path) -> None:
    """The largest machines are described whole, also when nobody knows how any of their CPUs is."""
    per_node = count // 8
    machine = Machine(
        node="n",
        numa_nodes=tuple(
            NumaNode(id=node, cpus=CpuSet.of(range(node * per_node, (node + 1) * per_node)), memory_bytes=1)
            for node in range(8)
        ),
        cpus=tuple(
            Cpu(
                id=cpu,
                online=True,
                core=cpu // 2 * 2,
                socket=cpu // (count // 2),
                die=0,
                numa_node=cpu // per_node,
                l3=cpu // 16 * 16,
            )
            for cpu in range(count)
        ),
    )
    devices = LinuxCpuDriver().discover(Tree(HardwareSettings(root=str(tmp_path))), machine).devices
    value = Inventory(
        node="n",
        device_class="cpu",
        generation=1,
        devices=tuple(structs.replace(device, health=SICK) for device in devices),
    )

    assert len(devices) == count
    assert objection(MACHINE, machine) == ""
    assert objection(INVENTORY, value) == ""
