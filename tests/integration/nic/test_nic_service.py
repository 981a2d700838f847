"""The nic service as a real process, asked over the bus: a real interface goes into a namespace and
comes back, also when the service is killed on the way.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from support.laws import steps
from support.nic_rig import FAR, NEAR, OWNER, NicRig, interface_config, ping, state_of
from support.reading import Reader
from support.real_interfaces import ip, network_namespace, veth_pair, why_not_here
from topobus.bus.bus import Bus
from topobus.formats.kubernetes.slices import slice_device
from topobus.formats.messages.catalogue import ATTACH, DETACH, INVENTORY, MACHINE, PREPARE, UNPREPARE
from topobus.formats.messages.messages import Prepared, PrepareRequest, UnprepareRequest
from topobus.formats.messages.sandbox_messages import Attached, AttachRequest, DetachRequest
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Device
from topobus.values.health import HealthState
from topobus.values.machine import Machine
from topobus.values.outcome import Refusal
from topobus.values.request import Owner
from topobus.values.sandbox import AttachedInterface, Sandbox

pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(why_not_here()), reason=why_not_here())]

NODE = "n1"
LIMIT_S = 60.0
CONFIG = interface_config(interface={"name": "net1", "mtu": 1400, "addresses": [NEAR]})
# An attach has seven acts with an intent and a mark each, besides its own beginning and end.
_LEAST_STEPS, _MOST_STEPS = 8, 100
ATTACHED = {"name": "net1", "addresses": (NEAR,), "mtu": 1400}


class Service:
    """The nic service, one life after the other, on one journal."""

    def __init__(self, bus: Bus, url: str, rig: NicRig, folder: Path) -> None:
        self.bus, self.rig = bus, rig
        self.journal = folder / "journal"
        self._environment = {
            **os.environ,
            "TOPOBUS_ALL__NODE": NODE,
            "TOPOBUS_ALL__NATS__URL": url,
            "TOPOBUS_ALL__HARDWARE__ROOT": "/",
            "TOPOBUS_ALL__HARDWARE__RESCAN_S": "0.3",
            "TOPOBUS_ALL__LOG__FORMAT": "json",
            "TOPOBUS_NIC__HEALTH__POLL_S": "0.1",
            "TOPOBUS_NIC__HEALTH__HOLD_S": "0.2",
            "TOPOBUS_NIC__JOURNAL__DIR": str(self.journal),
            # A busy machine takes long for some programs one after the
            # other; no test here waits for it.
            "TOPOBUS_NIC__DRIVERS__TIMEOUT_S": "60",
        }
        self.offer(rig.name)
        self._stack = AsyncExitStack()
        self._process: asyncio.subprocess.Process | None = None
        self._log: Reader[str] | None = None

    def share(self, shares: int) -> None:
        """Have the next life share the interface."""
        self._environment["TOPOBUS_NIC__INTERFACES__SHARE"] = json.dumps([{"name": self.rig.name, "shares": shares}])

    def offer(self, *names: str) -> None:
        """Set the allow-list of the next life."""
        self._environment["TOPOBUS_NIC__INTERFACES__OFFER"] = json.dumps([{"name": name} for name in names])

    async def start(self, *dies_at: str) -> None:
        """Start a life; `dies_at`: the verb, and the change of the journal at which it kills itself
        by SIGKILL then.
        """
        program = ["-m", "support.mortal_nic", *dies_at] if dies_at else ["-m", "topobus.nic.main"]
        environment = {**self._environment, "PYTHONPATH": str(Path(__file__).parents[2])}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *program, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        self._log = await self._stack.enter_async_context(Reader(_lines(self._process)))
        # From then on it answers.
        await self.logged("machine.received")

    async def logged(self, event: str) -> None:
        """Wait until this life has logged an event."""
        assert self._log is not None
        await self._log.until(lambda lines: any(f'"{event}"' in line for line in lines))

    async def survives(self, question: Coroutine[Any, Any, object]) -> bool:
        """Ask; whether an answer came, or the life has killed itself over it."""
        assert self._process is not None
        asked, ended = asyncio.create_task(question), asyncio.create_task(self._process.wait())
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
            is_alive = asked.done()
            for task in (asked, ended):
                task.cancel()
            await asyncio.gather(asked, ended, return_exceptions=True)
        assert is_alive or self._process.returncode == -signal.SIGKILL
        return is_alive

    async def end(self) -> None:
        """End this life as a crash would, if it still runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        await self._stack.aclose()
        self._stack = AsyncExitStack()

    async def device(self, **wanted: Any) -> Device:
        """Wait until the inventory has the device, in this state."""

        def fitting(change: Any) -> Device | None:
            device = change.value.device(self.rig.device.name) if change.value is not None else None
            return (
                device
                if device is not None and all(device.attributes.get(key) == value for key, value in wanted.items())
                else None
            )

        async with Reader(self.bus.watch(INVENTORY, node=NODE, device_class="nic")) as reader:
            changes = await reader.until(
                lambda items: any(fitting(change) is not None for change in items), timeout_s=LIMIT_S
            )
        return next(device for change in reversed(changes) if (device := fitting(change)) is not None)

    async def prepare(self, config: dict[str, Any] | None = None, op_id: str = "") -> Prepared | Refusal:
        """Prepare the device."""
        request = PrepareRequest(op_id=op_id, owner=OWNER, devices=(self.rig.device.name,), config=(config or CONFIG,))
        reply = await self.bus.ask(PREPARE, request, timeout_s=LIMIT_S, node=NODE, device_class="nic")
        assert isinstance(reply.result, Prepared | Refusal)
        return reply.result

    async def unprepare(self) -> Refusal | None:
        """Undo that."""
        request = UnprepareRequest(op_id="", owner=OWNER, devices=(self.rig.device.name,))
        return (await self.bus.ask(UNPREPARE, request, timeout_s=LIMIT_S, node=NODE, device_class="nic")).refusal

    async def attach(
        self, config: dict[str, Any] | None = None, *, owner: Owner = OWNER, sandbox: Sandbox | None = None
    ) -> object:
        """Attach the device to the pod's sandbox."""
        request = AttachRequest(
            op_id="",
            owner=owner,
            devices=(self.rig.device.name,),
            sandbox=sandbox or self.rig.sandbox,
            config=(config or CONFIG,),
        )
        return (await self.bus.ask(ATTACH, request, timeout_s=LIMIT_S, node=NODE, device_class="nic")).result

    async def detach(self, *, owner: Owner = OWNER, sandbox: Sandbox | None = None) -> Refusal | None:
        """Detach it."""
        request = DetachRequest(
            op_id="", owner=owner, devices=(self.rig.device.name,), sandbox=sandbox or self.rig.sandbox
        )
        return (await self.bus.ask(DETACH, request, timeout_s=LIMIT_S, node=NODE, device_class="nic")).refusal


async def _lines(process: asyncio.subprocess.Process) -> AsyncGenerator[str, None]:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        yield line.decode("utf-8", "replace")


@pytest_asyncio.fixture
async def service(bus: Bus, nats_server: NatsServer, rig: NicRig, tmp_path: Path) -> AsyncIterator[Service]:
    """The service, not started; the machine is published."""
    await bus.put(MACHINE, Machine(node=NODE, numa_nodes=(), cpus=(), generation=1), node=NODE)
    # Only the gateway may ask for an attachment.
    async with Bus.session(NatsSettings(url=nats_server.url), name="gateway") as gateway:
        made = Service(gateway, nats_server.url, rig, tmp_path)
        yield made
        await made.end()


async def test_interface_is_in_the_pod_and_comes_back_when_the_service_is_asked_over_the_bus(
    service: Service, rig: NicRig
) -> None:
    """Prepared, attached, answering, listed as before.

    Detached: the state to the last setting, and no journal file.
    """
    before = state_of(rig.name)
    await service.start()
    listed = await service.device()

    prepared = await service.prepare()
    attached = await service.attach()
    link, has_answer = rig.link_in_pod("net1"), ping(rig.pod, FAR)
    again, prepared_again = await service.attach(), await service.prepare(op_id="again")
    away = await service.device()
    detached, unprepared = await service.detach(), await service.unprepare()

    assert isinstance(prepared, Prepared)
    assert prepared.to_attach == (rig.device.name,)
    assert isinstance(attached, Attached)
    assert attached.interfaces[rig.device.name] == AttachedInterface(mac=listed.attributes["mac"], **ATTACHED)  # type: ignore[arg-type]
    assert (link["mtu"], has_answer) == (1400, True)
    assert (again, prepared_again) == (attached, prepared)
    assert (away.attributes, away.health.state) == (listed.attributes, HealthState.HEALTHY)
    assert (detached, unprepared) == (None, None)
    assert state_of(rig.name) == before
    assert list(service.journal.glob("*.json")) == []


async def test_slice_is_the_same_before_during_and_after_when_a_pod_has_the_interface(
    service: Service, rig: NicRig
) -> None:
    """No inventory that is published meanwhile tells another slice of the device: the hand-over
    changes neither an attribute nor a taint, so no generation.

    Other interfaces come while the pod has it and after it is back: then the service
    has looked anew, and published.
    """
    config = interface_config(interface={"name": "net1", "mtu": 1400, "mac": "02:73:00:00:00:88", "addresses": [NEAR]})
    with network_namespace() as elsewhere, veth_pair(elsewhere) as first, veth_pair(elsewhere, peer="peer2") as second:
        # Listed by name, so they are devices from the moment that they have these names.
        for name in (first, second):
            ip("link", "set", name, "name", f"{name}x")
        service.offer(rig.name, first, second)
        await service.start()
        async with Reader(service.bus.watch(INVENTORY, node=NODE, device_class="nic")) as inventories:
            await service.device()
            await service.prepare(config)
            attached = await service.attach(config)
            ip("link", "set", f"{first}x", "name", first)
            await inventories.until(
                lambda items: any(_has(change, f"nic-{first}") for change in items), timeout_s=LIMIT_S
            )
            link = rig.link_in_pod("net1")
            detached = await service.detach()
            ip("link", "set", f"{second}x", "name", second)
            changes = await inventories.until(
                lambda items: any(_has(change, f"nic-{second}") for change in items), timeout_s=LIMIT_S
            )

    published = [
        slice_device(device) for change in changes if change.value and (device := change.value.device(rig.device.name))
    ]
    assert isinstance(attached, Attached)
    assert (detached, link["address"]) == (None, "02:73:00:00:00:88")
    assert len(published) >= 3
    assert [device for device in published if device != published[0]] == []
    assert {"interface", "mac", "mtu", "linkSpeed"} <= published[0].attributes.keys()


def _has(change: Any, name: str) -> bool:
    """Say whether an inventory lists a device."""
    return change.value is not None and change.value.device(name) is not None


async def test_interface_stays_listed_as_it_was_when_the_service_was_killed_while_a_pod_has_it(
    service: Service, rig: NicRig
) -> None:
    """The pod keeps its network, the slice its attributes, and the next life takes the interface
    back as the first would have.
    """
    before = state_of(rig.name)
    await service.start()
    listed = await service.device()
    await service.prepare()
    attached = await service.attach()
    await service.end()

    with network_namespace() as elsewhere, veth_pair(elsewhere) as other:
        # One more device, so that this life has something to publish: by then it has looked for
        # all, and not found ours on the host.
        service.offer(rig.name, other)
        await service.start()
        has_answer = ping(rig.pod, FAR)
        await service.logged("inventory.published")
        away = await service.device()
    same = await service.attach()
    refusal = await service.detach()

    assert has_answer
    assert (away.attributes, away.health.state) == (listed.attributes, HealthState.HEALTHY)
    assert (same, refusal) == (attached, None)
    assert state_of(rig.name) == before


@pytest.mark.law
@pytest.mark.parametrize("verb", ["attach", "detach"])
async def test_interface_is_as_before_when_the_service_is_killed_at_any_step(
    verb: str, service: Service, rig: NicRig
) -> None:
    """SIGKILL before each change of the journal: the next life undoes what was begun before it
    answers anything.
    """
    before = state_of(rig.name)
    last_step = 0
    for step in steps(_MOST_STEPS):
        await service.start(verb, str(step))
        await service.device()
        if last_step:
            # A mortal life counts from its verb on; `unprepare` detaches as well, and waits for
            # what is left of the life before.
            assert await service.unprepare() is None
            assert state_of(rig.name) == before, f"killed at {last_step}"
            assert list(service.journal.glob("*.json")) == [], f"killed at {last_step}"
        if verb == "detach":
            assert isinstance(await service.attach(), Attached)
        is_alive = await service.survives(service.attach() if verb == "attach" else service.detach())
        await service.end()
        if is_alive:
            break
        last_step = step

    assert _LEAST_STEPS <= step - 1 < _MOST_STEPS - 2, f"{step - 1} steps"


@pytest.mark.parametrize(
    ("config", "field"),
    [
        pytest.param(
            {"interface": {"addresses": ["10.213.7.300/24"]}},
            "config[0].interface.addresses[0]",
            id="an address that is none",
        ),
        pytest.param({"interface": {"mtu": 70000}}, "config[0].interface.mtu", id="an MTU too large"),
        pytest.param({"vf": {"vlan": 5000}}, "config[0].vf.vlan", id="a VLAN of 5000"),
        pytest.param({"cni": {"network": "storage"}}, None, id="a CNI network that nobody has configured"),
    ],
)
async def test_prepare_refuses_the_field_and_changes_nothing(
    service: Service, rig: NicRig, config: dict[str, Any], field: str | None
) -> None:
    """The claim's author reads device, field, what stands there and what was wanted."""
    before = state_of(rig.name)
    await service.start()
    await service.device()

    refusal = await service.prepare(interface_config(**config))

    assert isinstance(refusal, Refusal)
    assert [reason.facts.get("device") for reason in refusal.reasons] == [rig.device.name]
    assert field is None or [reason.facts.get("field", reason) for reason in refusal.reasons] == [field]
    assert state_of(rig.name) == before
    assert list(service.journal.glob("*.json")) == []


async def test_two_claims_share_the_interface_also_when_the_service_was_killed_meanwhile(
    service: Service, rig: NicRig
) -> None:
    """Each has a child of its own and its own entry in the journal: one leaves, the other goes on.

    The parent is as before, and never was away.
    """
    before = state_of(rig.name)
    other = msgspec.structs.replace(OWNER, name="backup-net", uid="77aa")
    second = interface_config(interface={"name": "net1", "addresses": ["10.213.7.3/24"]})
    service.share(2)
    with network_namespace() as pod:
        sandbox = msgspec.structs.replace(rig.sandbox, id="sb-2", uid="pod-2", network_namespace=f"/run/netns/{pod}")
        await service.start()
        device = await service.device(shareMode="macvlan")
        first_attached, second_attached = (
            await service.attach(),
            await service.attach(second, owner=other, sandbox=sandbox),
        )
        await service.end()
        await service.start()
        refusal = await service.detach()
        answers = (ping(rig.pod, FAR), ping(pod, FAR))
        again = await service.attach(second, owner=other, sandbox=sandbox)
        last_refusal = await service.detach(owner=other, sandbox=sandbox)

    assert (device.allows_multiple, device.capacity) == (True, {"shares": 2})
    assert isinstance(first_attached, Attached)
    assert isinstance(second_attached, Attached)
    assert (refusal, last_refusal, again) == (None, None, second_attached)
    assert answers == (False, True)
    assert state_of(rig.name) == before
    assert list(service.journal.glob("*.json")) == []
