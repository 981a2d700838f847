"""A node's labels are those that vendors' feature discovery gives it,
from what its devices tell.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from topobus.gateway.config import GatewaySettings, check
from topobus.gateway.device_plugins.feature_file import FeatureFile
from topobus.gateway.device_plugins.rules.node_labels import feature_file, node_labels
from topobus.values.device import AttributeValue, Device, Inventory
from topobus.values.device_sharing import DeviceSharing
from topobus.values.errors import ConfigError
from topobus.values.health import DeviceHealth, HealthState

_H100 = "NVIDIA H100 80GB HBM3"
_FACTS: dict[str, AttributeValue] = {
    "type": "gpu",
    "pciID": "10de:2330",
    "architecture": "Hopper",
    "cudaComputeCapability": "9.0",
    "driverVersion": "580.105.08",
    "cudaDriverVersion": "13.0.0",
    "migCapable": True,
}


def gpu(name: str, vendor: str = "nvidia", model: str = _H100, **more: Any) -> Device:
    """A GPU with NVML's facts, if none are given."""
    fields = {"attributes": _FACTS, "capacity": {"memory": 85_520_809_984}, **more}
    return Device(name=name, device_class="gpu", vendor=vendor, model=model, **fields)


def labels_of(*devices: Device) -> dict[str, str]:
    """The labels of a node with these."""
    classes = {device.device_class for device in devices}
    return node_labels(
        {
            name: Inventory(
                node="n",
                device_class=name,
                generation=1,
                devices=tuple(each for each in devices if each.device_class == name),
            )
            for name in classes
        }
    )


def test_nvidia_node_has_the_labels_that_charts_select_by() -> None:
    """Name for name and value for value as NVIDIA's feature discovery writes them."""
    assert labels_of(gpu("gpu-0"), gpu("gpu-1")) == {
        "feature.node.kubernetes.io/pci-10de.present": "true",
        "nvidia.com/cuda.driver-version.full": "580.105.08",
        "nvidia.com/cuda.driver-version.major": "580",
        "nvidia.com/cuda.driver-version.minor": "105",
        "nvidia.com/cuda.driver-version.revision": "08",
        "nvidia.com/cuda.driver.major": "580",
        "nvidia.com/cuda.driver.minor": "105",
        "nvidia.com/cuda.driver.rev": "08",
        "nvidia.com/cuda.runtime-version.full": "13.0",
        "nvidia.com/cuda.runtime-version.major": "13",
        "nvidia.com/cuda.runtime-version.minor": "0",
        "nvidia.com/cuda.runtime.major": "13",
        "nvidia.com/cuda.runtime.minor": "0",
        "nvidia.com/gpu.compute.major": "9",
        "nvidia.com/gpu.compute.minor": "0",
        "nvidia.com/gpu.count": "2",
        "nvidia.com/gpu.family": "hopper",
        "nvidia.com/gpu.memory": "81559",
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.sharing-strategy": "none",
        "nvidia.com/mig.capable": "true",
    }


def test_shared_gpus_say_how_often_and_how() -> None:
    """With the product marked, as charts expect that keep training jobs off shared GPUs."""
    labels = labels_of(gpu("gpu-0", sharing=DeviceSharing(replicas=4, strategy="TimeSlicing")))

    names = ("replicas", "sharing-strategy", "product", "count")
    assert [labels[f"nvidia.com/gpu.{name}"] for name in names] == [
        "4",
        "time-slicing",
        "NVIDIA-H100-80GB-HBM3-SHARED",
        "1",
    ]


def test_mig_instances_have_labels_of_their_profile() -> None:
    """Strategy `mixed`: those that are there, and no whole GPU.

    A place where none is yet does not count.
    """
    mig = {"type": "mig", "profile": "1g.10gb+me", "pciID": "10de:2330"}
    capacity = {"memory": 10 << 30, "multiprocessors": 16, "copyEngines": 1}
    instances = [
        gpu(f"gpu-{number}", uuid=uuid, attributes=mig, capacity=capacity)
        for number, uuid in enumerate(("MIG-1", "MIG-2", ""))
    ]
    labels = labels_of(*instances)

    assert {name: value for name, value in labels.items() if "mig" in name} == {
        "nvidia.com/mig-1g.10gb.me.count": "2",
        "nvidia.com/mig-1g.10gb.me.engines.copy": "1",
        "nvidia.com/mig-1g.10gb.me.memory": "10240",
        "nvidia.com/mig-1g.10gb.me.multiprocessors": "16",
        "nvidia.com/mig-1g.10gb.me.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb.me",
        "nvidia.com/mig-1g.10gb.me.replicas": "1",
        "nvidia.com/mig-1g.10gb.me.sharing-strategy": "none",
        "nvidia.com/mig.capable": "true",
        "nvidia.com/mig.strategy": "mixed",
    }
    assert "nvidia.com/gpu.count" not in labels


def test_labels_are_of_the_most_frequent_model_when_there_are_several() -> None:
    """These labels have room for one; the same for each order of devices."""
    devices = (gpu("gpu-0", model="NVIDIA L4"), gpu("gpu-1"), gpu("gpu-2"))

    labels = labels_of(*devices)

    assert (labels["nvidia.com/gpu.product"], labels["nvidia.com/gpu.count"]) == ("NVIDIA-H100-80GB-HBM3", "3")
    assert labels_of(*reversed(devices)) == labels


def test_what_a_gpu_does_not_tell_has_no_label() -> None:
    """Without NVML: nothing is guessed, and no version is half told."""
    labels = labels_of(gpu("gpu-0", attributes={"type": "gpu", "pciID": "10de:2330"}, capacity={}))

    assert sorted(labels) == [
        "feature.node.kubernetes.io/pci-10de.present",
        *(f"nvidia.com/gpu.{name}" for name in ("count", "present", "product", "replicas", "sharing-strategy")),
    ]


def test_amd_node_has_the_labellers_labels() -> None:
    """One value is the label's; of several each is counted in a name.

    The beta names are always counted.
    """
    facts: dict[str, AttributeValue] = {"pciID": "1002:740f", "gfxTarget": "gfx90a", "computeUnits": 104}
    first = gpu("gpu-0", "amd", "AMD Instinct MI210 (OAM)", attributes=facts, capacity={"memory": 68_702_699_520})
    other = gpu(
        "gpu-1",
        "amd",
        "AMD Instinct MI300X",
        attributes={**facts, "pciID": "1002:74a1", "gfxTarget": "gfx942"},
        capacity={},
    )

    alike, mixed = labels_of(first), labels_of(first, other)

    assert {name: value for name, value in alike.items() if name.startswith("amd.com/")} == {
        "amd.com/gpu.cu-count": "104",
        "amd.com/gpu.device-id": "740f",
        "amd.com/gpu.family": "AI",
        "amd.com/gpu.product-name": "AMD_Instinct_MI210_OAM",
        "amd.com/gpu.vram": "64G",
    }
    assert (alike["beta.amd.com/gpu.device-id.740f"], alike["beta.amd.com/gpu.vram"]) == ("1", "64G")
    assert {
        name: value for name, value in mixed.items() if name.startswith("amd.com/gpu.device-id") or "family" in name
    } == {
        "amd.com/gpu.device-id.740f": "1",
        "amd.com/gpu.device-id.74a1": "1",
        "amd.com/gpu.family": "AI",
        "beta.amd.com/gpu.family": "AI",
        "beta.amd.com/gpu.family.AI": "2",
    }


def test_partitions_say_their_modes_when_all_are_alike() -> None:
    """As ROCm's labeller: compute and memory mode in one word."""
    cut: dict[str, AttributeValue] = {"type": "partition", "partitionMode": "CPX", "memoryMode": "NPS4"}
    part, whole = gpu("gpu-0", "amd", attributes=cut), gpu("gpu-1", "amd", attributes={})

    assert labels_of(part)["amd.com/gpu.compute-memory-partition"] == "cpx_nps4"
    assert "amd.com/gpu.compute-memory-partition" not in labels_of(part, whole)


def test_value_that_kubernetes_refuses_is_left_out() -> None:
    """One bad label would make the whole change be refused."""
    labels = labels_of(gpu("gpu-0", model="X" * 64), gpu("gpu-1", model="X" * 64))

    assert "nvidia.com/gpu.product" not in labels
    assert labels["nvidia.com/gpu.count"] == "2"


def test_every_vendor_of_a_card_is_told() -> None:
    """Charts of network operators select by it, too."""
    nic = Device(name="nic-0", device_class="nic", attributes={"pciID": "15b3:1021"})

    assert labels_of(nic, Device(name="fpga-0", device_class="fpga")) == {
        "feature.node.kubernetes.io/pci-15b3.present": "true"
    }


def read_by_nfd(data: bytes) -> dict[str, str]:
    """Read a feature file as NFD's local source does: a label a line, `#` begins a comment, no
    value means true, 64 KiB at most.

    Source: NFD, "Customization guide", local feature source.
    """
    assert len(data) <= 65_536
    lines = [line.strip() for line in data.decode().splitlines()]
    return {
        name: value if sign else "true"
        for name, sign, value in (line.partition("=") for line in lines if line and line[0] != "#")
    }


def test_nfd_reads_the_labels_that_were_written() -> None:
    """Nothing is lost on the way."""
    labels = labels_of(gpu("gpu-0"), gpu("gpu-1", "amd", "AMD Instinct MI210"))

    assert read_by_nfd(feature_file(labels)) == labels


def shown(*devices: Device) -> dict[str, Inventory]:
    """An inventory of GPUs."""
    return {"gpu": Inventory(node="n", device_class="gpu", generation=1, devices=devices)}


async def test_file_follows_the_devices(tmp_path: Path) -> None:
    """A card that leaves takes its labels along.

    The last one leaves an empty file, by which NFD removes all. Nothing else is left in the folder.
    """
    file = FeatureFile(tmp_path / "features.d")
    seen = []
    for inventories in (shown(gpu("gpu-0"), gpu("gpu-1")), shown(gpu("gpu-0")), shown()):
        await file.update(inventories)
        seen.append(read_by_nfd(file.path.read_bytes()))

    assert [labels.get("nvidia.com/gpu.count") for labels in seen] == ["2", "1", None]
    assert seen[-1] == {}
    assert [path.name for path in (tmp_path / "features.d").iterdir()] == ["topobus"]


async def test_file_is_written_for_a_label_alone(tmp_path: Path) -> None:
    """NFD looks at each change; a device's health is no label."""
    file = FeatureFile(tmp_path)
    await file.update(shown(gpu("gpu-0")))
    before = file.path.stat().st_ino
    sick = DeviceHealth(state=HealthState.UNHEALTHY)

    await file.update(shown(gpu("gpu-0", health=sick)))

    assert file.path.stat().st_ino == before


async def test_folder_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    """The gateway goes on; with the next change it tries again."""
    file = FeatureFile(tmp_path / "features.d")
    (tmp_path / "features.d").write_text("a file")
    with capture_logs() as logs:
        await file.update(shown())
        await file.update(shown(gpu("gpu-0")))
    (tmp_path / "features.d").unlink()

    await file.update(shown(gpu("gpu-0")))

    assert [log["event"] for log in logs if log["log_level"] == "warning"] == ["node-labels.unwritten"]
    assert read_by_nfd(file.path.read_bytes())["nvidia.com/gpu.count"] == "1"


def test_folder_must_be_a_whole_path() -> None:
    """Root writes there."""
    with pytest.raises(ConfigError, match="node_labels_dir"):
        check(GatewaySettings(node="n", node_labels_dir="features.d"))
