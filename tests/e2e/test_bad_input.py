"""Malformed input on every subject, bucket and stream of the catalogue: eight running services stay
up, ready and silent about tracebacks.

The tables are made from the catalogue, so a new ask, state or event is
covered as soon as it exists.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats.errors
import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg

from docpages.samples import sample
from support.alignment_nodes import container, pod
from support.malformed import GARBAGE, ODD_NAMES, spoilt
from support.running import LIMIT_S, NODE, Service, all_services, until_all_ready
from topobus.bus.bus import Bus, ChangeKind
from topobus.formats.kubernetes.built_in_classes import class_selector
from topobus.formats.messages.catalogue import ASKS, EVENTS, INVENTORY, OBJECT, PLACE, PLAN, RELEASE, STATES
from topobus.formats.messages.codec import decode, encode, to_builtins
from topobus.formats.messages.device_classes import DEVICE_SERVICES
from topobus.formats.messages.messages import ApiObject, PlaceRequest, ReleaseRequest
from topobus.formats.messages.nouns import CLUSTER, PREFIX, Ask
from topobus.formats.messages.plan_messages import PlanRequest
from topobus.process.config import NatsSettings
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Inventory
from topobus.values.errors import ContractError
from topobus.values.outcome import Placement

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

DEVICES = {"cpu": 224, "fpga": 2, "gpu": 8, "nic": 8}
# What an answer may say of itself when the request was bad; `internal` and `config` would be a
# lie about whose mistake it was.
STABLE_CODES = {"contract", "unavailable", "hardware", "busy"}
_AT_ONCE = 32
# A relay runs beside a node's own server, and here all share one.
_ASKS = tuple(ask for ask in ASKS if "relay" not in ask.writer)
_INBOXES = {"cli": "_INBOX.topobus-cli.raw", "gateway": "_INBOX.gateway.raw", "topology": "_INBOX.topology.raw"}
# Who asks by which ask: who may not would wait for an answer that nobody gives it.
_ASKERS = {f"{PREFIX}.{ask.name}.": next(name for name in _INBOXES if name in ask.readers) for ask in _ASKS}
_TRACES = ("Traceback", '"exception"', "service.crashed", "ask.failed")


@dataclass(frozen=True, kw_only=True)
class System:
    """The running system: its processes, a proper client and a raw one."""

    services: dict[str, Service]
    bus: Bus
    raw: Client
    """Asks as the CLI."""
    askers: dict[str, Client]
    """Raw clients by who they ask as."""
    server: NatsServer
    folder: Path

    async def ask(self, subject: str, data: bytes) -> Msg | None:
        """Ask with any bytes; None when nobody listens at the subject."""
        try:
            asker = next((name for prefix, name in _ASKERS.items() if subject.startswith(prefix)), "cli")
            return await self.askers[asker].request(subject, data, timeout=LIMIT_S)
        except nats.errors.NoRespondersError:
            return None

    async def store(self, subject: str, data: bytes) -> None:
        """Write any bytes into whatever stream takes the subject.

        Those that none takes are dropped.
        """
        with contextlib.suppress(nats.errors.NoRespondersError):
            await self.raw.request(subject, data, timeout=LIMIT_S)

    async def assert_up(self) -> None:
        """Check that each service runs still as the same process, is ready, and has no traceback in
        its log.
        """
        for name, service in self.services.items():
            assert service.process.returncode is None, (
                f"{name} ended with {service.process.returncode}: {service.raw[-3:]}"
            )
            await service.until_ready()
            assert not [line for line in service.raw if any(trace in line for trace in _TRACES)], name

    async def assert_well(self) -> None:
        """Check beside this that good requests are answered."""
        await self.assert_up()
        small = pod("well", container(cpus=1))
        placed = await self.bus.ask(PLACE, PlaceRequest(op_id=_op_id(), pod=small), node=NODE)
        released = await self.bus.ask(RELEASE, ReleaseRequest(op_id=_op_id(), owner=small.owner), node=NODE)
        planned = await self.bus.ask(PLAN, PlanRequest(op_id=_op_id(), pod=small, is_dry_run=True), node=CLUSTER)
        assert isinstance(placed.result, Placement)
        assert released.refusal is None
        assert planned.chosen is not None
        assert isinstance(planned.chosen.result, Placement)
        for ask in _ASKS:
            for subject in subjects(ask):
                assert judged(ask, await self.ask(subject, encode(sample(ask.request)))) != "nobody", subject


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with a short path."""
    made = Path(tempfile.mkdtemp(prefix="tb-"))
    yield made
    shutil.rmtree(made)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(folder: Path) -> AsyncIterator[System]:
    """All eight services on the recorded demo machine, ready, with all devices published, and well
    after all cases.
    """
    async with NatsServer() as server, started(server, folder) as made:
        yield made
        await made.assert_well()


@asynccontextmanager
async def started(server: NatsServer, folder: Path) -> AsyncIterator[System]:
    """Start the system on a server, and wait until it is complete.

    Its machine is its own: what is asked of it may be an operation.
    """
    build("dgx", folder / "machine")
    async with (
        Bus.session(NatsSettings(url=server.url), name="topobus-cli") as bus,
        all_services(server.url, folder) as services,
    ):
        askers = {name: await nats.connect(server.url, inbox_prefix=inbox) for name, inbox in _INBOXES.items()}
        made = System(services=services, bus=bus, raw=askers["cli"], askers=askers, server=server, folder=folder)
        await until_all_ready(services)
        await bus.provision()
        await until_complete(bus)
        yield made
        for asker in askers.values():
            await asker.close()


async def until_complete(
    bus: Bus, count: Callable[[Inventory], int] = lambda inventory: len(inventory.devices)
) -> None:
    """Wait until all devices of the demo machine stand in the bucket."""
    counts: dict[str, int] = {}
    async with asyncio.timeout(LIMIT_S), aclosing(bus.watch(INVENTORY, node=NODE)) as changes:
        async for change in changes:
            if change.kind is ChangeKind.PUT and change.value is not None:
                counts[change.parts["device_class"]] = count(change.value)
            if counts == DEVICES:
                return


async def until_well(bus: Bus) -> None:
    """Wait until all devices of the demo machine may be handed out again: one that a spoilt machine
    lacked was gone, and recovers for `health.hold_s`.
    """
    await until_complete(bus, lambda inventory: sum(device.health.is_allocatable for device in inventory.devices))


_numbers = itertools.count()


def _op_id() -> str:
    return f"well-{next(_numbers)}"


def subjects(ask: Ask[Any, Any]) -> list[str]:
    """Where an ask is answered: at the node, for each class; the cluster's asks at the cluster."""
    node = CLUSTER if ask.writer == ("controller",) else NODE
    classes = DEVICE_SERVICES if "device_class" in ask.parts else ("",)
    return [
        ask.subject(node=node, **({"device_class": device_class} if device_class else {})) for device_class in classes
    ]


def judged(ask: Ask[Any, Any], answer: Msg | None) -> str:
    """Give the code of an error answer, `answered` for a good one, `nobody`.

    Fails for an answer that no asker could read.
    """
    if answer is None:
        return "nobody"
    code = (answer.headers or {}).get("Topobus-Error")
    if code is not None:
        assert (answer.headers or {}).get("Topobus-Error-Message"), "an error without a sentence"
        return code
    decode(answer.data, ask.reply)
    return "answered"


def is_readable(data: bytes, kind: type) -> bool:
    """Say whether the bytes are a message after all: `{}` is one where no field is required."""
    try:
        decode(data, kind)
    except ContractError:
        return False
    return True


async def ask_all(system: System, ask: Ask[Any, Any], cases: Iterable[tuple[str, bytes]]) -> dict[str, str]:
    """Ask every case at every subject of an ask, some at once; case to what came of it."""
    outcomes: dict[str, str] = {}
    room = asyncio.Semaphore(_AT_ONCE)

    async def ask_case(subject: str, name: str, data: bytes) -> None:
        async with room:
            outcomes[f"{subject} {name}"] = judged(ask, await system.ask(subject, data))

    async with asyncio.TaskGroup() as group:
        for subject in subjects(ask):
            for name, data in cases:
                group.create_task(ask_case(subject, name, data))
    return outcomes


@pytest.mark.parametrize("ask", _ASKS, ids=lambda ask: ask.name)
async def test_ask_is_answered_with_a_stable_error_when_it_is_no_message(system: System, ask: Ask[Any, Any]) -> None:
    """Bytes that are no message get an error answer with code `contract`, whatever they are, and
    harm nobody.
    """
    cases = {name: data for name, data in GARBAGE.items() if not is_readable(data, ask.request)}
    outcomes = await ask_all(system, ask, cases.items())

    assert len(cases) >= len(GARBAGE) - 4, "an ask of which everything is a message tests nothing"
    assert set(outcomes.values()) == {"contract"}, outcomes
    await system.assert_up()


@pytest.mark.parametrize("ask", _ASKS, ids=lambda ask: ask.name)
async def test_ask_is_answered_when_one_place_of_the_message_is_spoilt(system: System, ask: Ask[Any, Any]) -> None:
    """Wrong types, missing fields, counts and names out of all range: each is answered, with a
    result or a stable code, never as our own defect.
    """
    outcomes = await ask_all(system, ask, spoilt(to_builtins(sample(ask.request))))

    assert {name: code for name, code in outcomes.items() if code not in {*STABLE_CODES, "answered"}} == {}
    assert "contract" in outcomes.values()
    await system.assert_up()


async def test_ask_finds_nobody_when_node_or_class_is_unknown(system: System) -> None:
    """Another node, an unknown class, a part too many or too few: the server says at once that
    nobody is there.
    """
    asked = [
        await system.ask(f"{PREFIX}.{ask.name}.{rest}", encode(sample(ask.request)))
        for ask in _ASKS
        for rest in ("elsewhere", "elsewhere.gpu", f"{NODE}.quantum", f"{NODE}.gpu.more", "-", "*x")
    ]

    assert set(asked) == {None}
    await system.assert_well()


async def revisions(bus: Bus) -> list[int]:
    """Revisions of all objects and inventories."""
    return [entry.revision for entry in await bus.list(OBJECT)] + [
        entry.revision for entry in await bus.list(INVENTORY)
    ]


@pytest.mark.parametrize("ask", _ASKS, ids=lambda ask: ask.name)
async def test_ask_writes_nowhere_when_its_reply_subject_is_none_or_not_an_inbox(
    system: System, ask: Ask[Any, Any]
) -> None:
    """An ask without a reply subject, or with one that is a bucket, a stream or another ask, harms
    nothing.
    """
    data = encode(sample(ask.request))
    before = await revisions(system.bus)
    for subject in subjects(ask):
        for reply in (
            "",
            subject,
            f"$KV.{INVENTORY.home(device_class='gpu').bucket}.{NODE}.gpu",
            f"{PREFIX}.decision.{NODE}",
            "$JS.API.STREAM.LIST",
        ):
            for payload in (b"", b"{}", data):
                await system.raw.publish(subject, payload, reply=reply)
    await system.raw.flush()
    await system.assert_well()
    assert await revisions(system.bus) == before


def bucket_keys(state: Any) -> list[str]:
    """The key that our services read, and some that none should ever have."""
    parts = {
        "node": NODE,
        "device_class": "gpu",
        "fleet": CLUSTER,
        "kind": "resourceclaim",
        "namespace": "default",
        "name": "spoilt",
    }
    good = state.key(**{part: parts[part] for part in state.parts})
    odd = [
        name for name in ODD_NAMES if name and name.isascii() and not set(name) & set(" .*>/\x00") and len(name) < 100
    ]
    return [good, "one", "a.b.c.d.e", *odd, f"{good}.more", f"elsewhere{good.removeprefix(NODE)}"]


async def fill(system: System, state: Any) -> None:
    """Write garbage into every key of a state's buckets, and every spoilt variant into the key that
    is read.
    """
    keys = bucket_keys(state)
    messages = [
        *GARBAGE.values(),
        *(data for _, data in itertools.islice(spoilt(to_builtins(sample(state.message))), 400)),
    ]
    for bucket in state.buckets():
        for key in keys:
            for data in (GARBAGE if key == keys[0] else {"no-json": b"{", "list": b"[]"}).values():
                await system.store(f"$KV.{bucket.bucket}.{key}", data)
        for data in messages:
            await system.store(f"$KV.{bucket.bucket}.{keys[0]}", data)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
async def test_system_goes_on_when_a_bucket_is_full_of_garbage(system: System, state: Any) -> None:
    """Bytes that are no value, and values that make no sense, in keys that are read and in keys
    that should not be: nothing falls over.
    """
    good = [(entry.parts, entry.value) for entry in await system.bus.list(state)]

    await fill(system, state)
    for parts, value in good:
        await system.bus.put(state, value, **parts)
    await until_complete(system.bus)
    await until_well(system.bus)

    await system.assert_well()


CLAIM: dict[str, Any] = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceClaim",
    "metadata": {"name": "spoilt", "namespace": "default", "uid": "u-1", "creationTimestamp": "2026-01-02T03:04:05Z"},
    "spec": {
        "devices": {
            "requests": [
                {
                    "name": "gpu",
                    "exactly": {
                        "deviceClassName": "spoilt",
                        "count": 1,
                        "selectors": [{"cel": {"expression": class_selector("gpu")}}],
                    },
                }
            ],
            "constraints": [{"requests": ["gpu"], "matchAttribute": "resource.kubernetes.io/pcieRoot"}],
        }
    },
}
CLASS: dict[str, Any] = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "DeviceClass",
    "metadata": {"name": "spoilt", "uid": "u-2"},
    "spec": {"selectors": [{"cel": {"expression": class_selector("gpu")}}]},
}
POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "spoilt", "namespace": "default", "uid": "u-3"},
    "spec": {
        "containers": [
            {"name": "main", "resources": {"limits": {"cpu": "2", "topobus.dev/gpu": "1"}, "claims": [{"name": "c"}]}}
        ],
        "resourceClaims": [{"name": "c", "resourceClaimName": "spoilt"}],
    },
}


@pytest.mark.parametrize("good", [CLAIM, CLASS, POD], ids=lambda good: str(good["kind"]))
async def test_controller_goes_on_when_an_object_has_one_place_spoilt(system: System, good: dict[str, Any]) -> None:
    """Every place of a class, a claim and a pod spoilt in every way, written past the CLI's check:
    a good claim is allocated afterwards.
    """
    subjects_of = {
        kind: f"$KV.{OBJECT.bucket}.{kind}.{space}.spoilt"
        for kind, space in (("deviceclass", "_"), ("resourceclaim", "default"))
    }
    subjects_of["pod"] = f"$KV.{OBJECT.bucket}.pod.default.spoilt"
    for _, data in spoilt(good):
        await system.store(subjects_of[good["kind"].lower()], data)
    for good_object in (CLAIM, CLASS, POD):
        await system.bus.delete(OBJECT, **parts_of(good_object, "spoilt"))

    await system.assert_well()
    await until_allocated(system.bus, f"good-{good['kind'].lower()}")


def parts_of(good_object: dict[str, Any], name: str) -> dict[str, str]:
    """The parts of an object's key."""
    kind = str(good_object["kind"]).lower()
    return {"kind": kind, "namespace": CLUSTER if kind == "deviceclass" else "default", "name": name}


async def until_allocated(bus: Bus, name: str) -> None:
    """Write a class and a claim, wait for the allocation, and take both away again."""
    whole_class = {**CLASS, "metadata": {"name": name, "uid": f"uid-{name}"}}
    exactly = {"deviceClassName": name, "count": 1}
    whole_claim = {
        **CLAIM,
        "metadata": {**CLAIM["metadata"], "name": name, "uid": f"uid-{name}"},
        "spec": {"devices": {"requests": [{"name": "cpu", "exactly": exactly}]}},
    }
    whole_class["spec"] = {"selectors": [{"cel": {"expression": class_selector("cpu")}}]}
    for whole in (whole_class, whole_claim):
        await bus.put(OBJECT, decode(encode(whole), ApiObject), **parts_of(whole, name))
    async with asyncio.timeout(LIMIT_S), aclosing(bus.watch(OBJECT, kind="resourceclaim", name=name)) as changes:
        async for change in changes:
            if change.value is not None and change.value.status.get("allocation"):
                break
    for whole in (whole_claim, whole_class):
        await bus.delete(OBJECT, **parts_of(whole, name))


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
async def test_system_goes_on_when_a_stream_is_full_of_garbage(system: System, event: Any) -> None:
    """Bytes that are no event, and events that make no sense, on subjects of known and unknown
    devices: nothing falls over.
    """
    parts = {"node": NODE, "device_class": "gpu", "device": "gpu-0000-18-00-0"}
    subject_of_ours = event.subject(**{part: parts[part] for part in event.parts})
    unknown = event.subject(**{part: f"un{parts[part]}" for part in event.parts})
    for subject in (subject_of_ours, unknown, f"{subject_of_ours}.more", f"{PREFIX}.{event.name}"):
        for data in GARBAGE.values():
            await system.store(subject, data)
    for _, data in itertools.islice(spoilt(to_builtins(sample(event.message))), 300):
        await system.store(subject_of_ours, data)

    await system.assert_well()


async def test_system_starts_when_buckets_and_streams_are_full_of_garbage(short_folder: Path) -> None:
    """Garbage in every key that a service reads at its start but the ledger's, and in every stream,
    does not keep the system down.
    """
    async with NatsServer() as server:
        async with started(server, short_folder) as system:
            parts = {"node": NODE, "device_class": "gpu", "device": "gpu-0000-18-00-0"}
            for event in EVENTS:
                for data in GARBAGE.values():
                    await system.store(event.subject(**{part: parts[part] for part in event.parts}), data)
            for state in STATES:
                if state.name != "ledger":
                    for bucket, key in itertools.product(state.buckets(), bucket_keys(state)):
                        for data in (*GARBAGE.values(), b'{"node": 5}'):
                            await system.store(f"$KV.{bucket.bucket}.{key}", data)
            for service in system.services.values():
                assert await service.stop() == 0
        shutil.rmtree(short_folder / "k", ignore_errors=True)
        async with started(server, short_folder) as again:
            await again.assert_well()
