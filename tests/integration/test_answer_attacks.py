"""Attacks on answers, on a server without users: somebody beside the real gpu service answers `prepare` first, and nothing of it reaches kubelet."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import nats
import pytest
import pytest_asyncio
from nats.aio.msg import Msg

from support.gateway_rig import Rig, make_rig
from support.kubelet_plugins import TrivialPlugin
from support.kubelet_plugins import device as listed
from support.node_plane import NODE, claim
from support.running import service
from topobus.contracts.catalogue import INVENTORY, PREPARE
from topobus.contracts.codec import encode
from topobus.contracts.messages import Prepared, PrepareReply
from topobus.devicekit import cdi_files
from topobus.domain.edits import ContainerEdits, DeviceNode
from topobus.gateway.config import ForeignSettings
from topobus.gateway.dra import claim_files
from topobus.gateway.dra.checkpoint import Checkpoint
from topobus.runtime.proof import AnswerSettings, make_keys
from topobus.runtime.reply_inbox import Expectation
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import Admission, ClaimReference, Container, Pod

pytestmark = pytest.mark.integration

DRIVER = "gpu.topobus.dev"
UID = "3cec39ef-a300-4ce1-90fc-10e64dcb86ca"
TRAINING = ClaimReference(name="training", uid=UID, drivers=(DRIVER,))
ROUNDS = 10
# Somebody else's GPU: nothing that the class may not give, so that only its sender is wrong with it.
FORGED = ContainerEdits(device_nodes=(DeviceNode(path="/dev/nvidia7"),))


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Rig]:
    """A gateway's surroundings without device services, a recorded machine, and a claim for its first GPU."""
    build("dgx", tmp_path / "machine")
    async with make_rig(nats_server.url, classes=()) as made, service("discovery", nats_server.url, _settings(tmp_path)):
        yield made


def _settings(folder: Path) -> dict[str, str]:
    return {"TOPOBUS_ALL__HARDWARE__ROOT": str(folder / "machine")}


@asynccontextmanager
async def _gpu_service(rig: Rig, folder: Path, key_dir: str = "") -> AsyncIterator[str]:
    """The real gpu service; gives the name of its first device, for which there is a claim."""
    async with service("gpu", rig.url, {**_settings(folder), "TOPOBUS_GPU__ANSWERS__KEY_DIR": key_dir}):
        async for change in rig.bus.watch(INVENTORY, node=NODE, device_class="gpu"):
            if change.value is not None and change.value.devices:
                name = change.value.devices[0].name
                break
        await rig.plane.store(claim("training", UID, name))
        yield name


@asynccontextmanager
async def _racer(rig: Rig) -> AsyncIterator[list[str]]:
    """Answer every `prepare` of the node's GPUs at once, as anybody may who reaches the server; gives the subjects answered at."""
    answered: list[str] = []
    client = await nats.connect(rig.url)

    async def answer(message: Msg) -> None:
        if "Topobus-Ping" not in (message.headers or {}) and "Topobus-Twin" not in (message.headers or {}):
            answered.append(message.reply)
            names = msgspec.json.decode(message.data)["devices"]
            await client.publish(message.reply, encode(PrepareReply(result=Prepared(edits=dict.fromkeys(names, FORGED)))))
            await client.flush()

    await client.subscribe(PREPARE.subject(node=NODE, device_class="gpu"), cb=answer)
    await client.flush()
    try:
        yield answered
    finally:
        await client.close()


class _SlowDisk:
    """Writes a CDI file when both answers to its preparation have been seen: the moment that an attacker cannot choose, made the worst for the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._both_came = threading.Event()
        taken: Counter[str] = Counter()
        take = Expectation.take

        def counted(expected: Expectation, message: Msg) -> None:
            take(expected, message)
            taken[expected.subject] += 1
            if taken[expected.subject] == 2:
                self._both_came.set()

        def write(folder: Path, name: str, content: bytes) -> None:
            assert self._both_came.wait(30.0)
            self._both_came.clear()
            cdi_files.write(folder, name, content)

        monkeypatch.setattr(Expectation, "take", counted)
        monkeypatch.setattr(claim_files, "write", write)


async def test_claim_is_refused_when_somebody_answers_beside_the_real_service(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keys nobody knows which of two answers is the service's: kubelet gets neither, no CDI file stays, and the claim is not called prepared."""
    _SlowDisk(monkeypatch)
    errors = []
    async with _gpu_service(rig, tmp_path), _racer(rig) as answered, rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        for _ in range(ROUNDS):
            (answer,) = await rig.kubelet.prepare_claims([TRAINING])
            errors.append(answer.error)

    assert [error for error in errors if "two answers came from gpu services" not in error] == []
    assert len(answered) == ROUNDS
    assert list(rig.cdi_dir.iterdir()) == []
    assert [entry.is_prepared for entry in Checkpoint.load(Path(rig.settings.checkpoint_path)).entries()] == [False]


async def test_claim_gets_the_real_answer_when_the_service_has_a_key(rig: Rig, tmp_path: Path) -> None:
    """With a key a forged answer is as if it had not come, however early: each time the real service's edits are written."""
    keys = tmp_path / "keys"
    make_keys(keys, ["gpu"])
    paths = []
    async with (
        _gpu_service(rig, tmp_path, str(keys)),
        _racer(rig) as answered,
        rig.kubelet,
        rig.gateway(answers=AnswerSettings(key_dir=str(keys))),
    ):
        await rig.kubelet.wait_for_driver(DRIVER)
        for _ in range(ROUNDS):
            (answer,) = await rig.kubelet.prepare_claims([TRAINING])
            assert answer.error == ""
            (file,) = rig.cdi_dir.iterdir()
            spec = msgspec.json.decode(file.read_bytes())
            paths.append([node["path"] for device in spec["devices"] for node in device["containerEdits"].get("deviceNodes", ())])
            assert not await rig.kubelet.unprepare_claims([TRAINING])

    assert len(answered) == ROUNDS
    assert {tuple(path) for path in paths} == {tuple(paths[0])}
    assert paths[0] != []
    assert "/dev/nvidia7" not in paths[0]


async def test_claim_gets_the_real_answer_when_a_plugin_of_others_has_registered(rig: Rig, tmp_path: Path) -> None:
    """The gateway serves that plugin's class itself, and demands the proofs of the others as before; its own answers prove what is demanded of them."""
    keys, others = tmp_path / "keys", rig.root / "others"
    make_keys(keys, ["gpu", "widget-acme"])
    others.mkdir()
    async with (
        _gpu_service(rig, tmp_path, str(keys)),
        rig.kubelet,
        rig.gateway(answers=AnswerSettings(key_dir=str(keys)), foreign=ForeignSettings(dir=str(others), look_s=0.05)),
    ):
        await rig.readiness.until(lambda report: report.get("foreign-plugins", "").startswith("ready"))
        async with TrivialPlugin(others, "acme.example/widget", [listed("w", 0)]) as plugin:
            assert await plugin.register() == ""
            await rig.kubelet.wait_for_resource("acme.example/widget", allocatable=1)
            widget = Container(name="main", resources={"acme.example/widget": 1})
            admitted = await rig.kubelet.admit(Pod(name="p", uid="pod-u", containers=(widget,)))
            await rig.kubelet.wait_for_driver(DRIVER)
            async with _racer(rig) as answered:
                (answer,) = await rig.kubelet.prepare_claims([TRAINING])
            (file,) = rig.cdi_dir.iterdir()

    assert isinstance(admitted, Admission), admitted
    assert answer.error == ""
    assert len(answered) == 1
    assert b"/dev/nvidia7" not in file.read_bytes()


async def test_claim_is_refused_when_the_answerer_has_another_key(rig: Rig, tmp_path: Path) -> None:
    """A service whose key is not the gateway's prepares nothing: its answers are ignored until they agree."""
    make_keys(tmp_path / "ours", ["gpu"])
    make_keys(tmp_path / "theirs", ["gpu"])
    deadlines = msgspec.structs.replace(rig.settings.deadlines, prepare_s=1.0, claim_retry_s=0.0)
    async with (
        _gpu_service(rig, tmp_path, str(tmp_path / "theirs")),
        rig.kubelet,
        rig.gateway(answers=AnswerSettings(key_dir=str(tmp_path / "ours")), deadlines=deadlines),
    ):
        await rig.kubelet.wait_for_driver(DRIVER)
        (answer,) = await rig.kubelet.prepare_claims([TRAINING])

    assert "no answer from gpu on" in answer.error
    assert list(rig.cdi_dir.iterdir()) == []
