"""CDI names in the answers of others' device plugins: resolved to edits, so that claims and every
container runtime can use them.
"""

from __future__ import annotations

import pytest

from support.foreign_rig import CLASS, TRAINING, claim_of, pod, trivial_plugin
from support.gateway_rig import Rig
from support.kubelet_plugins import device as listed
from support.public_cdi_files import GENERATORS
from topobus.formats.containers.cdi import CdiDevice, CdiSpec, parse, render
from topobus.testing.kubelet import Rejection
from topobus.values.dra_names import DRIVER, foreign_device
from topobus.values.edits import ContainerEdits, Hook

pytestmark = pytest.mark.integration


async def test_cdi_names_become_edits_when_the_plugin_answers_with_some(rig: Rig) -> None:
    """A plugin that names CDI devices works through a claim as well.

    A name that no file defines is the claim's error.
    """
    cdi_device = CdiDevice(name="w", edits=ContainerEdits(env={"FROM": "cdi"}))
    rig.cdi_dir.mkdir()
    (rig.cdi_dir / "acme.json").write_bytes(
        render(CdiSpec(vendor="acme.example", device_class="widget", devices=(cdi_device,)))
    )
    async with rig.kubelet, rig.gateway(), trivial_plugin(rig, listed("w-0", 0)) as plugin:
        plugin.env = {"OWN": "1"}
        plugin.cdi_devices = ["acme.example/widget=absent"]
        await claim_of(rig, foreign_device(CLASS, "w-0"))
        await rig.kubelet.wait_for_driver(DRIVER)
        (unresolved,) = await rig.kubelet.prepare_claims([TRAINING])
        plugin.cdi_devices = ["acme.example/widget=w"]
        (prepared,) = await rig.kubelet.prepare_claims([TRAINING])

    assert "no CDI file defines acme.example/widget=absent" in unresolved.error
    assert prepared.error == ""
    assert (
        parse((rig.cdi_dir / f"topobus.dev-{CLASS}_u1.json").read_bytes()).common.env.items()
        >= {"OWN": "1", "FROM": "cdi"}.items()
    )
    # It had asked for that: before the container starts, as far as a claim has such a moment.
    assert [call["event"] for call in plugin.calls if call["event"] in ("Allocate", "PreStartContainer")][-2:] == [
        "Allocate",
        "PreStartContainer",
    ]


async def test_hooks_and_groups_of_a_cdi_file_reach_a_claim_and_are_refused_to_a_pod_by_resource(rig: Rig) -> None:
    """NVIDIA's plugin in a CDI mode names files with hooks: a claim's own file has them.

    Kubelet's Allocate has no words for them, so it is told why.
    """
    hook = Hook(name="createContainer", path="/usr/bin/nvidia-cdi-hook", args=("nvidia-cdi-hook", "update-ldcache"))
    edits = ContainerEdits(env={"NVIDIA_VISIBLE_DEVICES": "void"}, hooks=(hook,), additional_gids=(44,))
    rig.cdi_dir.mkdir()
    made = CdiSpec(vendor="nvidia.com", device_class="gpu", devices=(CdiDevice(name="0", edits=edits),))
    (rig.cdi_dir / "nvidia.json").write_bytes(render(made).replace(b'"kind"', b'"annotations": {"a": "b"}, "kind"'))
    async with rig.kubelet, rig.gateway(), trivial_plugin(rig, listed("w-0", 0), listed("w-1", 0)) as plugin:
        plugin.cdi_devices = ["nvidia.com/gpu=0"]
        await claim_of(rig, foreign_device(CLASS, "w-0"))
        await rig.kubelet.wait_for_driver(DRIVER)
        (prepared,) = await rig.kubelet.prepare_claims([TRAINING])
        rejected = await rig.kubelet.admit(pod(1))

    assert prepared.error == ""
    common = parse((rig.cdi_dir / f"topobus.dev-{CLASS}_u1.json").read_bytes()).common
    assert (common.hooks, common.additional_gids) == ((hook,), (44,))
    assert isinstance(rejected, Rejection)
    assert "no words for: claim them (DRA)" in rejected.message


@pytest.mark.parametrize("generator", ["nvidia-ctk, bare metal", "amd-ctk"])
async def test_file_as_its_generator_writes_it_serves_a_claim_when_a_plugin_names_its_device(
    rig: Rig, generator: str
) -> None:
    """YAML, nodes by their path alone, JSON with all of a node's numbers: the claim's own file has
    them, and none is refused; a file with another ending is named.
    """
    public = GENERATORS[generator]
    text = public.text
    # Nodes that this host has stand for AMD's, so that their numbers are the host's own.
    text = text.replace('"/dev/dri/renderD128"', '"/dev/dri/renderD128","hostPath":"/dev/null"').replace(
        '226,"minor":128', '1,"minor":3'
    )
    text = text.replace('"/dev/kfd"', '"/dev/kfd","hostPath":"/dev/full"').replace('"major":235', '"major":1,"minor":7')
    rig.cdi_dir.mkdir()
    (rig.cdi_dir / public.name).write_text(text)
    (rig.cdi_dir / "other.yml").write_text(text)
    async with rig.kubelet, rig.gateway(), trivial_plugin(rig, listed("w-0", 0)) as plugin:
        plugin.cdi_devices = ["acme.example/w=absent"]
        await claim_of(rig, foreign_device(CLASS, "w-0"))
        await rig.kubelet.wait_for_driver(DRIVER)
        (unresolved,) = await rig.kubelet.prepare_claims([TRAINING])
        plugin.cdi_devices = [public.device]
        (prepared,) = await rig.kubelet.prepare_claims([TRAINING])

    assert "other.yml was not looked at" in unresolved.error
    assert prepared.error == ""
    common = parse((rig.cdi_dir / f"topobus.dev-{CLASS}_u1.json").read_bytes()).common
    assert {node.path for node in common.device_nodes} == set(public.nodes)
    assert tuple(mount.host_path for mount in common.mounts) == public.mounts
