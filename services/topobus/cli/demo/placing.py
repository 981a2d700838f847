"""The first half of the demo: the node, a pod that is placed, one that is refused, and the first
one's release.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from rich.text import Text

from topobus.cli.commands.explain import replay
from topobus.cli.commands.place import reply_view
from topobus.cli.demo.scene import Scene, manifest
from topobus.cli.demo.stage import ExpectationError
from topobus.cli.objects.manifests import read_pod
from topobus.cli.render.device_listings import summary_listing
from topobus.formats.messages.catalogue import DECISION, INVENTORY, LEDGER, PLAN, RELEASE
from topobus.formats.messages.messages import PlaceReply, ReleaseRequest
from topobus.formats.messages.nouns import CLUSTER
from topobus.formats.messages.plan_messages import PlanRequest
from topobus.values.device import Device, Inventory
from topobus.values.idset import CpuSet
from topobus.values.outcome import ContainerPlacement, Placement, Refusal
from topobus.values.request import Owner, PodRequest

__all__ = [
    "EXPECTED_DEVICES",
    "place_pod",
    "release_owner",
    "show_node",
    "show_placement",
    "show_refusal",
    "show_release",
]

EXPECTED_DEVICES = {"gpu": 8, "nic": 8, "fpga": 2, "cpu": 224}
TRAINER = "pods/trainer.yaml"
SEQUENCER = "pods/sequencer.yaml"


async def show_node(scene: Scene) -> None:
    """Show what the services found on the recorded machine."""
    with scene.stage.step("What the node has", "topobus inventory; topobus machine"):
        for device_class, count in EXPECTED_DEVICES.items():
            await scene.inventory(device_class, _has_devices(count), f"{count} devices of class {device_class}")
        await scene.ledger(lambda ledger: True, "a ledger")
        inventories = [entry.value for entry in await scene.bus.list(INVENTORY, node=scene.node)]
        scene.stage.show(summary_listing(inventories, {}))
        scene.stage.show(await scene.drawing())
        counts = ", ".join(f"{count} {device_class}" for device_class, count in EXPECTED_DEVICES.items())
        scene.stage.expect(
            {inventory.device_class: len(inventory.devices) for inventory in inventories} == EXPECTED_DEVICES,
            f"the services found {counts}",
        )


async def show_placement(scene: Scene) -> PodRequest:
    """Place the trainer and check that its devices lie as close as possible.

    Errors: raises ExpectationError when they do not.
    """
    stage = scene.stage
    pod = read_pod(manifest(TRAINER))
    with stage.step(
        "A pod asks for 16 exclusive CPUs, 2 GPUs and 2 NICs on one NUMA node",
        "topobus place examples/pods/trainer.yaml",
    ):
        reply = await place_pod(scene, pod)
        stage.show(reply_view(pod, reply))
        if not isinstance(reply.result, Placement):
            raise ExpectationError(
                "the demo expected: the trainer is placed", next_step=f"it was refused: {reply.result.reasons}"
            )
        placed = reply.result.containers[0]
        devices = await scene.devices()
        check_alignment(scene, placed, devices)
        stage.show(await scene.drawing())
        event = next(
            (
                received_event.value
                for received_event in await scene.bus.last(DECISION, limit=20, node=scene.node)
                if received_event.value.id == reply.decision_id
            ),
            None,
        )
        stage.expect(event is not None, f"the decision is on the bus: topobus explain {reply.decision_id}")
        stage.expect(
            event is not None and replay(event) == reply.result,
            "replayed offline from that event alone, the answer is the same",
        )
    return pod


def check_alignment(scene: Scene, placed: ContainerPlacement, devices: dict[str, Device]) -> None:
    """Check the promises of the first placement: one NUMA node, whole
    cores, each NIC beside a GPU.
    """
    stage = scene.stage
    gpus = [devices[name] for name in placed.devices.get("gpu", ())]
    nics = [devices[name] for name in placed.devices.get("nic", ())]
    stage.expect((len(placed.cpus), len(gpus), len(nics)) == (16, 2, 2), "16 CPUs, 2 GPUs, 2 NICs", placed)
    nodes = {str(device.numa_nodes) for device in (*gpus, *nics)} | {str(placed.numa_nodes)}
    stage.expect(len(nodes) == 1 and len(placed.numa_nodes) == 1, f"all of it on NUMA node {placed.numa_nodes}", nodes)
    cores = {devices[f"cpu-{cpu}"].core for cpu in placed.cpus}
    whole = CpuSet.of(device.cpu for device in devices.values() if device.cpu is not None and device.core in cores)
    stage.expect(
        whole == placed.cpus, f"whole cores only: {len(cores)} cores, {len(placed.cpus)} CPUs", whole - placed.cpus
    )
    switches = {gpu.pcie_switch for gpu in gpus}
    beside = all(nic.pcie_switch is not None and nic.pcie_switch in switches for nic in nics)
    stage.expect(
        beside,
        "each NIC below the same PCIe switch as a GPU",
        {device.name: str(device.pcie_switch) for device in (*gpus, *nics)},
    )


async def show_refusal(scene: Scene, holder: PodRequest) -> PodRequest:
    """Show a pod that does not fit beside the first, why, and what would have to be released.

    Errors: raises ExpectationError when it fits.
    """
    stage = scene.stage
    pod = read_pod(manifest(SEQUENCER))
    title = "A second pod asks for 4 GPUs and an FPGA on one NUMA node: refused, and why"
    with stage.step(title, "topobus place examples/pods/sequencer.yaml"):
        reply = await place_pod(scene, pod)
        stage.show(reply_view(pod, reply))
        if not isinstance(reply.result, Refusal):
            raise ExpectationError(
                "the demo expected: the sequencer is refused", next_step=f"it was placed: {reply.result}"
            )
        codes = ", ".join(dict.fromkeys(reason.code for reason in reply.result.reasons))
        stage.expect(bool(codes), f"the refusal names its reasons: {codes}")
        named = [str(reason.facts) + reason.message for reason in reply.result.to_free]
        stage.expect(
            any(holder.owner.name in text for text in named),
            f"it names the holders in the way: {holder.owner}",
            reply.result.to_free,
        )
        ledger = await scene.bus.get(LEDGER, node=scene.node)
        held = set(ledger.value.allocations) if ledger else set()
        stage.expect(held == {holder.owner.key}, "the refused pod holds nothing", held)
    return pod


async def show_release(scene: Scene, holder: PodRequest, waiting: PodRequest) -> None:
    """Release the first pod, so that the second fits."""
    stage = scene.stage
    with stage.step(
        "The first pod is removed, and the second would fit now",
        f"topobus release pod {holder.owner.namespace}/{holder.owner.name}",
    ):
        await release_owner(scene, holder.owner)
        ledger = await scene.ledger(lambda each_ledger: not each_ledger.allocations, "an empty ledger")
        stage.expect(not ledger.allocations, "nothing is held any more")
        reply = await place_pod(scene, waiting, is_dry_run=True)
        stage.expect(isinstance(reply.result, Placement), "dry run: the second pod fits now", reply.result)
        if isinstance(reply.result, Placement):
            container = reply.result.containers[0]
            stage.show(
                Text(
                    f"would get {', '.join(container.devices['gpu'])} and "
                    f"{', '.join(container.devices['fpga'])} on NUMA node {container.numa_nodes}",
                    "faint",
                ),
                indent=4,
            )


async def place_pod(scene: Scene, pod: PodRequest, *, is_dry_run: bool = False) -> PlaceReply:
    """Ask the controller for a placement.

    Errors: raises ExpectationError when no node answers.
    """
    plan = await scene.bus.ask(PLAN, PlanRequest(op_id=str(uuid.uuid4()), pod=pod, is_dry_run=is_dry_run), node=CLUSTER)
    if plan.chosen is not None:
        return plan.chosen
    if not plan.answers:
        raise ExpectationError(f"the demo expected an answer of {scene.node}", next_step=f"silent: {plan.silent_nodes}")
    return PlaceReply(decision_id="", node=plan.answers[0].node, result=plan.answers[0].result)


async def release_owner(scene: Scene, owner: Owner) -> None:
    """Release what an owner holds."""
    await scene.bus.ask(RELEASE, ReleaseRequest(op_id=str(uuid.uuid4()), owner=owner), node=scene.node)


def _has_devices(count: int) -> Callable[[Inventory], bool]:
    return lambda inventory: len(inventory.devices) == count
