"""What a device service with spares publishes: when devices get sick and come back, when owners come
and go, and when it is started again.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from support.device_bench import NODE, OWNER, DeviceBench, has_state
from support.toy_driver import ToyDriver
from topobus.bus.bus import Bus
from topobus.devicekit.host.device_holders import DeviceHolders
from topobus.devicekit.host.host import check_devices
from topobus.devicekit.registry import DriverRegistry
from topobus.devicekit.settings import DeviceServiceSettings
from topobus.engine.alignment.devices.spare_choice import SpareSettings
from topobus.formats.messages.catalogue import LEDGER, PREPARE
from topobus.formats.messages.messages import Prepared, PrepareRequest
from topobus.process.config import NatsSettings
from topobus.values.device import Inventory
from topobus.values.errors import ConfigError
from topobus.values.health import Dimension, HealthState, Observation
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.both_buses]

_FAULT = (Observation(dimension=Dimension.LINK, state=HealthState.UNHEALTHY, reason="link-errors"),)
_CLAIM = Owner(kind=OwnerKind.CLAIM, name="job", uid="c1")


async def _hold(bench: DeviceBench, sequence: int, *devices: str) -> None:
    """Do topology's work: a claim has these devices."""
    holding = Holding(devices={"gpu": devices})
    allocations = {_CLAIM.key: Allocation(owner=_CLAIM, holdings=(holding,))} if devices else {}
    await bench.bus.put(LEDGER, Ledger(node=NODE, sequence=sequence, allocations=allocations), node=NODE)


async def _refuse_to_read(self: DeviceHolders) -> bool:
    raise AssertionError("the ledger is followed")


def _spares(inventory: Inventory) -> list[str]:
    return [device.name for device in inventory.devices if device.is_spare]


def _has_spares(*places: int, sick: tuple[int, ...] = ()) -> Callable[[Inventory], bool]:
    def wanted(inventory: Inventory) -> bool:
        unfit = [device.name for device in inventory.devices if not device.is_fit]
        return _spares(inventory) == [f"gpu-toy-{place}" for place in places] and unfit == [
            f"gpu-toy-{place}" for place in sick
        ]

    return wanted


async def test_each_sick_device_releases_one_spare_and_takes_it_back_when_it_is_well(
    bench: DeviceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four devices two are spares; two get sick one after the other, and one comes back. A spare
    that an owner has is replaced by a free one. The ledger, which is followed, is not read as well.
    """
    monkeypatch.setattr(DeviceHolders, "read", _refuse_to_read)
    await bench.publish_machine()
    driver = ToyDriver(count=4)
    async with bench.service(driver, spares=2):
        await bench.inventory(_has_spares(2, 3))
        driver.faults["gpu-toy-0"] = _FAULT
        await bench.inventory(_has_spares(3, sick=(0,)))
        driver.faults["gpu-toy-1"] = _FAULT
        await bench.inventory(_has_spares(sick=(0, 1)))
        await _hold(bench, 1, "gpu-toy-2")
        del driver.faults["gpu-toy-0"]
        await bench.inventory(_has_spares(3, sick=(1,)))
        await _hold(bench, 2, "gpu-toy-2", "gpu-toy-3")
        await bench.inventory(_has_spares(0, sick=(1,)))
        await _hold(bench, 3, "gpu-toy-0", "gpu-toy-2", "gpu-toy-3")
        await bench.inventory(_has_spares(sick=(1,)))


async def test_spare_is_prepared_for_a_claim_that_was_allocated_it_before(bench: DeviceBench) -> None:
    """A scheduler that had not seen the taint loses no pod."""
    await bench.publish_machine()
    async with bench.service(ToyDriver(count=2), spares=1):
        await bench.inventory(_has_spares(1))
        async with Bus.session(NatsSettings(url=bench.url), name="gateway") as gateway:
            request = PrepareRequest(op_id="", owner=OWNER, devices=("gpu-toy-1",))
            reply = await gateway.ask(PREPARE, request, node=NODE, device_class="gpu")

    assert isinstance(reply.result, Prepared)


async def test_spare_stays_the_same_when_the_service_is_started_again(bench: DeviceBench) -> None:
    """It is the one that was chosen when the others were held, also after they are free; without the
    setting there is none.
    """
    await bench.publish_machine()
    await _hold(bench, 1, "gpu-toy-1", "gpu-toy-2")
    async with bench.service(ToyDriver(count=3), spares=1):
        await bench.inventory(_has_spares(0))
    await _hold(bench, 2)
    driver = ToyDriver(count=3)
    driver.faults["gpu-toy-1"] = (structs.replace(_FAULT[0], state=HealthState.DEGRADED),)
    async with bench.service(driver, spares=1):
        seen = await bench.inventory(has_state(HealthState.DEGRADED, "gpu-toy-1"))
    async with bench.service(driver):
        await bench.inventory(lambda inventory: not _spares(inventory))

    assert _spares(seen) == ["gpu-toy-0"]


async def test_cpu_service_refuses_spares() -> None:
    """It names the key."""
    settings = DeviceServiceSettings(spares=SpareSettings(count=1))

    with pytest.raises(ConfigError) as refused:
        check_devices("cpu", settings, DriverRegistry(drivers=()))

    assert refused.value.facts["key"] == "spares.count"
