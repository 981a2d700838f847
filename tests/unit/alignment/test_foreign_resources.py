"""Resources of other domains: planned like the class that has their devices, refused where nobody
offers them.
"""

from __future__ import annotations

import pytest
from msgspec import structs

from support.alignment_nodes import container, dgx, dgx_facts, pod
from topobus.engine.alignment.planning.node_view import node_view
from topobus.engine.alignment.planning.placement import place
from topobus.engine.alignment.planning.resource_pools import offered_part
from topobus.values.device import Device, Inventory
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import ContainerRequest, DeviceRequest, PodRequest
from topobus.values.resource_names import similar_class
from topobus.values.view import AlignmentOptions, NodeView

WIDGET = "widgets.example.com/widget"
CLASS = "widget-widgets"


def with_widgets(view: NodeView) -> NodeView:
    """The node with three devices of somebody else's plugin."""
    devices = tuple(Device(name=f"w{number}", device_class=CLASS) for number in range(3))
    return structs.replace(view, devices={**view.devices, CLASS: devices}, resource_names={WIDGET: CLASS})


def asking(**counts: int) -> PodRequest:
    """A pod whose one container asks for resources by their full names (`__` stands for what no
    keyword can hold).
    """
    names = {
        "widget": WIDGET,
        "by_class": CLASS,
        "nvidia": "nvidia.com/gpu",
        "rdma": "rdma/hca",
        "typo": "widgets.example.com/widgets",
    }
    names |= {"dongle": "example.com/dongle", "claimed": "deviceclass.resource.kubernetes.io/gpu.topobus.dev"}
    wanted = tuple(DeviceRequest(device_class=names[name], count=count) for name, count in counts.items())
    return structs.replace(pod("p"), containers=(ContainerRequest(name="main", devices=wanted),))


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        pytest.param(asking(nvidia=9), "nvidia.com/gpu; topobus.dev/gpu is offered: did you mean it?", id="gpu"),
        pytest.param(asking(rdma=1), "rdma/hca; topobus.dev/nic is offered", id="rdma"),
        pytest.param(
            asking(typo=1),
            f"widgets.example.com/widgets; {WIDGET} is offered by its device plugin: did you mean it?",
            id="typo",
        ),
        pytest.param(
            asking(dongle=1),
            "example.com/dongle; there are topobus.dev/fpga, topobus.dev/gpu, topobus.dev/nic, "
            f"topobus.dev/{CLASS}, {WIDGET}",
            id="strange",
        ),
        pytest.param(asking(claimed=1), "it asks for a claim of DeviceClass gpu.topobus.dev", id="class-of-claims"),
    ],
)
def test_place_refuses_a_resource_when_nobody_offers_it(request_: PodRequest, said: str) -> None:
    """What nobody on the node has is refused under its own name, with who has something like it."""
    outcome = place(with_widgets(dgx()), request_)

    assert isinstance(outcome, Refusal)
    assert [reason.code for reason in outcome.reasons] == ["unknown-resource"]
    assert said in outcome.reasons[0].message


def test_refusal_names_the_driver_when_one_has_devices_like_it() -> None:
    """People see who offers the resource that they may have meant."""
    view = dgx()
    gpus = tuple(structs.replace(device, driver="nvidia") for device in view.devices["gpu"])

    outcome = place(structs.replace(view, devices={**view.devices, "gpu": gpus}), asking(nvidia=1))

    assert isinstance(outcome, Refusal)
    assert outcome.reasons[0].message.endswith("topobus.dev/gpu is offered by driver nvidia: did you mean it?")


def test_place_gives_a_foreign_resource_when_its_plugin_is_with_us() -> None:
    """The vendor's name and our class mean the same devices, also beside each other in one
    container.
    """
    view = with_widgets(dgx())

    by_name, by_class, both, more = (
        place(view, pod_request)
        for pod_request in (asking(widget=2), asking(by_class=2), asking(widget=1, by_class=1), asking(widget=4))
    )

    assert isinstance(by_name, Placement)
    assert by_name.containers[0].devices == {CLASS: ("w0", "w1")}
    assert by_name == by_class == both
    assert isinstance(more, Refusal)
    assert more.reasons[0].code == "not-enough-devices"


def test_node_view_knows_foreign_names_when_an_inventory_tells_one() -> None:
    """The inventory carries the resource's name, so whoever reads inventories plans alike."""
    machine, inventories = dgx_facts()
    inventory = Inventory(node=machine.node, device_class=CLASS, generation=1, devices=(), resource=WIDGET)

    view = node_view(machine, {**inventories, CLASS: inventory}, None, AlignmentOptions(), dgx().reserved_cpus)

    assert view.resource_names == {WIDGET: CLASS}


def test_offered_part_leaves_out_what_no_service_knows() -> None:
    """On a cluster's node kubelet may have plugins that never met us: their resources are no
    objection of ours.
    """
    request = asking(widget=1, nvidia=1)

    kept = offered_part(with_widgets(dgx()), request)

    assert [device.device_class for device in kept.containers[0].devices] == [WIDGET]
    assert offered_part(dgx(), pod("p", container(gpu=1))) == pod("p", container(gpu=1))


@pytest.mark.parametrize(
    ("resource", "alike"),
    [
        ("nvidia.com/gpu", "gpu"),
        ("amd.com/gpu", "gpu"),
        ("gpu.intel.com/i915", "gpu"),
        ("nvidia.com/mig-1g.10gb", "gpu"),
        ("rdma/hca_shared_devices_a", "nic"),
        ("intel.com/intel_sriov_netdevice", "nic"),
        ("xilinx.com/fpga-xilinx_u250_gen3x16_xdma_shell_3_1-0", "fpga"),
        ("fpga.intel.com/af-ce4", "fpga"),
        ("smarter-devices/fuse", ""),
        ("example.com/gpu-nic", ""),
    ],
)
def test_similar_class_knows_the_words_of_device_plugins(resource: str, alike: str) -> None:
    """Names as the vendors' plugins use them lead to the class that is like it, doubtful ones to
    none.
    """
    assert similar_class(resource, ["cpu", "fpga", "gpu", "nic"]) == alike
