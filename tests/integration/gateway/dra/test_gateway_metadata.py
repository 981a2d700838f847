"""A gateway gives claims' containers the files that describe their devices: with the preparation,
over restarts and a reboot, until the claim is undone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from support.gateway_rig import Rig, make_rig
from support.node_plane import claim, device
from topobus.formats.messages.catalogue import OBJECT
from topobus.gateway.config import MetadataSettings
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import ClaimReference
from topobus.values.dra_names import DRIVER

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

REFERENCE = ClaimReference(name="training", uid="c1a1", drivers=(DRIVER,))
MIXED = ClaimReference(name="mixed", uid="c2a2", drivers=(DRIVER,))
MOUNT = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/training/want-gpu/topobus.dev-metadata.json"


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """A gateway that describes devices, and a claim for two."""
    async with make_rig(nats_server.url) as made:
        made.settings = msgspec.structs.replace(made.settings, metadata=MetadataSettings(versions=("v1alpha1",)))
        await made.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        await made.bus.put(
            OBJECT,
            claim("training", "c1a1", "gpu-0", "gpu-1"),
            kind="resourceclaim",
            namespace="default",
            name="training",
        )
        yield made


def mounts(rig: Rig) -> dict[str, tuple[str, str]]:
    """What the CDI files mount: device to where from and where to."""
    found_mounts: dict[str, tuple[str, str]] = {}
    for path in rig.cdi_dir.glob("*.json"):
        file: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for entry in file["devices"]:
            for mount in entry["containerEdits"].get("mounts", ()):
                found_mounts[f"{file['kind']}={entry['name']}"] = (mount["hostPath"], mount["containerPath"])
    return found_mounts


def devices(path: str) -> list[str]:
    """The devices that a file describes."""
    document: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return [described["name"] for request in document["requests"] for described in request["devices"]]


def reboot(rig: Rig, *paths: str) -> None:
    """Remove what a reboot and a careless hand remove."""
    shutil.rmtree(rig.cdi_dir)
    for path in paths:
        Path(path).unlink()


async def test_files_live_as_long_as_their_claim(rig: Rig) -> None:
    """Kubelet hears of the file's CDI device with the request's first device.

    A restart makes both files again; unprepare removes them.
    """
    async with rig.gateway(), rig.kubelet:
        await rig.kubelet.wait_for_driver(DRIVER)
        (prepared,) = await rig.kubelet.prepare_claims([REFERENCE])
    (name,) = {name for claim_device in prepared.devices for name in claim_device.cdi_devices if "metadata" in name}
    source, destination = mounts(rig)[name]
    described = devices(source)
    reboot(rig, source)
    async with rig.gateway(), rig.kubelet:
        await rig.kubelet.wait_for_driver(DRIVER)
        again = (mounts(rig), devices(source))
        (anew,) = await rig.kubelet.prepare_claims([REFERENCE])
        errors = await rig.kubelet.unprepare_claims([REFERENCE])

    assert prepared.error == ""
    assert (destination, described) == (MOUNT, ["gpu-0", "gpu-1"])
    assert again == ({name: (source, MOUNT)}, ["gpu-0", "gpu-1"])
    assert anew.devices == prepared.devices
    assert (errors, mounts(rig), Path(source).exists()) == ({}, {}, False)  # noqa: ASYNC240  (nothing runs beside)


async def test_one_file_describes_the_devices_of_all_classes_of_a_request(rig: Rig) -> None:
    """A DeviceClass may select devices of several classes: whichever of them a container gets, the
    request's one file tells of all.
    """
    await rig.plane.show("nic", device("nic-0", 0))
    value = claim("mixed", MIXED.uid, "gpu-0", "nic-0")
    for result in value.status["allocation"]["devices"]["results"]:
        result["request"] = "any"
    await rig.plane.store(value)
    async with rig.gateway(), rig.kubelet:
        await rig.kubelet.wait_for_driver(DRIVER)
        (prepared,) = await rig.kubelet.prepare_claims([MIXED])
        mounted = mounts(rig)
        (source,) = {source for source, _ in mounted.values()}
        described = devices(source)
        errors = await rig.kubelet.unprepare_claims([MIXED])

    assert prepared.error == ""
    assert {destination for _, destination in mounted.values()} == {MOUNT.replace("training/want-gpu", "mixed/any")}
    assert mounted.keys() == {
        name for claim_device in prepared.devices for name in claim_device.cdi_devices if "metadata" in name
    }
    assert described == ["gpu-0", "nic-0"]
    assert (errors, mounts(rig), Path(source).exists()) == ({}, {}, False)  # noqa: ASYNC240  (nothing runs beside)
