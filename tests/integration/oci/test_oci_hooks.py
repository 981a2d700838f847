"""runc or crun alone, without NRI, a gateway or a kubelet: exclusive CPUs by the cpuset of the
spec, an interface by OCI hooks, both as `topobus oci` writes them.
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.oci_runtimes import OciRuntime, oci_runtime
from support.real_interfaces import ip, network_namespace, veth_pair
from topobus.cli.commands.oci_hook import interface_hooks
from topobus.formats.containers.cdi import CdiDevice, CdiSpec
from topobus.formats.containers.oci import CdiFile, OciResult, oci_spec
from topobus.values.edits import ContainerEdits

pytestmark = pytest.mark.integration

__all__ = ["oci_runtime"]

_VERSION = {"apiVersion": "nic.topobus.dev/v1", "kind": "Interface"}


@pytest.fixture
def bundle(tmp_path: Path, oci_runtime: OciRuntime) -> Path:
    """A bundle whose root has this machine's own programs, read-only."""
    for name in ("proc", "dev", "sys", "usr", "bin", "sbin", "lib", "lib64"):
        (tmp_path / "rootfs" / name).mkdir(parents=True)
    oci_runtime.write_spec(tmp_path)
    return tmp_path


@pytest.fixture
def interface() -> Iterator[str]:
    """An interface of this machine, as an administrator left it.

    Its other end is 10.77.0.1 in a namespace of the test's.
    """
    with network_namespace() as world, veth_pair(world) as name:
        ip("link", "set", name, "address", "02:00:00:00:77:07", "mtu", "1400")
        ip("addr", "add", "10.77.0.7/24", "dev", name)
        ip("-n", world, "addr", "add", "10.77.0.1/24", "dev", "peer")
        ip("-n", world, "link", "set", "peer", "up")
        yield name


def _spec(
    bundle: Path, script: str, *, interface: str = "", parameters: dict[str, Any] | None = None, cpus: str = ""
) -> dict[str, Any]:
    """What `topobus oci` makes of the runtime's default spec for a claim with this interface and
    these CPUs.
    """
    base: dict[str, Any] = json.loads((bundle / "config.json").read_text())
    base["process"] |= {"terminal": False, "args": ["/bin/sh", "-ec", script]}
    base["process"].pop("oomScoreAdj", None)
    # By itself crun tells a hook's exit status alone.
    base["annotations"] = {"run.oci.hooks.stderr": str(bundle / "hooks.log")}
    for name in ("usr", "bin", "sbin", "lib", "lib64"):
        source = Path("/", name)
        if source.exists():
            base["mounts"].append(
                {"destination": f"/{name}", "type": "bind", "source": str(source.resolve()), "options": ["rbind", "ro"]}
            )
    hooks = (
        interface_hooks(interface, [_VERSION | (parameters or {})], state_dir=bundle / "records") if interface else ()
    )
    device = CdiDevice(name="claim-u1-nic-0", edits=ContainerEdits(hooks=hooks))
    file = CdiFile(path="of claim default/c", spec=CdiSpec(vendor="topobus.dev", device_class="nic", devices=(device,)))
    merged = oci_spec(
        base,
        cdi_devices=["topobus.dev/nic=claim-u1-nic-0"] if interface else [],
        files=[file],
        nodes={},
        cpus=cpus,
        memory_nodes="0" if cpus else "",
    )
    assert isinstance(merged, OciResult)
    # Where processors are emulated, a hook's interpreter alone takes longer to begin than runtimes are told to wait.
    for hook in (hook for hooks in merged.spec.get("hooks", {}).values() for hook in hooks):
        del hook["timeout"]
    return merged.spec


def _run(runtime: OciRuntime, bundle: Path, spec: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    (bundle / "config.json").write_text(json.dumps(spec))
    return runtime.call(bundle, "run", "--bundle", str(bundle), f"tb-shares-{uuid.uuid4().hex[:8]}")


def _said(bundle: Path, done: subprocess.CompletedProcess[str]) -> str:
    """Give the runtime's words, and the hook's."""
    log = bundle / "hooks.log"
    return done.stderr + (log.read_text() if log.exists() else "")


def _shown(interface: str) -> tuple[str, int, list[str]]:
    (link,) = json.loads(ip("-json", "addr", "show", "dev", interface))
    return (
        link["address"],
        link["mtu"],
        [f"{it['local']}/{it['prefixlen']}" for it in link["addr_info"] if it["family"] == "inet"],
    )


def test_container_has_the_interface_when_a_runtime_runs_the_hooks(
    oci_runtime: OciRuntime, bundle: Path, interface: str
) -> None:
    """Inside it has its new name, address and MTU and reaches its other end.

    When the container has ended the host has it back as it was, and nothing is left over.
    """
    before = _shown(interface)
    parameters = {"interface": {"name": "net1", "mtu": 1300, "addresses": ["10.77.0.9/24"]}}
    # The other end answers a connection to a port where nobody listens: no program of its own is
    # needed there, and no right here.
    connect = "LC_ALL=C bash -c ': < /dev/tcp/10.77.0.1/9' 2>&1 | grep -q refused && echo reached"
    script = f"ip -o link show net1; ip -o -4 addr show net1; {connect}"

    done = _run(oci_runtime, bundle, _spec(bundle, script, interface=interface, parameters=parameters))

    assert done.returncode == 0, done.stderr
    assert "net1" in done.stdout
    assert "mtu 1300" in done.stdout
    assert "10.77.0.9/24" in done.stdout
    assert "reached" in done.stdout
    assert _shown(interface) == before
    assert list((bundle / "records").iterdir()) == []


def test_interface_comes_back_when_the_container_is_killed(
    oci_runtime: OciRuntime, bundle: Path, interface: str
) -> None:
    """A container that is killed has no time to give anything back: deleting it does."""
    before, name = _shown(interface), f"tb-shares-{uuid.uuid4().hex[:8]}"
    spec = _spec(bundle, "sleep 600", interface=interface, parameters={"interface": {"addresses": ["10.77.0.9/24"]}})
    (bundle / "config.json").write_text(json.dumps(spec))
    started = oci_runtime.call(bundle, "run", "--detach", "--bundle", str(bundle), name, has_output=False)
    inside = subprocess.run(["ip", "link", "show", "dev", interface], capture_output=True, check=False).returncode
    killed = oci_runtime.call(bundle, "delete", "--force", name)

    assert (started.returncode, killed.returncode) == (0, 0), killed.stderr
    assert inside != 0
    assert _shown(interface) == before
    assert list((bundle / "records").iterdir()) == []


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        pytest.param({"interface": {"mtu": 99_999}}, "interface.mtu", id="an MTU too large"),
        pytest.param(
            {"interface": {"addresses": ["10.77.0.300/24"]}}, "interface.addresses", id="an address that is none"
        ),
        pytest.param({"interface": {"nmae": "net1"}}, "interface.nmae", id="a field that does not exist"),
        pytest.param({"vf": {"vlan": 5000}}, "vf.vlan", id="a VLAN of 5000"),
    ],
)
def test_container_is_not_created_when_the_configuration_is_wrong(
    oci_runtime: OciRuntime, bundle: Path, interface: str, parameters: dict[str, Any], field: str
) -> None:
    """The hook's words name the field; the container never ran and the interface never moved."""
    before = _shown(interface)

    done = _run(oci_runtime, bundle, _spec(bundle, "echo ran", interface=interface, parameters=parameters))

    assert done.returncode != 0
    assert field in _said(bundle, done)
    assert "ran" not in done.stdout
    assert _shown(interface) == before


def test_container_is_not_created_when_the_interface_is_not_there(oci_runtime: OciRuntime, bundle: Path) -> None:
    """A container without what it was promised does not start."""
    done = _run(oci_runtime, bundle, _spec(bundle, "echo ran", interface="tbs-none"))

    assert done.returncode != 0
    assert "tbs-none" in _said(bundle, done)
    assert "ran" not in done.stdout


def test_container_runs_on_its_cpu_alone_when_the_spec_names_it(oci_runtime: OciRuntime, bundle: Path) -> None:
    """The cpuset of the spec is enforced: inside there is this CPU and this memory node, and no
    other.
    """
    last = max(os.sched_getaffinity(0))
    script = "grep -E '^(Cpus|Mems)_allowed_list' /proc/self/status"

    done = _run(oci_runtime, bundle, _spec(bundle, script, cpus=str(last)))

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Cpus_allowed_list:", str(last), "Mems_allowed_list:", "0"]
