"""`topobus place` and `topobus release`: reserve a pod's devices and CPUs, and release them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import RenderableType
from rich.panel import Panel
from rich.text import Text

from topobus.bus.bus import Bus, NobodyThere, Unreadable
from topobus.cli.exits import ExitCode, NotFoundError, UsageError
from topobus.cli.listing.responding_services import CONTROLLER, note_waiting, topology_on
from topobus.cli.objects.applying import is_scheduled
from topobus.cli.objects.manifests import parse_namespaced, read_wanted, request_of
from topobus.cli.objects.sources import Files
from topobus.cli.objects.vendor_names import Profiles, by_our_names
from topobus.cli.options import BUS_DEFAULTS, BusOptions, NamesSystem, NodeFilter, one_of, open_bus
from topobus.cli.render.answers import answer_view
from topobus.cli.render.output import Output
from topobus.formats.kubernetes.objects import metadata_of, name_of, object_parts
from topobus.formats.kubernetes.pod import pod_request
from topobus.formats.messages.catalogue import LEDGER, MACHINE, OBJECT, PLACE, PLAN, RELEASE
from topobus.formats.messages.messages import ApiObject, PlaceReply, PlaceRequest, ReleaseRequest
from topobus.formats.messages.nouns import CLUSTER
from topobus.formats.messages.plan_messages import PlanReply, PlanRequest
from topobus.values.errors import PeerUnavailable
from topobus.values.outcome import Placement
from topobus.values.request import Owner, OwnerKind, PodRequest
from topobus.values.vendor_profiles import VendorProfile

__all__ = ["is_by_claims", "place", "release_app", "reply_view"]

_SHOWN_NODES = 5
_CLAIMS_NEXT = "`topobus apply -f FILE` schedules it with them, `topobus allocate -f FILE` shows where they would go"

release_app = App(
    name="release",
    help="Release what `topobus place` or a claim without an object holds; stored claims: `topobus delete claim`.",
)


@dataclass(frozen=True)
class _Answer:
    """The outcome for one pod."""

    pod: PodRequest
    reply: PlaceReply | None
    """Of the node that has it, or was asked."""
    plan: PlanReply | None
    """Of the controller, when it chose the node."""

    @property
    def is_placed(self) -> bool:
        """Say whether a node has it, or would."""
        return self.reply is not None and isinstance(self.reply.result, Placement)


async def place(
    *manifest: Annotated[
        Path,
        Parameter(
            name="POD.YAML",
            help="Manifests or folders of them: pods, and workloads, whose pods are placed one after the other.",
        ),
    ],
    file: Files = (),
    node: Annotated[
        str | None, Parameter(help="Ask this node itself. Without it the controller chooses among all.")
    ] = None,
    dry_run: Annotated[bool, Parameter(help="Show where it would go; hold nothing.")] = False,
    profiles: Profiles = (),
    operation: Annotated[
        str | None, Parameter(help="Operation id of an earlier try whose answer was lost. The answer is the same then.")
    ] = None,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Place a pod and show where and why, or why not and what would have to be released."""
    if not (manifest or file):
        raise UsageError(
            "nothing to place is named: wanted POD.YAML or -f FILE",
            next_step="examples/pods has manifests to start from",
        )
    objects = read_wanted("place", (*manifest, *file), options.output().note, kinds=("Pod",))
    pods = [api_object for api_object in objects if api_object.kind == "Pod"]
    return await _place(pods, node, dry_run, profiles, operation or str(uuid.uuid4()), options)


async def _place(
    manifests: Sequence[ApiObject],
    node: str | None,
    is_dry_run: bool,
    profiles: tuple[VendorProfile, ...],
    op_id: str,
    options: BusOptions,
) -> int:
    output = options.output()
    by_claims = [manifest for manifest in manifests if is_by_claims(manifest)]
    manifests = [manifest for manifest in manifests if manifest not in by_claims]
    with_claims = ", ".join(name_of(manifest) for manifest in manifests if manifest.spec.get("resourceClaims"))
    if with_claims:
        output.note(f"{with_claims} has claims, which `place` does not allocate: {_CLAIMS_NEXT}")
    if len(manifests) > 1 and is_dry_run:
        output.note(f"a dry run holds nothing: each of the {len(manifests)} pods is asked about by itself")
    answers: list[_Answer] = []
    if manifests:
        async with open_bus(options, NamesSystem.IF_SEVERAL if is_dry_run else NamesSystem.ALWAYS) as bus:
            if node is not None:
                one_of("node", node, [entry.parts["node"] for entry in await bus.list(MACHINE)])
            pods = [await _same_pod(bus, manifest, is_dry_run=is_dry_run) for manifest in manifests]
            pods = await by_our_names(bus, pods, profiles, node, output.note)
            try:
                for number, pod in enumerate(pods):
                    asking = _ask(
                        bus, pod, node, op_id if len(pods) == 1 else f"{op_id}-{number}", is_dry_run=is_dry_run
                    )
                    asked = CONTROLLER if node is None else topology_on(node)
                    answers.append(await note_waiting(bus, asking, [asked], output.note))
            except PeerUnavailable:
                # Pods that were placed before an error hold their devices, and only this output
                # reports them.
                _show(output, answers, is_dry_run=is_dry_run)
                raise
    for manifest in by_claims:
        output.show(
            Text.assemble(
                (name_of(manifest), "name"),
                (" is not placed: ", "fail"),
                f"it requests nothing but its claims. {_CLAIMS_NEXT}",
            )
        )
    if not manifests and not by_claims:
        output.show(Text("0 pods: nothing is placed", "faint"))
    _show(output, answers, is_dry_run=is_dry_run)
    for answer in answers:
        if answer.reply is None and not (answer.plan and answer.plan.answers):
            silent = ", ".join(answer.plan.silent_nodes) if answer.plan else ""
            raise PeerUnavailable(
                f"no node answered{f': topology did not answer on {silent}' if silent else ''}",
                next_step="`topobus doctor` reports what is missing",
            )
    return ExitCode.OK if not by_claims and all(answer.is_placed for answer in answers) else ExitCode.NO


def _show(output: Output, answers: Sequence[_Answer], *, is_dry_run: bool) -> None:
    documents = [answer.plan or answer.reply for answer in answers]
    output.document(documents[0] if len(documents) == 1 else {"answers": documents})
    for answer in answers:
        if answer.reply is not None:
            output.show(reply_view(answer.pod, answer.reply, is_dry_run=is_dry_run))
        if answer.plan is not None:
            output.show(*_other_answers(answer.pod, answer.plan))


def is_by_claims(manifest: ApiObject) -> bool:
    """Say whether a pod has claims, and requests nothing else that a node would hold for it."""
    request = request_of(manifest)
    return bool(manifest.spec.get("resourceClaims")) and not any(
        container.devices or container.cpus or container.memory_bytes or container.hugepages
        for container in request.containers
    )


async def _ask(bus: Bus, pod: PodRequest, node: str | None, op_id: str, *, is_dry_run: bool) -> _Answer:
    try:
        if node is not None:
            reply = await bus.ask(PLACE, PlaceRequest(op_id=op_id, pod=pod, is_dry_run=is_dry_run), node=node)
            return _Answer(pod, reply, None)
        plan = await bus.ask(PLAN, PlanRequest(op_id=op_id, pod=pod, is_dry_run=is_dry_run), node=CLUSTER)
    except NobodyThere as err:
        if node is not None:
            raise PeerUnavailable(
                f"nothing was placed: no topology service answers on {node}",
                next_step=f"start topobus-topology on {node}",
            ) from err
        nodes = sorted(entry.parts["node"] for entry in await bus.list(LEDGER))
        raise PeerUnavailable(
            "nothing was placed: the controller, which chooses among the nodes, does not run",
            next_step=f"`topobus place … --node {nodes[0] if len(nodes) == 1 else 'NODE'}` asks a node itself"
            + (
                f" (nodes: {', '.join(nodes[:_SHOWN_NODES])}{', …' if len(nodes) > _SHOWN_NODES else ''})"
                if len(nodes) > 1
                else ""
            ),
        ) from err
    except PeerUnavailable as err:
        if is_dry_run:
            raise PeerUnavailable(
                err.message, next_step="a dry run holds nothing: ask again, or run `topobus doctor`"
            ) from err
        next_step = (
            f"it may have been placed or not: ask again with --operation {op_id}, or look with `topobus machine`"
        )
        raise PeerUnavailable(err.message, next_step=next_step) from err
    if plan.retry_after_s > 0:
        raise PeerUnavailable(
            f"the controller is busy with other plans, and has asked no node: ask again in {plan.retry_after_s:g} s",
            next_step=f"`topobus place … --node NODE` asks one node without it; ask again with --operation {op_id}",
            retry_after_s=plan.retry_after_s,
        )
    return _Answer(pod, plan.chosen, plan)


async def _same_pod(bus: Bus, manifest: ApiObject, *, is_dry_run: bool) -> PodRequest:
    """Read the pod's request.

    A dry run uses the identity of the stored pod of that name, whose name no other owner may hold.

    Errors: raises UsageError for a name that is stored: the controller schedules that pod, and two
    owners of one name could not be distinguished.
    """
    entry = await bus.get(OBJECT, **object_parts(manifest))
    if entry is None:
        return request_of(manifest)
    metadata = metadata_of(entry.value)
    if not is_dry_run:
        place_ = f"{metadata.namespace or 'default'}/{metadata.name}"
        raise UsageError(
            f"pod {place_} is stored, and the controller schedules it: `place` would make a second owner of that name",
            next_step=f"`topobus delete pod {metadata.name} -n {metadata.namespace or 'default'}` first, or choose "
            "another name",
        )
    return pod_request(manifest, uid=metadata.uid) if metadata.uid else request_of(manifest)


def reply_view(
    pod: PodRequest, reply: PlaceReply, *, is_dry_run: bool = False, has_claims_alone: bool = False
) -> RenderableType:
    """Render a node's answer to `place`.

    A pod that requests only its claims holds nothing besides them.
    """
    is_placed = isinstance(reply.result, Placement)
    verdict = ("would go to" if is_dry_run else "placed on") if is_placed else "refused by"
    answer = (
        Text("nothing of its own: it has what its claims have")
        if has_claims_alone and is_placed
        else answer_view(reply.result)
    )
    return _panel(answer, f"{pod.owner} {verdict} {reply.node}", reply.decision_id, is_ok=is_placed)


def _panel(answer: RenderableType, title: str, decision_id: str, *, is_ok: bool) -> Panel:
    return Panel(
        answer,
        title=Text(title),
        title_align="left",
        border_style="ok" if is_ok else "fail",
        subtitle=Text(f"topobus explain {decision_id}") if decision_id else None,
        subtitle_align="left",
    )


def _other_answers(pod: PodRequest, plan: PlanReply) -> Iterable[RenderableType]:
    chosen = plan.chosen.node if plan.chosen else ""
    for answer in plan.answers:
        if answer.node != chosen:
            is_possible = isinstance(answer.result, Placement)
            title = f"{pod.owner} {'would fit on' if is_possible else 'refused by'} {answer.node}"
            yield _panel(answer_view(answer.result), title, answer.decision_id, is_ok=is_possible)
    for node in plan.silent_nodes:
        yield Text(f"topology on {node} did not answer in time: unknown, not refused", "warn")


@release_app.command(name="pod")
async def release_pod(
    pod: Annotated[str, Parameter(name="NAMESPACE/NAME", help="The pod.")],
    /,
    *,
    node: NodeFilter = None,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Release all that a pod holds."""
    namespace, name = parse_namespaced(pod)
    output = options.output()
    async with open_bus(options, NamesSystem.ALWAYS) as bus:
        stored = await bus.get_or_last(OBJECT, kind="pod", namespace=namespace, name=name)
        if isinstance(stored, Unreadable):
            # Its devices are released by the ledger: the controller may never be able to.
            _note_unreadable(output, "pod", namespace, name)
            stored = None
        held = await _holdings_of(bus, OwnerKind.POD, namespace, name, node)
        # Holdings besides the stored pod's own are from an earlier `place`, or from a pod that was
        # deleted by force.
        others = [
            (where, owner) for where, owner in held if stored is None or owner.uid != metadata_of(stored.value).uid
        ]
        held = others or held
        if stored is not None and not others and is_scheduled(stored.value):
            raise UsageError(
                f"pod {namespace}/{name} is stored and scheduled: if only its devices were released, it would "
                "stay on its node without any",
                next_step=f"`topobus delete pod {name} -n {namespace}` releases all that it has",
            )
        if not held:
            where = f" on {node}" if node else ""
            raise NotFoundError(
                f"no pod {namespace}/{name} holds anything{where}", next_step="`topobus machine` lists who holds what"
            )
        return await _release_each(bus, held, output)


@release_app.command(name="claim")
async def release_claim(
    claim: Annotated[str, Parameter(name="NAMESPACE/NAME", help="The claim.")],
    /,
    *,
    node: NodeFilter = None,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Release all that a claim holds whose object is no longer stored.

    A node refuses while a container may be using it.
    """
    namespace, name = parse_namespaced(claim)
    output = options.output()
    async with open_bus(options, NamesSystem.ALWAYS) as bus:
        stored = await bus.get_or_last(OBJECT, kind="resourceclaim", namespace=namespace, name=name)
        if isinstance(stored, Unreadable):
            _note_unreadable(output, "claim", namespace, name)
            stored = stored.last
        uid = metadata_of(stored.value).uid if stored is not None else ""
        held = await _holdings_of(bus, OwnerKind.CLAIM, namespace, name, node)
        others = [(where, owner) for where, owner in held if owner.uid != uid]
        if held and not others:
            raise UsageError(
                f"claim {namespace}/{name} is stored: if only its devices were released, it would stay "
                "allocated without any",
                next_step=f"`topobus delete claim {name} -n {namespace}` releases all that it has",
            )
        if not others:
            where = f" on {node}" if node else ""
            raise NotFoundError(
                f"no claim {namespace}/{name} holds anything{where}", next_step="`topobus holders` lists who holds what"
            )
        return await _release_each(bus, others, output)


def _note_unreadable(output: Output, kind: str, namespace: str, name: str) -> None:
    output.note(
        f"what is stored of {kind} {namespace}/{name} cannot be read; `topobus delete {kind} {name} -n {namespace}` "
        "removes it"
    )


async def _release_each(bus: Bus, held: Iterable[tuple[str, Owner]], output: Output) -> int:
    """Ask nodes to release what owners hold there, and print the outcome."""
    released = []
    is_refused = False
    for where, owner in held:
        answer = bus.ask(RELEASE, ReleaseRequest(op_id=str(uuid.uuid4()), owner=owner), node=where)
        reply = await note_waiting(bus, answer, [topology_on(where)], output.note)
        released.append(
            {"node": where, "owner": owner, "devices": reply.devices, "ledger_sequence": reply.ledger_sequence}
        )
        if reply.refusal is not None:
            is_refused = True
            output.show(Text(f"{where} does not release what {owner} holds: {reply.refusal.why}", "fail"))
            continue
        parts = ", ".join(f"{len(names)} {device_class}" for device_class, names in sorted(reply.devices.items()))
        output.show(Text(f"{owner} released {parts or 'nothing'} on {where}"))
    output.document({"released": released})
    return ExitCode.NO if is_refused else ExitCode.OK


async def _holdings_of(
    bus: Bus, kind: OwnerKind, namespace: str, name: str, node: str | None
) -> list[tuple[str, Owner]]:
    """Find the owner in the ledgers: its uid is known only there."""
    return [
        (entry.parts["node"], allocation.owner)
        for entry in await bus.list(LEDGER)
        for allocation in entry.value.allocations.values()
        if node in (None, entry.parts["node"])
        and (allocation.owner.kind, allocation.owner.namespace, allocation.owner.name) == (kind, namespace, name)
    ]
