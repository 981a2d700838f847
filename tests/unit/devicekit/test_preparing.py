"""Answers of prepare and unprepare."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.looks import other_threads
from support.toy_driver import ToyDriver
from topobus.devicekit.host.isolation import IsolatedDriver
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.verbs.device_hands import DeviceHands
from topobus.devicekit.verbs.prepare import Preparer
from topobus.formats.messages.messages import Prepared, PrepareReply, PrepareRequest, UnprepareRequest
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.clock import ManualClock
from topobus.values.device import Device
from topobus.values.device_sharing import DeviceSharing
from topobus.values.edits import DeviceNode
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

_OWNER = Owner(kind=OwnerKind.CLAIM, name="claim", uid="u1")
_TIMEOUT_S = 5.0
_SICK = DeviceHealth(
    state=HealthState.UNHEALTHY,
    conditions=(
        Condition(dimension=Dimension.PRESENCE, state=HealthState.UNHEALTHY, reason="fell-off-bus", message="gone"),
    ),
)


class _Bench:
    """A preparer over two toy drivers with two devices each."""

    def __init__(self, root: Path, *, runtime_dev: str = "/dev") -> None:
        self.drivers = {name: ToyDriver(name, count=2) for name in ("acme", "other")}
        names = [(name, driver) for driver, toy in self.drivers.items() for name in toy.names]
        self.devices = {name: Device(name=name, device_class="gpu", driver=driver) for name, driver in names}
        self.clock = ManualClock()
        isolated = {
            name: IsolatedDriver(driver, timeout_s=_TIMEOUT_S, clock=self.clock)
            for name, driver in self.drivers.items()
        }
        tree = Tree(HardwareSettings(root=str(root), runtime_dev=runtime_dev))
        self.journal = Journal(root / "journal")
        self.isolated = isolated
        hands = DeviceHands(isolated, tree, self.devices.get, self.journal, clock=self.clock, wait_s=_TIMEOUT_S)
        self.preparer = Preparer("gpu", hands, self.devices.get)

    def add(self, toy: ToyDriver) -> None:
        """Load one driver more."""
        self.isolated[toy.name] = IsolatedDriver(toy, timeout_s=_TIMEOUT_S, clock=self.clock)
        self.devices.update({name: Device(name=name, device_class="gpu", driver=toy.name) for name in toy.names})

    async def prepare(self, *names: str, op_id: str = "op-1") -> PrepareReply:
        return await self.preparer.prepare(PrepareRequest(op_id=op_id, owner=_OWNER, devices=names))


@pytest.fixture
def bench(tmp_path: Path) -> _Bench:
    """Give a preparer with two drivers."""
    return _Bench(tmp_path)


def _code(reply: PrepareReply) -> str:
    assert isinstance(reply.result, Refusal)
    return reply.result.reasons[0].code


async def test_prepare_gives_edits_of_each_device_when_two_drivers_share_a_request(bench: _Bench) -> None:
    """Each driver prepares its own devices; common edits are joined and list all devices once."""
    reply = await bench.prepare("gpu-other-1", "gpu-acme-0", "gpu-acme-1")

    assert isinstance(reply.result, Prepared)
    assert sorted(reply.result.edits) == ["gpu-acme-0", "gpu-acme-1", "gpu-other-1"]
    assert reply.result.common.env == {
        "TOPOBUS_GPU_DEVICES": "gpu-acme-0,gpu-acme-1,gpu-other-1",
        "TOY_ACME": "gpu-acme-0,gpu-acme-1",
        "TOY_OTHER": "gpu-other-1",
    }


async def test_prepare_is_refused_when_two_drivers_give_one_variable_two_values(bench: _Bench) -> None:
    """Kubelet would keep the first of the two without a message."""
    for name, value in (("acme", "1"), ("other", "2")):
        bench.drivers[name].common = {"SAME": value}

    reply = await bench.prepare("gpu-acme-0", "gpu-other-0")

    assert _code(reply) == "edits-conflict"


async def test_prepare_gives_each_device_its_own_configuration_when_a_claim_configures_single_requests(
    bench: _Bench,
) -> None:
    """A driver is called once with all of its devices, and can tell what each of them is configured
    with.
    """
    config: dict[str, tuple[dict[str, Any], ...]] = {"gpu-acme-0": ({"mode": "mig"},)}
    names = ("gpu-acme-0", "gpu-acme-1", "gpu-other-0")

    reply = await bench.preparer.prepare(
        PrepareRequest(op_id="op", owner=_OWNER, devices=names, config=({"mode": "all"},), device_config=config)
    )

    assert isinstance(reply.result, Prepared)
    assert bench.drivers["acme"].prepared == [("gpu-acme-0", "gpu-acme-1")]
    assert bench.drivers["acme"].config == {"gpu-acme-0": ({"mode": "mig"},), "gpu-acme-1": ({"mode": "all"},)}
    assert bench.drivers["other"].config == {"gpu-other-0": ({"mode": "all"},)}


async def test_prepare_gives_a_sick_device_only_to_who_looks_at_it(bench: _Bench) -> None:
    """Admin access is for finding out what is wrong: it is given a sick
    device, and nobody else is.
    """
    bench.devices["gpu-acme-0"] = msgspec.structs.replace(bench.devices["gpu-acme-0"], health=_SICK)

    refused = await bench.prepare("gpu-acme-0")
    given = await bench.preparer.prepare(
        PrepareRequest(op_id="op-2", owner=_OWNER, devices=("gpu-acme-0",), looked_at=("gpu-acme-0",))
    )

    assert _code(refused) == "device-unhealthy"
    assert isinstance(given.result, Prepared)


async def test_prepare_answers_the_same_when_an_operation_is_asked_again(bench: _Bench) -> None:
    """The same operation gets the stored answer, and the driver is not asked twice."""
    first = await bench.prepare("gpu-acme-0")
    second = await bench.prepare("gpu-acme-0")

    assert first == second
    assert bench.drivers["acme"].prepared == [("gpu-acme-0",)]


async def test_prepare_refuses_when_an_operation_id_comes_with_another_request(bench: _Bench) -> None:
    """One operation id stands for one request."""
    await bench.prepare("gpu-acme-0")

    assert _code(await bench.prepare("gpu-acme-1")) == "operation-reused"


async def test_prepare_runs_again_when_the_devices_were_unprepared_meanwhile(bench: _Bench) -> None:
    """After unprepare a stored answer would be a lie, so the driver prepares anew."""
    await bench.prepare("gpu-acme-0")
    await bench.preparer.unprepare(UnprepareRequest(op_id="op-2", owner=_OWNER, devices=("gpu-acme-0",)))
    await bench.prepare("gpu-acme-0")

    assert len(bench.drivers["acme"].prepared) == 2


async def test_prepare_refuses_when_a_device_is_unknown(bench: _Bench) -> None:
    """An unknown device is named, and nothing is prepared."""
    assert _code(await bench.prepare("gpu-acme-0", "gpu-acme-7")) == "device-unknown"
    assert bench.drivers["acme"].prepared == []


async def test_prepare_refuses_when_a_device_is_unhealthy(bench: _Bench) -> None:
    """A sick device is not handed to a new container; the refusal says what is wrong with it."""
    bench.devices["gpu-acme-0"] = msgspec.structs.replace(bench.devices["gpu-acme-0"], health=_SICK)

    reply = await bench.prepare("gpu-acme-0")

    assert _code(reply) == "device-unhealthy"
    assert isinstance(reply.result, Refusal)
    assert "fell-off-bus" in reply.result.reasons[0].message


async def test_prepare_refuses_and_can_succeed_later_when_the_driver_hangs(bench: _Bench) -> None:
    """A hung driver costs its time limit, not more; the same operation succeeds once it is back."""
    bench.drivers["acme"].error = OSError("busy")
    failed = await bench.prepare("gpu-acme-0")
    bench.drivers["acme"].error = None
    bench.drivers["other"].go.clear()
    preparing = asyncio.create_task(bench.prepare("gpu-other-0", op_id="op-2"))
    await asyncio.to_thread(bench.drivers["other"].held.wait)
    bench.clock.advance(_TIMEOUT_S)
    hung = await preparing
    bench.drivers["other"].go.set()
    while (again := await bench.prepare("gpu-other-0", op_id="op-2")) == hung or "earlier call" in str(again):
        await other_threads()

    assert (_code(failed), _code(hung)) == ("driver-failed", "driver-hung")
    assert isinstance((await bench.prepare("gpu-acme-0")).result, Prepared)
    assert isinstance(again.result, Prepared)


async def test_prepare_refuses_when_no_device_is_named(bench: _Bench) -> None:
    """An empty request is refused."""
    assert _code(await bench.prepare()) == "no-devices"


async def test_unprepare_is_fine_when_devices_are_unknown_or_never_prepared(bench: _Bench) -> None:
    """Undoing what was never done is no error."""
    reply = await bench.preparer.unprepare(UnprepareRequest(op_id="op", owner=_OWNER, devices=("gpu-acme-0", "gone-9")))

    assert reply.refusal is None
    assert bench.drivers["acme"].unprepared == [("gpu-acme-0",)]


async def test_unprepare_says_why_when_the_driver_fails(bench: _Bench) -> None:
    """A failed unprepare is told, so that the caller tries again."""
    bench.drivers["acme"].error = OSError("busy")

    reply = await bench.preparer.unprepare(UnprepareRequest(op_id="op", owner=_OWNER, devices=("gpu-acme-0",)))

    assert reply.refusal is not None
    assert reply.refusal.reasons[0].code == "driver-failed"


async def test_prepare_takes_nodes_from_the_runtimes_folder_when_one_is_named(tmp_path: Path) -> None:
    """A container sees /dev/toy0 as ever.

    The runtime makes it from the folder that the settings name. A node
    from elsewhere keeps its place.
    """
    bench = _Bench(tmp_path, runtime_dev="/machine/dev/")
    own, other = DeviceNode(path="/dev/toy0", permissions="r"), DeviceNode(path="/dev/x", host_path="/run/x")
    bench.drivers["acme"].nodes = (own, other)

    reply = await bench.prepare("gpu-acme-0")

    assert isinstance(reply.result, Prepared)
    assert reply.result.edits["gpu-acme-0"].device_nodes == (
        DeviceNode(path="/dev/toy0", host_path="/machine/dev/toy0", permissions="r"),
        other,
    )


class _ReadingToy(ToyDriver):
    """A driver that says of some devices that preparing them changes nothing."""

    reads: frozenset[str] = frozenset()

    def only_reads(self, devices: Sequence[Device]) -> bool:
        """Say so of the devices in `reads`."""
        return self.reads.issuperset(device.name for device in devices)


_KUBELET = Owner(kind=OwnerKind.DEVICE_PLUGIN, name="topobus.dev/gpu", uid="u2")


@pytest.mark.parametrize(
    ("owner", "names", "is_shared", "code"),
    [
        pytest.param(_KUBELET, ("gpu-reading-0", "gpu-reading-1"), False, "", id="reads"),
        pytest.param(_KUBELET, ("gpu-reading-0", "gpu-reading-2"), False, "not-ahead", id="one-acts"),
        pytest.param(_KUBELET, ("gpu-reading-0", "gpu-acme-0"), False, "not-ahead", id="driver-cannot-say"),
        pytest.param(_KUBELET, ("gpu-reading-0",), True, "not-ahead", id="shared"),
        pytest.param(_OWNER, ("gpu-reading-0",), False, "not-ahead", id="claim"),
    ],
)
async def test_prepare_ahead_is_refused_when_anything_might_change(
    bench: _Bench, owner: Owner, names: tuple[str, ...], is_shared: bool, code: str
) -> None:
    """Before the ledger has an owner only a driver that surely changes nothing is asked.

    Afterwards all are.
    """
    toy = _ReadingToy("reading", count=3)
    toy.reads = frozenset({"gpu-reading-0", "gpu-reading-1"})
    bench.add(toy)
    if is_shared:
        bench.devices["gpu-reading-0"] = msgspec.structs.replace(
            bench.devices["gpu-reading-0"], sharing=DeviceSharing(replicas=2)
        )
    request = PrepareRequest(op_id="op", owner=owner, devices=names, is_ahead=True)

    ahead = await bench.preparer.prepare(request)
    prepared_ahead = [*bench.drivers["acme"].prepared]
    journal_ahead = dict(bench.journal.entries)
    later = await bench.preparer.prepare(msgspec.structs.replace(request, op_id="op-2", is_ahead=False))

    assert (_code(ahead) if code else "") == code
    assert isinstance(ahead.result, Prepared) is not bool(code)
    assert (prepared_ahead, journal_ahead) == ([], {})
    assert isinstance(later.result, Prepared)
