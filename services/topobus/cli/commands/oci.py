"""`topobus oci`: merges a container's devices into its OCI spec, as kubelet and a container runtime
would.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from msgspec import Struct, structs

from topobus.bus.bus import Bus, Entry
from topobus.cli.commands.oci_hook import interface_hooks
from topobus.cli.exits import ExitCode, NotFoundError, UsageError
from topobus.cli.objects.input_files import DOCUMENT_BYTES, read_bytes
from topobus.cli.objects.manifests import parse_namespaced
from topobus.cli.options import BUS_DEFAULTS, BusOptions, one_of, open_bus, the_node
from topobus.cli.render.output import Output
from topobus.cli.render.tables import claim_names, results_of
from topobus.devicekit.containers.oci_host import look_up, read_cdi_files
from topobus.engine.alignment.planning.node_view import cpu_of_name
from topobus.engine.ledger.holdings import names_of
from topobus.engine.shapes.shapes import is_shape, shapes_of
from topobus.formats.containers.cdi import CdiDevice, CdiSpec, file_name
from topobus.formats.containers.oci import CdiFile, OciResult, PluginAnswer, device_paths, oci_spec
from topobus.formats.kubernetes.classic.classic_handles import shown
from topobus.formats.kubernetes.opaque_parameters import is_for_class
from topobus.formats.messages.catalogue import ALIGNMENT, INVENTORY, LEDGER, MACHINE, OBJECT, PODS, PREPARE, UNPREPARE
from topobus.formats.messages.messages import (
    ApiObject,
    PodsRequest,
    Prepared,
    PrepareRequest,
    UnprepareRequest,
    entries_of,
)
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.values.dra_names import CPU_CLASS, DRIVER, class_of_device, node_of_pool
from topobus.values.edits import ContainerEdits, Hook
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.outcome import MemoryBlock, Refusal
from topobus.values.request import Owner, OwnerKind

__all__ = ["oci", "oci_app"]

oci_app = App(name="oci", help="Print a container's OCI spec with its devices, as kubelet and a runtime would make it.")

_VENDOR = "topobus.dev"
_BY_GATEWAY = "run it in a pod; `topobus oci … --undo` gives back what was prepared for this spec"
# A spec as a runtime would begin with: the merged parts are visible against it, and --spec gives a
# real one.
_EMPTY: dict[str, Any] = {"ociVersion": "1.0.2", "process": {"env": []}, "mounts": [], "linux": {}}


@oci_app.default
async def oci(
    *,
    claim: Annotated[
        str | None, Parameter(help="NAMESPACE/NAME of an allocated claim, of the stand-alone store or of a cluster.")
    ] = None,
    pod: Annotated[
        str | None,
        Parameter(help="NAMESPACE/NAME of a pod, placed by `topobus place` or run by kubelet, with its claims."),
    ] = None,
    container: Annotated[str | None, Parameter(help="Which container of the pod; needed when it has several.")] = None,
    spec: Annotated[Path | None, Parameter(help="The config.json to merge into. Default: an empty one.")] = None,
    cdi_dir: Annotated[
        tuple[Path, ...], Parameter(help="Folders of CDI files, the last one wins. Default: /etc/cdi, /var/run/cdi.")
    ] = (),
    undo: Annotated[
        bool, Parameter(help="Undo what was prepared for that spec, once its container has ended; prints nothing.")
    ] = False,
    node: Annotated[str | None, Parameter(help="The node, when there are several.")] = None,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Print a container's OCI spec with the devices of a pod or claim.

    Conflicts and missing device nodes go to standard error. Devices that are not prepared yet are
    prepared, as for any container. `--undo` unprepares them.
    """
    if (claim is None) == (pod is None):
        raise UsageError("wanted whose devices: either --claim NAMESPACE/NAME or --pod NAMESPACE/NAME")
    if undo:
        return await _undo(claim, pod, container, node, options)
    base = _read_spec(spec)
    folders = cdi_dir or (Path("/etc/cdi"), Path("/var/run/cdi"))
    output = options.output()
    answers: list[PluginAnswer] = []
    async with open_bus(options) as bus:
        node = await the_node(bus, node)
        wanted = await _find(bus, node, claim, pod, container)
        holding = wanted.holding
        for owner, device_class, names in wanted.devices:
            answers += _answers(device_class, await _prepare(bus, node, owner, device_class, names, {}))
        files, problems = await asyncio.to_thread(read_cdi_files, folders)
        devices: list[str] = []
        cpus, memory = holding.cpus, _memory_nodes(holding)
        for namespace, name in wanted.claims:
            cdi_files, claimed = await _claim(bus, node, namespace, name, files)
            cpus, memory = cpus | claimed, memory or str(await _nodes_of(bus, node, claimed))
            devices += [file.spec.qualified_name(device.name) for file in cdi_files for device in file.spec.devices]
            files = (*files, *(cdi_file for cdi_file in cdi_files if cdi_file not in files))
    for problem in problems:
        output.note(f"left out: {problem}")
    nodes = await asyncio.to_thread(look_up, device_paths(answers, devices, files))
    merged = oci_spec(
        base, answers=answers, cdi_devices=devices, files=files, nodes=nodes, cpus=str(cpus), memory_nodes=memory
    )
    if isinstance(merged, Refusal):
        raise ContractError(f"a container runtime would refuse this: {merged.why}")
    return _print(output, merged)


def _print(output: Output, merged: OciResult) -> int:
    for conflict in merged.conflicts:
        output.note(f"conflict: {conflict}")
    if merged.missing:
        output.note(f"missing: a runtime would refuse this container, for this host has no {', '.join(merged.missing)}")
    whole = {"spec": merged.spec, "conflicts": merged.conflicts, "missing": merged.missing}
    Output(is_json=True).document(whole if output.is_json else merged.spec)
    return ExitCode.NO if merged.missing else ExitCode.OK


async def _undo(
    claim: str | None, pod: str | None, container: str | None, wanted_node: str | None, options: BusOptions
) -> int:
    output = options.output()
    async with open_bus(options) as bus:
        node = await the_node(bus, wanted_node)
        wanted = await _find(bus, node, claim, pod, container)
        held = list(wanted.devices)
        for namespace, name in wanted.claims:
            owner, classes, _ = await _claim_devices(bus, node, namespace, name)
            held += [(owner, device_class, tuple(sorted(names))) for device_class, names in sorted(classes.items())]
        ledger = await bus.get(LEDGER, node=node)
        for owner in {owner.key: owner for owner, _, _ in held}.values():
            _refuse_kubelets(owner, ledger.value if ledger else None)
        for owner, device_class, names in held:
            request = UnprepareRequest(op_id=f"oci-{uuid.uuid4().hex}", owner=owner, devices=names)
            reply = await bus.ask(UNPREPARE, request, node=node, device_class=device_class)
            if reply.refusal is not None:
                raise PeerUnavailable(
                    f"the {device_class} service cannot undo: {reply.refusal.why}",
                    next_step="end what uses the device, and try again",
                )
            output.note(f"undone: {device_class} {', '.join(names)}")
    return ExitCode.OK


def _refuse_kubelets(owner: Owner, ledger: Ledger | None) -> None:
    """Refuse to undo what the gateway has prepared for kubelet: its containers may be running."""
    allocation = ledger.allocations.get(owner.key) if ledger is not None else None
    is_kubelets = owner.kind not in (OwnerKind.POD, OwnerKind.CLAIM)
    if is_kubelets or (allocation is not None and allocation.is_prepared):
        raise ContractError(
            f"{owner} has its devices by kubelet, and the gateway undoes what it has prepared for it",
            next_step="delete the pod that uses them",
        )


class _Found(Struct, frozen=True, kw_only=True):
    """The devices of a container or of a claim."""

    holding: Holding
    """Its CPUs and memory."""
    devices: tuple[tuple[Owner, str, tuple[str, ...]], ...] = ()
    """Their owner, class and names: of placed pods and of kubelet's own allocations, not of
    claims."""
    claims: list[tuple[str, str]]


async def _find(bus: Bus, node: str, claim: str | None, pod: str | None, container: str | None) -> _Found:
    """Find the claim, or what a pod's container has."""
    if pod is not None:
        return await _pod(bus, node, *parse_namespaced(pod), container)
    return _Found(holding=Holding(), claims=[parse_namespaced(claim)] if claim is not None else [])


async def _pod(bus: Bus, node: str, namespace: str, name: str, container: str | None) -> _Found:
    """Find what a pod's container holds, and the claims that it uses: by the ledger and the
    stand-alone store, else by kubelet's PodResources.
    """
    ledger = await bus.get(LEDGER, node=node)
    allocation = _held_by(ledger, OwnerKind.POD, namespace, name)
    stored = await bus.get(OBJECT, kind="pod", namespace=namespace, name=name)
    if allocation is None and stored is None:
        return await _pod_by_kubelet(bus, node, namespace, name, container)
    holdings = {holding.container: holding for holding in allocation.holdings} if allocation else {}
    chosen = _choose(f"{namespace}/{name}", {*holdings, *(_containers(stored.value) if stored else {})}, container)
    holding = holdings.get(chosen, Holding())
    owner = allocation.owner if allocation else Owner(kind=OwnerKind.POD, namespace=namespace, name=name, uid="")
    claims = _claims_of(stored.value, chosen) if stored else []
    return _Found(
        holding=holding,
        devices=tuple((owner, device_class, names) for device_class, names in sorted(holding.devices.items())),
        claims=[(namespace, claim) for claim in claims],
    )


async def _pod_by_kubelet(bus: Bus, node: str, namespace: str, name: str, container: str | None) -> _Found:
    """Find what a pod's container has by kubelet's PodResources, which the gateway reads: pods of a
    cluster are only there.
    """
    try:
        reply = await bus.ask(PODS, PodsRequest(namespace=namespace), node=node)
        why = reply.why
        entries = [entry for entry in reply.containers if (entry.namespace, entry.pod) == (namespace, name)]
    except PeerUnavailable as err:
        entries, why = [], str(err)
    if not entries:
        detail = f"; kubelet's pods are not known: {why}" if why else ", and kubelet lists nothing of ours in it"
        raise NotFoundError(
            f"node {node} holds nothing for pod {namespace}/{name}{detail}",
            next_step="`topobus place` places a pod; `topobus pods` lists those of kubelet",
        )
    chosen = _choose(f"{namespace}/{name}", {entry.container for entry in entries if entry.container}, container)
    ledger = await bus.get(LEDGER, node=node)
    holders = _holders(ledger.value) if ledger else {}
    devices: dict[tuple[str, str], tuple[Owner, str, list[str]]] = {}
    cpus: list[str] = []
    memory: tuple[MemoryBlock, ...] = ()
    claims: dict[tuple[str, str], None] = {}
    for entry in entries:
        if entry.container not in (chosen, ""):
            continue
        if entry.claim:
            claims[parse_namespaced(entry.claim)] = None
        elif entry.resource == entry.device_class:
            # Devices of kubelet's own CPU and memory managers. Topobus offers neither.
            cpus += [device.name.removeprefix("cpu-") for device in entry.devices]
            memory += entry.memory
        else:
            for device in entry.devices:
                owner = holders.get((entry.device_class, device.name))
                if owner is None:
                    text = (
                        f"kubelet reports that {namespace}/{name} has {entry.device_class} {device.name}, and the "
                        "ledger has no holder for it"
                    )
                    raise PeerUnavailable(text, next_step="the gateway adopts it within seconds; try again")
                devices.setdefault((owner.key, entry.device_class), (owner, entry.device_class, []))[2].append(
                    device.name
                )
    return _Found(
        holding=Holding(container=chosen, cpus=CpuSet.parse(",".join(cpus)), memory=memory),
        devices=tuple((owner, device_class, tuple(sorted(names))) for owner, device_class, names in devices.values()),
        claims=list(claims),
    )


def _choose(pod: str, names: Iterable[str], container: str | None) -> str:
    """Choose a container. It must be named only where there are several."""
    known_names = sorted(names)
    if container is None and len(known_names) != 1:
        raise UsageError(
            f"pod {pod} has {len(known_names)} containers",
            next_step=f"name one of them with --container: {', '.join(known_names)}",
        )
    return one_of("container", container or known_names[0], known_names)


def _held_by(ledger: Entry[Ledger] | None, kind: OwnerKind, namespace: str, name: str) -> Allocation | None:
    allocations = ledger.value.allocations.values() if ledger is not None else ()
    wanted = (kind, namespace, name)
    return next(
        (each for each in allocations if (each.owner.kind, each.owner.namespace, each.owner.name) == wanted), None
    )


def _holders(ledger: Ledger) -> dict[tuple[str, str], Owner]:
    return {
        (device_class, name): allocation.owner
        for allocation in ledger.allocations.values()
        for device_class, names in names_of(allocation).items()
        for name in names
    }


async def _claim(
    bus: Bus, node: str, namespace: str, name: str, files: Iterable[CdiFile]
) -> tuple[list[CdiFile], CpuSet]:
    """Find a claim's CDI files (those that the gateway wrote for kubelet, else what it would write)
    and its exclusive CPUs.
    """
    owner, held, stored = await _claim_devices(bus, node, namespace, name)
    uid = owner.uid
    cpus = CpuSet.of(cpu for each_name in held.get(CPU_CLASS, ()) if (cpu := cpu_of_name(each_name)) is not None)
    cdi_files: list[CdiFile] = []
    for device_class, names in sorted(held.items()):
        written = [file for file in files if Path(file.path).name == file_name(_VENDOR, device_class, uid)]
        if written:
            cdi_files += written
            continue
        config = {name: tuple(_parameters(stored, device_class, name)) for name in names} if stored is not None else {}
        prepared = await _prepare(bus, node, owner, device_class, names, config)
        hooks = await _hooks(bus, node, device_class, prepared, config)
        devices = tuple(
            CdiDevice(
                name=f"claim-{uid}-{key}", edits=structs.replace(edits, hooks=(*edits.hooks, *hooks.get(key, ())))
            )
            for key, edits in sorted({**dict.fromkeys(hooks, ContainerEdits()), **prepared.edits}.items())
        )
        shown = CdiSpec(vendor=_VENDOR, device_class=device_class, devices=devices, common=prepared.common)
        cdi_files.append(CdiFile(path=f"of claim {namespace}/{name} ({device_class}, not written yet)", spec=shown))
    return cdi_files, cpus


async def _nodes_of(bus: Bus, node: str, cpus: CpuSet) -> NodeSet:
    """Find the NUMA nodes whose memory belongs to these CPUs: exclusive CPUs have theirs beside
    them.

    None for no CPU, and where a CPU has none.
    """
    machine = await bus.get(MACHINE, node=node) if cpus else None
    near = [cpu.numa_node for cpu in machine.value.cpus if cpu.id in cpus] if machine is not None else []
    return NodeSet.of(numa_node for numa_node in near if numa_node is not None)


async def _hooks(
    bus: Bus, node: str, device_class: str, prepared: Prepared, config: Mapping[str, tuple[dict[str, Any], ...]]
) -> dict[str, tuple[Hook, ...]]:
    """Make hooks for devices that must be in the container before it starts. The gateway does this
    through NRI, but a runtime alone needs hooks.

    Errors: raises ContractError for a device that is no interface or that its service adjusts for
    each container, and for a claim whose configuration is not known here.
    """
    if prepared.to_adjust:
        devices = ", ".join(prepared.to_adjust)
        raise ContractError(
            f"{device_class} {devices}: its service decides for each container what it gets, and only the "
            "gateway asks it (NRI)",
            next_step=_BY_GATEWAY,
        )
    if not prepared.to_attach:
        return {}
    inventory = await bus.get(INVENTORY, node=node, device_class=device_class)
    hooks: dict[str, tuple[Hook, ...]] = {}
    for name in prepared.to_attach:
        device = inventory.value.device(name) if inventory is not None else None
        interface = device.attributes.get("interface", "") if device is not None else ""
        if not isinstance(interface, str) or not interface or name not in config:
            why = "its claim's configuration is not known here" if interface else "it has no attribute interface"
            text = f"{device_class} {name} is brought into containers by the gateway alone: {why}"
            raise ContractError(text, next_step=_BY_GATEWAY)
        hooks[name] = interface_hooks(interface, list(config[name]))
    return hooks


def _parameters(claim: ApiObject, device_class: str, device: str) -> list[dict[str, Any]]:
    """Collect the opaque configurations of one device: the classes' before the claim's, in the
    order of the allocation.

    Parameters of the API group of a class are for its devices alone.
    """
    devices = (shown(claim).status.get("allocation") or {}).get("devices") or {}
    requests = {str(result.get("request")) for result in devices.get("results") or () if result.get("device") == device}
    wanted = requests | {request.partition("/")[0] for request in requests}
    every = [
        dict(opaque.get("parameters") or {})
        for entry in devices.get("config") or ()
        if (opaque := entry.get("opaque") or {}).get("driver") == DRIVER
        and (not entry.get("requests") or wanted & {str(request) for request in entry["requests"]})
    ]
    classes = [
        class_of_device(str(result.get("driver")), str(result.get("device"))) or ""
        for result in devices.get("results") or ()
    ]
    return [parameters for parameters in every if is_for_class(parameters, device_class, classes)]


async def _claim_devices(
    bus: Bus, node: str, namespace: str, name: str
) -> tuple[Owner, dict[str, set[str]], ApiObject | None]:
    """Find a claim's devices here: by the stand-alone store, which has the claim itself, else by
    what the gateway adopted for a claim of a cluster.
    """
    entry = await bus.get(OBJECT, kind="resourceclaim", namespace=namespace, name=name)
    if entry is not None:
        owner = Owner(
            kind=OwnerKind.CLAIM, namespace=namespace, name=name, uid=str(entry.value.metadata.get("uid", ""))
        )
        claim = await _with_parts(bus, node, entry.value)
        held = _held(claim, node)
        if not held:
            raise NotFoundError(
                f"claim {namespace}/{name} has no devices on node {node}",
                next_step="`topobus describe claim` shows why it waits",
            )
        return owner, held, claim
    allocation = _held_by(await bus.get(LEDGER, node=node), OwnerKind.CLAIM, namespace, name)
    if allocation is not None:
        return allocation.owner, {key: set(names) for key, names in names_of(allocation).items()}, None
    raise NotFoundError(
        f"there is no claim {namespace}/{name} in the stand-alone store, and node {node} holds nothing for "
        "one of a cluster",
        next_step="`topobus get claims -A` lists the store's; a cluster's claim is known here when kubelet has asked "
        "to prepare it",
    )


async def _with_parts(bus: Bus, node: str, claim: ApiObject) -> ApiObject:
    """Put the parts of a claim's shapes in their place, because device services know only those.

    Errors: raises NotFoundError for a shape that the machine does not have.
    """
    allocation = claim.status.get("allocation") or {}
    devices = allocation.get("devices") or {}
    results: list[dict[str, Any]] = []
    parts: dict[str, tuple[str, ...]] | None = None
    for result in devices.get("results") or ():
        name = str(result.get("device"))
        if not is_shape(str(result.get("driver")), name) or node_of_pool(str(result.get("pool"))) != node:
            results.append(result)
            continue
        if parts is None:
            alignment = await bus.get(ALIGNMENT, node=node)
            own_shapes = alignment.value.own_shapes if alignment is not None else ()
            parts = shapes_of([entry.value for entry in await bus.list(INVENTORY, node=node)], own_shapes).parts
        if name not in parts:
            raise NotFoundError(
                f"node {node} has no {name} now", next_step="delete the claim's pod, so that it is allocated again"
            )
        results += [{**result, "device": part} for part in parts[name]]
    status = {**claim.status, "allocation": {**allocation, "devices": {**devices, "results": results}}}
    return structs.replace(claim, status=status) if parts is not None else claim


async def _prepare(
    bus: Bus,
    node: str,
    owner: Owner,
    device_class: str,
    names: Iterable[str],
    config: Mapping[str, tuple[dict[str, Any], ...]],
) -> Prepared:
    """Ask the device service what a container needs.

    For devices that their owner holds, this changes nothing that kubelet would not change.
    """
    request = PrepareRequest(
        op_id=f"oci-{uuid.uuid4().hex}", owner=owner, devices=tuple(sorted(names)), device_config=dict(config)
    )
    reply = await bus.ask(PREPARE, request, node=node, device_class=device_class)
    if isinstance(reply.result, Refusal):
        raise PeerUnavailable(f"the {device_class} service cannot prepare: {reply.result.why}")
    if isinstance(reply.result, Accepted):
        raise PeerUnavailable(
            f"the {device_class} service is still at work: {reply.result.what}",
            retry_after_s=reply.result.retry_after_s,
        )
    return reply.result


def _answers(device_class: str, prepared: Prepared) -> list[PluginAnswer]:
    """Split a class's answer into parts, so that a conflict names the device."""
    parts: list[tuple[str, ContainerEdits]] = [
        (f"{_VENDOR}/{device_class}", prepared.common),
        *sorted(prepared.edits.items()),
    ]
    return [PluginAnswer(resource=name, edits=edits) for name, edits in parts]


def _held(claim: ApiObject, node: str) -> dict[str, set[str]]:
    """Class to devices of ours that a claim has on a node."""
    held: dict[str, set[str]] = {}
    for result in results_of(claim):
        device = str(result.get("device"))
        device_class = class_of_device(str(result.get("driver", "")), device)
        if device_class is not None and node_of_pool(str(result.get("pool", ""))) == node:
            held.setdefault(device_class, set()).add(device)
    return held


def _containers(pod: ApiObject) -> dict[str, list[str]]:
    """Container to the pod's own names of the claims that it uses."""
    every = [*entries_of(pod.spec.get("initContainers")), *entries_of(pod.spec.get("containers"))]
    return {
        str(container.get("name")): [
            str(use.get("name")) for use in entries_of((container.get("resources") or {}).get("claims"))
        ]
        for container in every
    }


def _claims_of(pod: ApiObject, container: str) -> list[str]:
    """Names of the claims that a container uses: given in the pod, or made for it from a
    template.
    """
    names = claim_names(pod)
    return [name for name in dict.fromkeys(names.get(use) for use in _containers(pod).get(container, ())) if name]


def _memory_nodes(holding: Holding) -> str:
    return str(NodeSet.of(node for block in holding.memory for node in block.nodes)) if holding.memory else ""


def _read_spec(path: Path | None) -> dict[str, Any]:
    if path is None:
        return _EMPTY
    try:
        document = json.loads(
            read_bytes(path, limit_bytes=DOCUMENT_BYTES, next_step="`runc spec` writes one to start from")
        )
    except ValueError as err:
        raise ContractError(f"{path}: no JSON: {err}", next_step="give the config.json of an OCI bundle") from err
    if not isinstance(document, dict):
        raise ContractError(f"{path}: got {type(document).__name__}, wanted the object of an OCI config.json")
    return document
