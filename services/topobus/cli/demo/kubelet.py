"""The demo's steps at kubelet's interfaces: device plugins for a pod, and the DRA socket for a
claim.

The kubelet is simulated, its sockets are real.
"""

from __future__ import annotations

from collections.abc import Sequence

from pygments.token import Comment, Keyword, Literal, Name, Token  # type: ignore[import-untyped]  # its stubs are not among our dependencies
from rich import box
from rich.columns import Columns
from rich.panel import Panel
from rich.style import Style
from rich.syntax import ANSISyntaxTheme, Syntax
from rich.table import Table
from rich.text import Text

from topobus.cli.demo.placing import EXPECTED_DEVICES, SEQUENCER, TRAINER
from topobus.cli.demo.scene import Scene, manifest
from topobus.cli.demo.stage import ExpectationError
from topobus.cli.objects.applying import apply_object, delete_object, is_allocated
from topobus.cli.objects.manifests import read_objects, read_pod
from topobus.cli.render.answers import with_parts
from topobus.cli.render.grids import facts_grid
from topobus.engine.claims.extended_resources import extended_claim_name
from topobus.engine.shapes.shapes import shapes_of
from topobus.formats.kubernetes.objects import metadata_of, object_parts
from topobus.formats.messages.catalogue import INVENTORY, LEDGER, OBJECT
from topobus.simulation.kubelet.simulator import (
    Admission,
    ClaimReference,
    Container,
    ContainerGrant,
    KubeletEvent,
    KubeletSimulator,
    Pod,
    Rejection,
)
from topobus.values.edits import ContainerEdits
from topobus.values.request import OwnerKind, PodRequest

__all__ = ["coloured", "show_claim", "show_kubelet", "show_pair"]

CLASSES = "claims/classes.yaml"
CLAIM = "claims/gpu-nic-pair.yaml"
PAIR = "pods/pair.yaml"


async def show_kubelet(scene: Scene, kubelet: KubeletSimulator) -> None:
    """Let kubelet admit the first pod and reject the second.

    Errors: raises ExpectationError when a promise is broken.
    """
    stage = scene.stage
    with stage.step("The same two pods through kubelet's device plugins"):
        for device_class in ("gpu", "nic", "fpga"):
            await kubelet.wait_for_resource(resource(device_class), allocatable=EXPECTED_DEVICES[device_class])
        allocatable = ", ".join(
            f"{key.partition('/')[2]} {capacity.allocatable}" for key, capacity in sorted(kubelet.capacity().items())
        )
        stage.confirm(f"the gateway registered with kubelet; allocatable topobus.dev/ {allocatable}")
        before = len(kubelet.events)
        admitted = await kubelet.admit(as_kubelet_pod(read_pod(manifest(TRAINER))))
        if not isinstance(admitted, Admission):
            raise ExpectationError(
                "the demo expected: kubelet admits the trainer", next_step=f"{admitted.reason}: {admitted.message}"
            )
        stage.show(call_table(kubelet.events[before:]), indent=2)
        grant = admitted.containers[0]
        stage.show(grant_view(grant), indent=2)
        await _check_grant(scene, grant)
        rejected = await kubelet.admit(as_kubelet_pod(read_pod(manifest(SEQUENCER))))
        if not isinstance(rejected, Rejection):
            raise ExpectationError(
                "the demo expected: kubelet rejects the sequencer", next_step=f"it was admitted: {rejected}"
            )
        stage.expect(
            rejected.reason == "TopologyAffinityError",
            f"kubelet rejects the second pod: {rejected.reason}: {rejected.message}",
            rejected,
        )
        await kubelet.remove(admitted.pod)
        await scene.ledger(lambda ledger: not ledger.allocations, "the ledger to follow kubelet's PodResources")
        stage.confirm(
            "the pod is removed: kubelet does not report it, PodResources no longer lists it, and the ledger is "
            "empty again"
        )


async def _check_grant(scene: Scene, grant: ContainerGrant) -> None:
    stage = scene.stage
    devices = await scene.devices()
    gpus = [devices[name] for name in grant.devices[resource("gpu")]]
    nics = [devices[name] for name in grant.devices[resource("nic")]]
    nodes = {str(device.numa_nodes) for device in (*gpus, *nics)}
    stage.expect(len(nodes) == 1, f"GPUs and NICs on NUMA node {', '.join(nodes)}", nodes)
    switches = {gpu.pcie_switch for gpu in gpus}
    stage.expect(
        all(nic.pcie_switch in switches for nic in nics),
        "each NIC below the same PCIe switch as a GPU",
        [device.name for device in (*gpus, *nics)],
    )
    ledger = await scene.bus.get(LEDGER, node=scene.node)
    owners = [allocation.owner for allocation in ledger.value.allocations.values()] if ledger else []
    stage.expect(
        len(owners) == 2 and all(owner.kind is OwnerKind.DEVICE_PLUGIN for owner in owners),
        "the ledger has what kubelet decided",
        owners,
    )
    stage.expect(
        not grant.edits.is_empty and not grant.conflicts,
        "the container edits of both resources fit together",
        grant.conflicts,
    )


async def show_claim(scene: Scene, kubelet: KubeletSimulator) -> None:
    """Allocate a claim with a selector and a constraint, prepare it over the DRA socket, and
    release it.
    """
    stage = scene.stage
    title = "A ResourceClaim: CEL selectors, matchAttribute pcieRoot, prepared over the DRA socket"
    with stage.step(title, "topobus apply -f examples/claims/gpu-nic-pair.yaml"):
        stage.show(coloured(_spec_of(CLAIM), "yaml"), indent=2)
        for api_object in (*read_objects(manifest(CLASSES)), *read_objects(manifest(CLAIM))):
            await apply_object(scene.bus, api_object)
        parts = object_parts(read_objects(manifest(CLAIM))[0])
        claim = await scene.until(OBJECT, is_allocated, "the controller to allocate the claim", parts)
        results = claim.status["allocation"]["devices"]["results"]
        stage.show(_results_table(results), indent=2)
        devices = await scene.devices()
        roots = {devices[result["device"]].pcie_root for result in results}
        stage.expect(
            len(results) == 2 and len(roots) == 1,
            f"the controller chose a GPU and a NIC below the same root complex {', '.join(roots)}",
            results,
        )
        uid = metadata_of(claim).uid
        ledger = await scene.ledger(
            lambda each_ledger: any(held.owner.uid == uid for held in each_ledger.allocations.values()),
            "the claim in the ledger",
        )
        stage.expect(
            any(held.owner.kind is OwnerKind.CLAIM for held in ledger.allocations.values()),
            "the node's ledger holds them for the claim",
        )

        drivers = tuple(sorted({result["driver"] for result in results}))
        for driver in drivers:
            await kubelet.wait_for_driver(driver)
        reference = ClaimReference(namespace=parts["namespace"], name=parts["name"], uid=uid, drivers=drivers)
        await _show_prepared(scene, kubelet, reference)
        await delete_object(scene.bus, parts)
        ledger = await scene.ledger(
            lambda each_ledger: not each_ledger.allocations, "the claim's devices to be released"
        )
        stage.expect(not ledger.allocations, "the claim is deleted and its devices are free")


async def _show_prepared(scene: Scene, kubelet: KubeletSimulator, reference: ClaimReference) -> None:
    """Prepare a claim over the DRA socket, show a CDI file of it, and unprepare it."""
    stage = scene.stage
    (prepared,) = await kubelet.prepare_claims([reference])
    stage.expect(
        not prepared.error and len(prepared.devices) == 2,
        "kubelet prepared it and hands these CDI names to the runtime:\n"
        + "\n".join(i for d in prepared.devices for i in d.cdi_devices),
        prepared,
    )
    files = sorted(scene.system.layout.cdi.glob("*.json"))
    stage.expect(bool(files), f"{len(files)} CDI files in {scene.system.layout.cdi}", "none")
    shown = next((file for file in files if "gpu" in file.name), files[0])
    stage.show(
        Panel(
            coloured(shown.read_text(encoding="utf-8").strip(), "json"),
            title=shown.name,
            title_align="left",
        ),
        indent=2,
    )

    errors = await kubelet.unprepare_claims([reference])
    left = sorted(scene.system.layout.cdi.glob("*.json"))
    stage.expect(not any(errors.values()) and not left, "unprepared: the CDI files are gone", (errors, left))


async def show_pair(scene: Scene, kubelet: KubeletSimulator) -> None:
    """Give a pod a GPU and its nearest NIC as one device, by a plain resource, prepare it, and release
    it.

    Errors: raises ExpectationError when a promise is broken.
    """
    stage = scene.stage
    title = "A GPU and its nearest NIC as one device, by a plain resource"
    with stage.step(title, "topobus apply -f examples/pods/pair.yaml"):
        stage.show(coloured(_spec_of(PAIR), "yaml"), indent=2)
        (wanted,) = read_objects(manifest(PAIR))
        await apply_object(scene.bus, wanted)
        of_pod = object_parts(wanted)
        pod = await scene.until(
            OBJECT, lambda stored: bool(extended_claim_name(stored)), "the controller to make a claim", of_pod
        )
        place = {**of_pod, "kind": "resourceclaim", "name": extended_claim_name(pod)}
        claim = await scene.until(OBJECT, is_allocated, "the controller to allocate the claim", place)
        (result,) = claim.status["allocation"]["devices"]["results"]
        shapes = shapes_of([entry.value for entry in await scene.bus.list(INVENTORY, node=scene.node)])
        parts = shapes.parts.get(result["device"], ())
        devices = await scene.devices()
        stage.expect(
            sorted(devices[part].device_class for part in parts) == ["gpu", "nic"]
            and len({devices[part].pcie_switch for part in parts}) == 1,
            f"the controller made {place['name']} for it: {with_parts(result['device'], shapes.parts)}, both below one "
            "PCIe switch",
            result,
        )
        uid = metadata_of(claim).uid
        ledger = await scene.ledger(
            lambda each_ledger: any(held.owner.uid == uid for held in each_ledger.allocations.values()),
            "the claim in the ledger",
        )
        held = {name for each in ledger.allocations.values() for names in each.devices.values() for name in names}
        stage.expect(held == set(parts), "the node's ledger holds both for the claim", held)
        reference = ClaimReference(
            namespace=place["namespace"], name=place["name"], uid=uid, drivers=(result["driver"],)
        )
        (prepared,) = await kubelet.prepare_claims([reference])
        names = [name for device in prepared.devices for name in device.cdi_devices]
        has_both = all(any(part in name for name in names) for part in parts)
        stage.expect(
            not prepared.error and len(prepared.devices) == 1 and has_both,
            "kubelet prepared one device, by these CDI names:\n" + "\n".join(names),
            prepared,
        )
        errors = await kubelet.unprepare_claims([reference])
        await delete_object(scene.bus, of_pod)
        ledger = await scene.ledger(lambda each_ledger: not each_ledger.allocations, "both to be released")
        stage.expect(
            not any(errors.values()) and not ledger.allocations, "the pod is deleted and both are free", errors
        )


def resource(device_class: str) -> str:
    """Name a class's extended resource.

    >>> resource("gpu")
    'topobus.dev/gpu'
    """
    return f"topobus.dev/{device_class}"


def as_kubelet_pod(pod: PodRequest) -> Pod:
    """Convert the manifest to a pod for kubelet: extended resources and exclusive CPUs."""
    return Pod(
        name=pod.owner.name,
        namespace=pod.owner.namespace,
        uid=pod.owner.uid,
        containers=tuple(
            Container(
                name=container.name,
                kind=container.kind,
                cpus=container.cpus,
                resources={resource(device.device_class): device.count for device in container.devices},
            )
            for container in pod.containers
        ),
    )


def call_table(events: Sequence[KubeletEvent]) -> Table:
    """Show kubelet's calls of one admission in order."""
    table = Table(box=box.SIMPLE_HEAD, header_style="title")
    table.add_column("ms", justify="right")
    table.add_column("kubelet called", style="name")
    table.add_column("resource")
    table.add_column("with", overflow="fold")
    start = events[0].t if events else 0.0
    for event in events:
        if event.event.split(".")[0] in ("GetPreferredAllocation", "Allocate", "PreStartContainer"):
            table.add_row(f"{(event.t - start) * 1000:.0f}", event.event, event.subject, _detail(event))
    return table


def _detail(event: KubeletEvent) -> str:
    """Return what kubelet asked for in one call, in the words of its messages."""
    request = (event.detail.get("container_requests") or [event.detail])[0]
    available = request.get("available_deviceIDs")
    if available is not None:
        return f"{request.get('allocation_size')} of {', '.join(available)}"
    return ", ".join(request.get("devices_ids") or ()) or str(event.detail)


def grant_view(grant: ContainerGrant) -> Columns:
    """Show what a container got and how it is edited."""
    left = facts_grid()
    for name, ids in sorted(grant.devices.items()):
        left.add_row(name, "\n".join(ids))
    if grant.cpus:
        left.add_row("cpus", f"{grant.cpus} (by kubelet's own CPU manager)")
    if grant.cdi_devices:
        left.add_row("CDI", "\n".join(grant.cdi_devices))
    return Columns(
        [
            Panel(left, title=f"container {grant.name} gets", title_align="left"),
            Panel(edits_table(grant.edits), title="container edits", title_align="left"),
        ]
    )


def edits_table(edits: ContainerEdits) -> Table:
    """Show container edits: variables, device nodes, mounts."""
    table = facts_grid()
    for key, value in sorted(edits.env.items()):
        table.add_row("env", f"{key}={value}")
    for node in edits.device_nodes:
        table.add_row("node", Text(node.path))
    for mount in edits.mounts:
        table.add_row("mount", f"{mount.host_path} on {mount.container_path}")
    return table


def _spec_of(path: str) -> str:
    """Return a manifest from its spec on, without the comment on top."""
    lines = manifest(path).read_text(encoding="utf-8").splitlines()
    return "\n".join(lines[lines.index("spec:") :])


def _results_table(results: list[dict[str, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="title")
    for title in ("request", "driver", "pool", "device"):
        table.add_column(title)
    for result in results:
        table.add_row(result["request"], result["driver"], result["pool"], Text(result["device"], "name"))
    return table


_THEME = ANSISyntaxTheme(
    {
        Token: Style(),
        Comment: Style(dim=True),
        Keyword: Style(color="blue"),
        Name.Tag: Style(color="cyan"),
        Literal.String: Style(color="green"),
        Literal.Number: Style(color="magenta"),
    }
)


def coloured(text: str, language: str) -> Syntax:
    """Colour a text of a language that pygments knows."""
    return Syntax(text, language, theme=_THEME, background_color="default", word_wrap=True)
