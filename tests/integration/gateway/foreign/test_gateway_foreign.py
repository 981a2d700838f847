"""Device plugins that know nothing of Topobus, registered with the gateway: through kubelet,
through claims, through faults and restarts.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from support.foreign_rig import (
    CLASS,
    ONE_NODE,
    RESOURCE,
    TRAINING,
    calls_of,
    claim_of,
    connected,
    inventory,
    plain_plugin,
    pod,
    trivial_plugin,
)
from support.gateway_rig import Rig
from support.kubelet_plugins import device as listed
from support.looks import next_look
from support.node_plane import NODE
from topobus.formats.containers.cdi import parse
from topobus.gateway.config import ForeignSettings
from topobus.gateway.containers.rules.edit_limits import EditRights
from topobus.gateway.device_plugins.rules.preference import plugin_choices
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.testing.kubelet import (
    Admission,
    Rejection,
)
from topobus.values.dra_names import DRIVER, foreign_device
from topobus.values.errors import ConfigError
from topobus.values.health import HealthState
from topobus.values.idset import NodeSet

pytestmark = pytest.mark.integration


async def container_started_again(rig: Rig) -> None:
    """Start the pod's container again, as kubelet does: anew while it is refused.

    A gateway that has just begun may have the last one's list, its own without the
    plugin, and then the plugin's.
    """
    async with asyncio.timeout(60):
        while await rig.kubelet.restart_container(pod(1), "main"):
            await next_look()


async def test_unmodified_plugin_serves_pods_and_claims_when_it_registers_with_us(rig: Rig) -> None:
    """A process of somebody else's: an inventory with NUMA nodes, its own resource name at kubelet,
    its Allocate behind both doors, a restart.
    """
    async with rig.kubelet:
        with plain_plugin(rig):
            async with rig.gateway():
                found_inventory = await inventory(rig, [HealthState.HEALTHY] * 2)
                await rig.kubelet.wait_for_resource(RESOURCE, allocatable=2)
                admitted = await rig.kubelet.admit(pod(1))
                assert isinstance(admitted, Admission), admitted
                held = {
                    name
                    for allocation in rig.plane.ledger.allocations.values()
                    for names in allocation.holdings[0].devices.values()
                    for name in names
                }
                free = next(device.name for device in found_inventory.devices if device.name not in held)
                await claim_of(rig, free)
                await rig.kubelet.wait_for_driver(DRIVER)
                (prepared,) = await rig.kubelet.prepare_claims([TRAINING])
            async with rig.gateway():
                # Started again, the gateway removed the plugin's socket as kubelet does, and
                # the plugin came back by itself.
                await inventory(rig, [HealthState.HEALTHY] * 2)
                # The other one is the claim's, and closed to kubelet.
                await rig.kubelet.wait_for_resource(RESOURCE, allocatable=1)

    assert [device.numa_nodes.ids if device.numa_nodes else None for device in found_inventory.devices] == [(0,), (1,)]
    assert all(device.name.startswith(f"{CLASS}--") for device in found_inventory.devices)
    edits = admitted.container("main").edits
    assert edits.env["WIDGETS"] in ("Widget_0", "Widget_1")
    assert [(device_node.path, device_node.host_path) for device_node in edits.device_nodes] == [
        ("/dev/widget", "/dev/full")
    ]
    assert prepared.error == ""
    spec = parse((rig.cdi_dir / f"topobus.dev-{CLASS}_u1.json").read_bytes())
    assert {spec.common.env["WIDGETS"], edits.env["WIDGETS"]} == {"Widget_0", "Widget_1"}
    assert [device_node.path for device_node in spec.common.device_nodes] == ["/dev/widget"]


async def test_plugins_device_has_no_numa_node_when_it_names_one_that_the_machine_lacks(rig: Rig) -> None:
    """A plugin that says node 7 on a machine with two: the device is offered to kubelet without a
    place, and the inventory's warning says why.
    """
    async with rig.kubelet, rig.gateway(), trivial_plugin(rig, listed("w-0", 0), listed("w-7", 7)):
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=2)
        published = await inventory(rig, [HealthState.HEALTHY] * 2)
        offered = {name: device.nodes for name, device in sorted(rig.kubelet.devices(RESOURCE).items())}

    assert [device.numa_nodes for device in published.devices] == [NodeSet(0), None]
    assert any(
        "w-7: got NUMA node 7, wanted one of the nodes 0-1; taken as unknown" in warning
        for warning in published.warnings
    )
    assert list(offered.values()) == [NodeSet(0), None]


async def test_plugin_and_gateway_are_started_again_and_everything_goes_on(rig: Rig) -> None:
    """Behind both doors, over both restarts: the plugin's own preference, each start passed on,
    nothing allocated twice, its health on both APIs.
    """
    async with rig.kubelet:
        async with rig.gateway():
            with plain_plugin(rig, *ONE_NODE):
                await rig.kubelet.wait_for_resource(RESOURCE, allocatable=2)
                admitted = await rig.kubelet.admit(pod(1))
                found_inventory = await inventory(rig, [HealthState.HEALTHY] * 2)
                free = found_inventory.devices[0].name
                await claim_of(rig, free)
                await rig.kubelet.wait_for_driver(DRIVER)
                (prepared,) = await rig.kubelet.prepare_claims([TRAINING])
            await inventory(rig, [HealthState.UNKNOWN] * 2)
            with plain_plugin(rig, *ONE_NODE):
                await inventory(rig, [HealthState.HEALTHY] * 2)
                await container_started_again(rig)
        with plain_plugin(rig, *ONE_NODE) as process:
            async with rig.gateway():
                await connected(rig)
                await rig.kubelet.wait_for_health(DRIVER, NODE, free, "Healthy")
                await container_started_again(rig)
                (again,) = await rig.kubelet.prepare_claims([TRAINING])
                process.send_signal(signal.SIGUSR1)
                sick = await rig.kubelet.wait_for_health(DRIVER, NODE, free, "Unhealthy")
                await rig.kubelet.wait_for_resource(RESOURCE, allocatable=1)
                errors = await rig.kubelet.unprepare_claims([TRAINING])

    assert isinstance(admitted, Admission), admitted
    assert admitted.container("main").edits.env["WIDGETS"] == "Widget_1"
    assert admitted.container("main").edits.annotations["acme.example/widgets"] == "1"
    assert calls_of(rig, "GetPreferredAllocation") == [["Widget_0", "Widget_1"]]
    assert calls_of(rig, "Allocate") == [["Widget_1"], ["Widget_0"]]
    # Each start of the pod's container, and once for the claim.
    assert calls_of(rig, "PreStartContainer") == [["Widget_1"], ["Widget_0"], ["Widget_1"], ["Widget_1"]]
    assert errors == {}
    assert (prepared.error, again) == ("", prepared)
    assert sick.message


def test_plugin_is_asked_once_more_when_its_single_choice_is_among_those_that_claims_are_given() -> None:
    """First all that is free and not withheld, then the further half.

    Several devices are the plugin's own to align.
    """
    names = [f"widget-{number}" for number in range(6)]

    assert plugin_choices(names, (), 1, is_from_end=True) == (tuple(names), tuple(names[3:]))
    assert plugin_choices(names, (), 1, withheld=["widget-5"], is_from_end=True) == (
        tuple(names[:5]),
        tuple(names[2:5]),
    )
    assert plugin_choices(names, (), 2, withheld=["widget-5"], is_from_end=True) == (tuple(names[:5]),)
    assert plugin_choices(names, (), 6, withheld=["widget-5"], is_from_end=True) == (tuple(names),)
    assert plugin_choices(names, (), 1) == (tuple(names),)


@pytest.mark.parametrize("is_known", [True, False], ids=["folder-known", "folder-taken-away"])
async def test_claim_ends_when_its_plugin_is_gone_for_good(rig: Rig, is_known: bool) -> None:
    """The gateway goes on answering for the classes of its checkpoint, also after a start, and
    without the folder: kubelet's pod comes to its end.
    """
    async with rig.kubelet:
        with plain_plugin(rig, *ONE_NODE):
            async with rig.gateway():
                found_inventory = await inventory(rig, [HealthState.HEALTHY] * 2)
                await claim_of(rig, found_inventory.devices[0].name)
                await rig.kubelet.wait_for_driver(DRIVER)
                (prepared,) = await rig.kubelet.prepare_claims([TRAINING])
        foreign = rig.settings.foreign if is_known else ForeignSettings()
        seen = sum((event.event, event.subject) == ("NotifyRegistrationStatus", DRIVER) for event in rig.kubelet.events)
        async with rig.gateway(foreign=foreign):
            await rig.kubelet.wait_for_event("NotifyRegistrationStatus", subject=DRIVER, count=seen + 1)
            await rig.kubelet.wait_for_driver(DRIVER)
            errors = await rig.kubelet.unprepare_claims([TRAINING])

    assert (prepared.error, errors) == ("", {})
    assert not any(path.name.startswith("topobus.dev") for path in rig.cdi_dir.iterdir())


async def test_devices_are_unknown_when_the_plugin_is_gone(rig: Rig) -> None:
    """Killed, its devices stay listed and are not given away; back again, they are healthy."""
    async with rig.kubelet, rig.gateway():
        with plain_plugin(rig):
            await rig.kubelet.wait_for_resource(RESOURCE, allocatable=2)
        gone = await rig.kubelet.wait_for_resource(RESOURCE, allocatable=0)
        unknown = await inventory(rig, [HealthState.UNKNOWN] * 2)
        rejected = await rig.kubelet.admit(pod(1))
        with plain_plugin(rig):
            await rig.kubelet.wait_for_resource(RESOURCE, allocatable=2)

    assert gone.capacity == 2
    # With the reason why its stream ended.
    assert f"the device plugin of {RESOURCE} is not connected (" in str(unknown.warnings)
    assert isinstance(rejected, Rejection)


async def test_list_is_taken_over_when_it_changes(rig: Rig) -> None:
    """A device that the plugin calls unhealthy is that at kubelet, and back at once when the plugin
    says so.

    A new one appears.
    """
    async with rig.kubelet, rig.gateway(), trivial_plugin(rig, listed("w-0", 0), listed("w-1", -1)) as plugin:
        first = await inventory(rig, [HealthState.HEALTHY] * 2)
        plugin.show([listed("w-0", 0, "Unhealthy"), listed("w-1", -1), listed("w-2", 1)])
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=2)
        await inventory(rig, [HealthState.UNHEALTHY, HealthState.HEALTHY, HealthState.HEALTHY])
        plugin.show([listed("w-0", 0), listed("w-1"), listed("w-2", 1)])
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=3)

    assert [device.numa_nodes for device in first.devices][1] is None


async def test_plugin_is_called_before_each_start_when_it_wants_that(rig: Rig) -> None:
    """Each start of a pod's container reaches the plugin under its own id.

    A device that it lists no more starts no container.
    """
    async with rig.kubelet, rig.gateway(), trivial_plugin(rig, listed("W_0", 0)) as plugin:
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=1)
        admitted = await rig.kubelet.admit(pod(1))
        restarted = await rig.kubelet.restart_container(pod(1), "main")
        calls = [call for call in plugin.calls if call["event"] in ("Allocate", "PreStartContainer")]
        plugin.show([])
        await inventory(rig, [HealthState.UNHEALTHY])
        late = await rig.kubelet.restart_container(pod(1), "main")

    assert isinstance(admitted, Admission), admitted
    assert restarted == ""
    assert [call["event"] for call in calls] == ["Allocate", "PreStartContainer", "PreStartContainer"]
    assert calls[2]["req"] == {"devices_ids": ["W_0"]}
    assert "cannot be used" in late


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"version": "v1alpha9"}, "not supported", id="version"),
        pytest.param({"resource": "nodomain"}, "is invalid", id="name"),
        pytest.param({"resource": "topobus.dev/gpu"}, "is of our own domain", id="ours"),
        pytest.param({"resource": "nvidia.com/mig-1g.10gb"}, "is offered by the gateway itself", id="of-a-profile"),
        pytest.param({"resource": "acme.other/widget"}, "would both be class widget-acme", id="same-class"),
        pytest.param({"endpoint": "../p.sock"}, "is not a file name", id="endpoint"),
        pytest.param({"endpoint": "none.sock"}, "failed to dial", id="nobody"),
    ],
)
async def test_registration_is_refused_when_it_cannot_be_served(rig: Rig, change: dict[str, str], words: str) -> None:
    """The plugin is told why, and what was registered before goes on."""
    foreign = msgspec.structs.replace(rig.settings.foreign, dial_s=2.0)
    async with (
        rig.kubelet,
        rig.gateway(foreign=foreign, profiles=("nvidia",)),
        trivial_plugin(rig, listed("w-0", 0)) as plugin,
    ):
        refusal = await plugin.register(**change)
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=1)

    assert words in refusal


async def test_gateway_ends_when_a_plugin_had_registered_with_a_resource_of_a_profile(rig: Rig) -> None:
    """Two classes would have one list: the operator is told which file to remove, and nothing is
    served.
    """
    earlier_resources = Path(rig.settings.foreign.dir) / "topobus-resources.json"
    earlier_resources.write_text('{"resources": ["acme.example/widget", "nvidia.com/gpu"]}')
    with pytest.raises(ConfigError, match=r"profiles: nvidia name nvidia.com/gpu,") as refused:
        async with rig.kubelet, rig.gateway(profiles=("nvidia",)) as gateway:
            await gateway

    assert str(earlier_resources) in refused.value.next_step


MOUNT = pb.Mount(container_path="/opt/acme", host_path="/opt/acme", read_only=True)
NODE_SPEC = pb.DeviceSpec(container_path="/dev/widget", host_path="/dev/full", permissions="mrw")
DISK = pb.DeviceSpec(container_path="/dev/widget", host_path="/dev/sda", permissions="rw")
MOUNTING = EditRights(mounts=("/opt/acme",))
AS_KUBELET = EditRights(as_kubelet=True)


@dataclass(frozen=True)
class Answer:
    """What a plugin's Allocate says, what the operator allows its class, and what a pod is told.

    Empty: it is admitted.
    """

    rights: EditRights
    says: str
    mounts: tuple[pb.Mount, ...] = ()
    nodes: tuple[pb.DeviceSpec, ...] = ()
    env: tuple[tuple[str, str], ...] = (("A", "1"),)


ANSWERS = {
    "node-with-mknod": Answer(EditRights(), "", nodes=(NODE_SPEC,)),
    "disk": Answer(EditRights(), "device node '/dev/sda'", nodes=(DISK,)),
    "disk-that-is-allowed": Answer(EditRights(device_nodes=("/dev/sda",)), "", nodes=(DISK,)),
    "mount": Answer(EditRights(), "a mount of '/opt/acme'", mounts=(MOUNT,)),
    "mount-that-is-allowed": Answer(MOUNTING, "", mounts=(MOUNT,)),
    "mount-for-writing": Answer(
        MOUNTING, "for writing", mounts=(pb.Mount(container_path="/opt/acme", host_path="/opt/acme"),)
    ),
    "relative-mount": Answer(
        MOUNTING, "absolute path", mounts=(pb.Mount(container_path="opt", host_path="opt/acme", read_only=True),)
    ),
    "relative-mount-as-kubelet": Answer(AS_KUBELET, "", mounts=(pb.Mount(container_path="opt", host_path="opt/acme"),)),
    "empty-name": Answer(EditRights(), "variable ''", env=(("", "1"),)),
    "empty-name-as-kubelet": Answer(AS_KUBELET, "", env=(("", "1"),)),
    "strange-permission": Answer(
        EditRights(),
        "letters rwm",
        nodes=(pb.DeviceSpec(container_path="/dev/w", host_path="/dev/full", permissions="rwmx"),),
    ),
    "preload": Answer(EditRights(), "variable 'LD_PRELOAD'", env=(("LD_PRELOAD", "/x.so"),)),
    "preload-that-is-allowed": Answer(EditRights(variables=("LD_PRELOAD",)), "", env=(("LD_PRELOAD", "/x.so"),)),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
async def test_pod_gets_of_a_plugins_answer_what_the_operator_allows(rig: Rig, answer: Answer) -> None:
    """Device nodes that are no disks by default.

    Mounts, disks and loaders' variables where a setting names them; all
    of it where a setting says so.
    """
    async with rig.kubelet, rig.gateway(edits={CLASS: answer.rights}), trivial_plugin(rig, listed("w-0", 0)) as plugin:
        plugin.env, plugin.mounts, plugin.nodes = dict(answer.env), list(answer.mounts), list(answer.nodes)
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=1)
        admitted = await rig.kubelet.admit(pod(1))

    if answer.says:
        assert isinstance(admitted, Rejection)
        assert answer.says in admitted.message
    else:
        assert isinstance(admitted, Admission), admitted
        edits = admitted.container("main").edits
        assert [mount.host_path for mount in edits.mounts] == [mount.host_path for mount in answer.mounts]
        assert [(node.host_path, node.permissions) for node in edits.device_nodes] == [
            (node.host_path, node.permissions) for node in answer.nodes
        ]
        assert edits.env.items() >= dict(answer.env).items()


async def test_claim_is_refused_when_a_trusted_plugins_answer_has_no_form_in_cdi(rig: Rig) -> None:
    """What kubelet would pass on is not always what a CDI file can say: the claim gets a sentence,
    and no file is there.
    """
    async with rig.kubelet, rig.gateway(edits={CLASS: AS_KUBELET}), trivial_plugin(rig, listed("w-0", 0)) as plugin:
        plugin.mounts = [pb.Mount(container_path="opt", host_path="opt/acme")]
        await claim_of(rig, foreign_device(CLASS, "w-0"))
        await rig.kubelet.wait_for_driver(DRIVER)
        (prepared,) = await rig.kubelet.prepare_claims([TRAINING])
        files = list(rig.cdi_dir.iterdir())

    assert "is no absolute path" in prepared.error
    assert files == []
