"""A container run by runc, and by crun, on a spec that the merge made: what was promised is there
inside, and nothing more.
"""

from __future__ import annotations

import json
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest

from support.oci_runtimes import OciRuntime, oci_runtime
from topobus.devicekit.containers.oci_host import look_up, read_cdi_files
from topobus.formats.containers.cdi import CdiDevice, CdiSpec, render
from topobus.formats.containers.oci import OciResult, PluginAnswer, device_paths, oci_spec
from topobus.values.edits import ContainerEdits, DeviceNode, Mount

pytestmark = pytest.mark.integration

_NAME = "topobus.dev/gpu=claim-u1-gpu-0"
# Nodes that runc allows to nobody by itself, and that can be opened without
# harm; every kernel has one of them.
_HARMLESS = ("/dev/fuse", "/dev/net/tun", "/dev/loop-control", "/dev/vcs")


__all__ = ["oci_runtime"]


@pytest.fixture
def bundle(tmp_path: Path, oci_runtime: OciRuntime) -> Path:
    """A bundle whose root has this machine's own programs, read-only: no image, no network."""
    root = tmp_path / "rootfs"
    for name in ("proc", "dev", "sys", "usr", "bin", "lib", "lib64"):
        (root / name).mkdir(parents=True)
    oci_runtime.write_spec(tmp_path)
    return tmp_path


def base_spec(bundle: Path, script: str) -> dict[str, Any]:
    """A runtime's default spec, with the host's programs mounted."""
    spec: dict[str, Any] = json.loads((bundle / "config.json").read_text())
    spec["process"] |= {"terminal": False, "args": ["/bin/sh", "-ec", script]}
    # A sandbox may forbid to lower it, and it has nothing to do with devices.
    spec["process"].pop("oomScoreAdj", None)
    for name in ("usr", "bin", "lib", "lib64"):
        source = Path("/", name)
        if source.exists():
            spec["mounts"].append(
                {"destination": f"/{name}", "type": "bind", "source": str(source.resolve()), "options": ["rbind", "ro"]}
            )
    return spec


def run(runtime: OciRuntime, bundle: Path, spec: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run the container to its end."""
    (bundle / "config.json").write_text(json.dumps(spec))
    return runtime.call(bundle, "run", "--bundle", str(bundle), f"topobus-{uuid.uuid4().hex[:8]}")


def test_container_has_its_devices_when_a_runtime_runs_the_merged_spec(oci_runtime: OciRuntime, bundle: Path) -> None:
    """One device by a plugin, one by a CDI file: nodes that work, variables, mounts.

    A node that nobody gave is denied.
    """
    harmless = next(path for path in _HARMLESS if Path(path).exists())
    (bundle / "weights").mkdir()
    (bundle / "weights" / "model").write_text("42\n")
    cdi = bundle / "cdi"
    cdi.mkdir()
    node = DeviceNode(path="/dev/topobus-cdi", host_path="/dev/full", permissions="rw")
    device = CdiDevice(
        name="claim-u1-gpu-0", edits=ContainerEdits(device_nodes=(node,), env={"CLAIM": "u1", "BOTH": "cdi"})
    )
    (cdi / "gpu.json").write_bytes(render(CdiSpec(vendor="topobus.dev", device_class="gpu", devices=(device,))))
    plugin = PluginAnswer(
        resource="topobus.dev/nic",
        edits=ContainerEdits(
            env={"NIC": "mlx5_0", "BOTH": "plugin"},
            device_nodes=(
                DeviceNode(path="/dev/topobus-zero", host_path="/dev/zero", permissions="r"),
                DeviceNode(path="/dev/topobus-plugin", host_path=harmless, permissions="r"),
            ),
            mounts=(Mount(host_path=str(bundle / "weights"), container_path="/weights"),),
        ),
    )
    files, _ = read_cdi_files([cdi])
    script = """
        echo "$NIC $CLAIM $BOTH"
        head -c 3 /dev/topobus-zero | od -An -tx1
        cat /weights/model
        echo x > /dev/topobus-cdi 2>/dev/null || echo "full, as it should be"
        (: < /dev/topobus-plugin) && echo "read allowed"
        (: > /dev/topobus-plugin) 2>/dev/null || echo "write denied"
    """

    merged = oci_spec(
        base_spec(bundle, script),
        answers=[plugin],
        cdi_devices=[_NAME],
        files=files,
        nodes=look_up(device_paths([plugin], [_NAME], files)),
    )
    assert isinstance(merged, OciResult)
    done = run(oci_runtime, bundle, merged.spec)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "mlx5_0 u1 cdi",
        " 00 00 00",
        "42",
        "full, as it should be",
        "read allowed",
        "write denied",
    ]
    assert [conflict.what for conflict in merged.conflicts] == ["variable BOTH"]


def test_container_lacks_the_devices_when_nothing_was_merged(oci_runtime: OciRuntime, bundle: Path) -> None:
    """The same container without the merge has neither nodes nor variables: the test above can
    fail.
    """
    script = 'test ! -e /dev/topobus-plugin && test ! -e /dev/topobus-cdi && echo "nothing ${NIC:-}"'

    unmerged = oci_spec(base_spec(bundle, script), nodes={})
    assert isinstance(unmerged, OciResult)
    done = run(oci_runtime, bundle, unmerged.spec)

    assert (done.returncode, done.stdout.strip()) == (0, "nothing"), done.stderr
