"""Promises of the guard: every name of a claim's CDI file brings it, nobody else may make one, and
a container's mounts say whose it has.
"""

from __future__ import annotations

import pytest

from topobus.formats.containers.cdi import CdiDevice, CdiSpec, parse, render
from topobus.formats.messages.messages import Prepared
from topobus.gateway.containers.rules.container_guard import guard_mount, guarded, guarded_claims
from topobus.gateway.containers.rules.edit_limits import EditRights, refuse_forbidden
from topobus.gateway.containers.rules.guarded_names import GUARD_FOLDER, GUARD_SOURCE
from topobus.values.edits import ContainerEdits, Mount

EDITS = ContainerEdits(env={"A": "1"})
RIGHTS = {
    "none": EditRights(),
    "all-of-proc-and-run": EditRights(mounts=("/proc", "/run"), writable_mounts=("/proc", "/run", "/opt")),
    "as-kubelet": EditRights(as_kubelet=True),
}
FORGED = {
    "our-mount": guard_mount("u", "nic"),
    "our-place": Mount(host_path="/opt/a", container_path=f"{GUARD_FOLDER}/nic/u"),
    "our-source": Mount(host_path=f"{GUARD_SOURCE}/a", container_path="/opt/inside"),
}


def test_guard_is_in_every_device_of_the_file() -> None:
    """A container names one device, one request or the whole claim: none of them is a way past the
    guard.
    """
    spec = CdiSpec(
        vendor="v", device_class="nic", devices=(CdiDevice(name="a", edits=EDITS), CdiDevice(name="b", edits=EDITS))
    )

    written = parse(render(guarded(spec, "u", "nic")))

    assert [[mount.host_path for mount in device.edits.mounts] for device in written.devices] == [
        [GUARD_SOURCE],
        [GUARD_SOURCE],
    ]


def test_containers_guards_are_known_by_source_and_place() -> None:
    """Each claim once.

    What is mounted there from elsewhere, and what only begins alike, is not ours.
    """
    nic, cpu = guard_mount("u", "nic"), guard_mount("u", "cpu")
    pairs = [(mount.host_path, mount.container_path) for mount in (nic, cpu, nic)]

    found_claims = guarded_claims(
        [
            *pairs,
            ("/etc", nic.container_path),
            (GUARD_SOURCE, "/run/topobus/guards/nic/x"),
            (GUARD_SOURCE, GUARD_FOLDER),
        ]
    )

    assert found_claims == (("u", "nic"), ("u", "cpu"))


@pytest.mark.parametrize("rights", RIGHTS.values(), ids=RIGHTS)
@pytest.mark.parametrize("mount", FORGED.values(), ids=FORGED)
def test_guard_is_refused_when_a_driver_makes_it(mount: Mount, rights: EditRights) -> None:
    """No right covers it, not even that of a plugin which may do all that kubelet lets it."""
    refusal = refuse_forbidden("nic", Prepared(edits={"nic-0": ContainerEdits(mounts=(mount,))}), rights)

    assert refusal is not None
    assert f"none on {GUARD_FOLDER} and none of {GUARD_SOURCE}" in refusal.reasons[0].message
