"""Files that describe devices to containers: the format and the places of Kubernetes' own library,
whole or not at all, and gone with their claim.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from topobus.formats.containers.cdi import CdiDevice, CdiSpec, render
from topobus.formats.messages.messages import Prepared
from topobus.gateway.claims.claim_metadata import ClaimMetadata
from topobus.gateway.claims.claims import answer_of
from topobus.gateway.claims.rules.claim_allocation import AllocatedDevice
from topobus.gateway.claims.rules.claim_entry import ClaimEntry, SandboxAttachment
from topobus.gateway.claims.rules.device_metadata import DescribedClaim, documents
from topobus.gateway.config import GatewaySettings, MetadataSettings, check
from topobus.gateway.containers.rules.edit_limits import EditRights, refuse_forbidden
from topobus.values.device import Device, Inventory
from topobus.values.edits import ContainerEdits, Mount
from topobus.values.errors import ConfigError
from topobus.values.names import ClaimUid
from topobus.values.pci import PciAddress
from topobus.values.sandbox import AttachedInterface, Sandbox

NET1 = AttachedInterface(name="net1", mac="02:00:00:00:00:01", addresses=("10.1.2.3/24",))
DEVICES = (
    AllocatedDevice(request="fast", pool="n1", device="nic-0"),
    AllocatedDevice(request="fast", pool="n1", device="nic-1"),
    AllocatedDevice(request="slow", pool="n1", device="nic-2", alternative="old"),
)
ENTRY = ClaimEntry(
    namespace="default",
    name="nets-x7f2k",
    uid=ClaimUid("3cec"),
    device_class="nic",
    attempt="a",
    devices=DEVICES,
    is_prepared=True,
)
NIC = Device(
    name="nic-0",
    device_class="nic",
    model="ConnectX-7",
    pci=PciAddress.parse("0000:3b:00.0"),
    attributes={"rdma": True, "linkSpeed": 400},
)


def metadata(folder: Path, *versions: str) -> ClaimMetadata:
    """The files of a node with one known device."""
    inventory = Inventory(node="n1", device_class="nic", generation=1, devices=(NIC,))
    return ClaimMetadata(folder, versions or ("v1alpha1",), lambda: {"nic": inventory}, lambda _: ())


async def described(files: ClaimMetadata, entry: ClaimEntry = ENTRY) -> ClaimEntry:
    """An entry that was described."""
    return msgspec.structs.replace(entry, has_metadata=await files.describe(entry))


def names(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def leave(folder: Path, *paths: str) -> None:
    """Make empty files in folders of their own."""
    for path in paths:
        (folder / path).parent.mkdir()
        (folder / path).write_text("", encoding="utf-8")


def remove(path: str) -> None:
    """Remove a file."""
    Path(path).unlink()


def read(path: str) -> dict[str, Any]:
    """Read a file with one version."""
    document: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return document


async def test_file_has_a_requests_devices_with_their_attributes(tmp_path: Path) -> None:
    """Kind, version, claim, request and each of its devices as a slice shows it.

    What no inventory has stands without attributes.
    """
    files = metadata(tmp_path)
    entry = await described(files)

    assert read(files.files(entry)["fast"]) == {
        "kind": "DeviceMetadata",
        "apiVersion": "metadata.resource.k8s.io/v1alpha1",
        "metadata": {"name": "nets-x7f2k", "namespace": "default", "uid": "3cec", "generation": 1},
        "requests": [
            {
                "name": "fast",
                "devices": [
                    {
                        "driver": "topobus.dev",
                        "pool": "n1",
                        "name": "nic-0",
                        "attributes": {
                            "resource.kubernetes.io/pciBusID": {"string": "0000:3b:00.0"},
                            "class": {"string": "nic"},
                            "model": {"string": "ConnectX-7"},
                            "linkSpeed": {"int": 400},
                            "rdma": {"bool": True},
                        },
                    },
                    {"driver": "topobus.dev", "pool": "n1", "name": "nic-1"},
                ],
            }
        ],
    }
    assert read(files.files(entry)["slow"])["requests"][0]["name"] == "slow/old"


async def test_network_data_comes_with_the_attachment_and_counts_a_generation(tmp_path: Path) -> None:
    """Once more with the same is no change; a pod that comes later has its own."""
    files = metadata(tmp_path)
    entry = await described(files)
    for interfaces in ({"nic-0": NET1}, {"nic-0": NET1}, {"nic-0": msgspec.structs.replace(NET1, name="net2")}):
        await files.attached(entry, interfaces)

    document = read(files.files(entry)["fast"])
    network = {"interfaceName": "net2", "hardwareAddress": "02:00:00:00:00:01", "ips": ["10.1.2.3/24"]}
    assert (document["metadata"]["generation"], document["requests"][0]["devices"][0]["networkData"]) == (3, network)
    assert read(files.files(entry)["slow"])["metadata"]["generation"] == 1


async def test_request_with_devices_of_two_classes_has_one_file(tmp_path: Path) -> None:
    """Both classes mount the same file at the same place, whoever wrote it last.

    It has the devices of both, with what those of either became, and counts no generation for the
    second writer.
    """
    gpu = AllocatedDevice(request="fast", pool="n1", device="gpu-0")
    nics = msgspec.structs.replace(ENTRY, devices=DEVICES[:1], has_metadata=True)
    attachment = SandboxAttachment(
        sandbox=Sandbox(id="s", uid="u", namespace="d", name="p"), is_attached=True, interfaces={"nic-0": NET1}
    )
    gpus = msgspec.structs.replace(ENTRY, device_class="gpu", devices=(gpu,), has_metadata=True)
    entries = {"gpu": gpus, "nic": nics}
    files = ClaimMetadata(tmp_path, ("v1alpha1",), dict, lambda _: entries.values())
    await files.describe(nics)
    await files.describe(gpus)
    first = read(files.files(nics)["fast"])
    entries["nic"] = msgspec.structs.replace(nics, attachment=attachment)
    await files.attached(entries["nic"], {"nic-0": NET1})
    await files.describe(gpus)

    document = read(files.files(nics)["fast"])

    assert files.files(gpus) == files.files(nics)
    assert [device["name"] for device in first["requests"][0]["devices"]] == ["gpu-0", "nic-0"]
    assert (first["metadata"]["generation"], document["metadata"]["generation"]) == (1, 2)
    assert ["networkData" in device for device in document["requests"][0]["devices"]] == [False, True]


def test_file_is_a_stream_of_versions() -> None:
    """A reader takes the first that it knows."""
    claim = DescribedClaim(namespace="d", name="c", uid=ClaimUid("u"), driver="topobus.dev", devices=DEVICES[:1])

    text = documents(claim, ("v1beta1", "v1alpha1"), {"fast": 4})["fast"].decode()

    first, end = json.JSONDecoder().raw_decode(text)
    second, _ = json.JSONDecoder().raw_decode(text[end:].lstrip())
    assert [document["apiVersion"].partition("/")[2] for document in (first, second)] == ["v1beta1", "v1alpha1"]
    assert first["metadata"] == second["metadata"]


@pytest.mark.parametrize(
    ("pod_claim_name", "folder"),
    [("", "resourceclaims/nets-x7f2k"), ("nets", "resourceclaimtemplates/nets")],
    ids=["claim", "template"],
)
async def test_container_finds_the_file_where_kubernetes_puts_it(
    tmp_path: Path, pod_claim_name: str, folder: str
) -> None:
    """By the claim's name, or by the name that its pod knows it by.

    Read-only, under a CDI name of its own that comes with the request's first device.
    """
    files = metadata(tmp_path)
    entry = await described(files, msgspec.structs.replace(ENTRY, pod_claim_name=pod_claim_name))
    spec = files.described(entry)

    assert spec is not None
    (fast, slow) = spec.devices
    assert (fast.name, fast.edits.mounts[0].host_path) == ("claim-3cec_metadata-fast", files.files(entry)["fast"])
    base = "/var/run/kubernetes.io/dra-device-attributes"
    assert [mount.container_path for mount in (fast.edits.mounts[0], slow.edits.mounts[0])] == [
        f"{base}/{folder}/fast/topobus.dev-metadata.json",
        f"{base}/{folder}/slow/topobus.dev-metadata.json",
    ]
    assert json.loads(render(spec))["devices"][0]["containerEdits"]["mounts"][0]["options"] == ["ro", "bind"]
    assert [(device.device, device.cdi_devices) for device in answer_of([entry])] == [
        ("nic-0", ("topobus.dev/nic=claim-3cec_metadata-fast",)),
        ("nic-1", ()),
        ("nic-2", ("topobus.dev/nic=claim-3cec_metadata-slow",)),
    ]


async def test_cdi_file_keeps_what_the_driver_gives(tmp_path: Path) -> None:
    """The mounts come beside the devices' own edits, which stand in the checkpoint as they were."""
    own = CdiSpec(
        vendor="topobus.dev",
        device_class="nic",
        devices=(CdiDevice(name="claim-3cec-nic-0", edits=ContainerEdits(env={"A": "1"})),),
    )
    files = metadata(tmp_path)
    entry = await described(files, msgspec.structs.replace(ENTRY, cdi=own))

    spec = files.described(entry)

    assert spec is not None
    assert [device.name for device in spec.devices] == [
        "claim-3cec-nic-0",
        "claim-3cec_metadata-fast",
        "claim-3cec_metadata-slow",
    ]
    assert entry.cdi == own


async def test_claim_has_no_files_when_no_version_is_set(tmp_path: Path) -> None:
    """Off, nothing is written and nothing is mounted; a claim that has files keeps them."""
    off = ClaimMetadata(tmp_path, (), dict, lambda _: ())
    entry = await described(off)
    before = await described(metadata(tmp_path))
    await off.attached(before, {"nic-0": NET1})

    assert (entry.has_metadata, off.described(entry), [device.cdi_devices for device in answer_of([entry])]) == (
        False,
        None,
        [(), (), ()],
    )
    assert "networkData" in read(off.files(before)["fast"])["requests"][0]["devices"][0]


async def test_claim_goes_without_files_when_the_disk_refuses(tmp_path: Path) -> None:
    """They help containers and hold nothing back: no mount of a file that is not there."""
    (tmp_path / "file").write_text("", encoding="utf-8")

    entry = await described(metadata(tmp_path / "file"))

    assert not entry.has_metadata


async def test_files_are_made_again_at_the_start_and_others_go(tmp_path: Path) -> None:
    """Of claims that are prepared, with what they are in their pod.

    What is not named as a claim's folder stays, and so does a folder with anything else in it.
    """
    files = metadata(tmp_path)
    attachment = SandboxAttachment(
        sandbox=Sandbox(id="s", uid="u", namespace="d", name="p"), is_attached=True, interfaces={"nic-0": NET1}
    )
    entry = msgspec.structs.replace(await described(files), attachment=attachment)
    await described(files, msgspec.structs.replace(ENTRY, uid=ClaimUid("77")))
    remove(files.files(entry)["fast"])
    leave(tmp_path, "other/a.json", "claim_88/thing")

    await files.restore([entry])

    assert "networkData" in read(files.files(entry)["fast"])["requests"][0]["devices"][0]
    assert names(tmp_path) == ["claim_3cec", "claim_88", "other"]


async def test_files_go_with_their_claim(tmp_path: Path) -> None:
    """Also when they are gone already."""
    files = metadata(tmp_path)
    entry = await described(files)
    await files.delete(entry)
    await files.delete(entry)

    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "folder", ["/var/run/kubernetes.io/dra-device-attributes", "/run/kubernetes.io/dra-device-attributes"]
)
def test_driver_mounts_nothing_where_the_files_are(folder: str) -> None:
    """The place is the gateway's alone, whatever the class may mount."""
    mount = Mount(host_path="/opt/x", container_path=f"{folder}/resourceclaims/c/r/x.json")
    prepared = Prepared(edits={"nic-0": ContainerEdits(mounts=(mount,))})

    refusal = refuse_forbidden("nic", prepared, EditRights(mounts=("/opt/x",)))

    assert refusal is not None
    assert refusal.reasons[0].code == "edits-forbidden"


@pytest.mark.parametrize("folder", ["relative", "/", "/a/../b"])
def test_folder_is_refused_when_it_is_no_place(folder: str) -> None:
    """With the key that is wrong."""
    with pytest.raises(ConfigError, match=r"metadata\.dir"):
        check(GatewaySettings(node="n", metadata=MetadataSettings(dir=folder)))
