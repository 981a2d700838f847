"""`topobus simulate`: plan pods on a recorded machine, without any server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import Parameter, validators
from rich.text import Text

from topobus.cli.commands.place import is_by_claims, reply_view
from topobus.cli.exits import ExitCode, InputError, UsageError
from topobus.cli.objects.manifests import read_wanted, request_of
from topobus.cli.options import OUTPUT_DEFAULTS, MachineSource, OutputOptions
from topobus.cli.render.answers import reason_lines
from topobus.cli.render.machine_drawing import draw_machine
from topobus.cli.render.output import DRAWING_WIDTH, Output
from topobus.cli.rules.own_shapes import OwnShapes, read_own_shapes
from topobus.cli.simulation.claims import ClaimAnswer, ClaimSimulation, claim_lines
from topobus.cli.simulation.cpus_offered import CpusOffered, ReservedCpus, read_cpus, read_reserved_cpus
from topobus.cli.simulation.node import Simulation, open_machine
from topobus.formats.kubernetes.objects import metadata_of, name_of
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import ApiObject, PlaceReply
from topobus.values.machine import Machine
from topobus.values.outcome import Placement
from topobus.values.quantity import Quantity
from topobus.values.request import Policy, Scope
from topobus.values.vendor_profiles import VendorProfile, asked_in_profiles
from topobus.values.view import AlignmentOptions, CpuOptions, PlanMode

__all__ = ["simulate"]

_CpuOption = Literal[
    "full-pcpus-only",
    "distribute-cpus-across-numa",
    "distribute-cpus-across-cores",
    "align-by-socket",
    "prefer-align-cpus-by-uncorecache",
    "strict-cpu-reservation",
]

# Of a claim's answer, in JSON.
_SHOWN = ("name", "condition", "allocations", "parts", "reasons")


def simulate(
    *,
    machine: MachineSource,
    pods: Annotated[
        tuple[Path, ...],
        Parameter(
            name=("--pods", "--file", "-f"),
            help="A folder of manifests, planned in the order of file names; or a manifest, or several. Pods of "
            "Deployments and the like are included.",
            allow_leading_hyphen=True,
        ),
    ],
    policy: Annotated[Policy, Parameter(help="The node's policy.")] = Policy.BEST_EFFORT,
    scope: Annotated[Scope, Parameter(help="The node's scope.")] = Scope.CONTAINER,
    mode: Annotated[
        PlanMode,
        Parameter(help="Whether only kubelet's order of containers is tried, or other orders are searched as well."),
    ] = PlanMode.COMPATIBLE,
    search_steps: Annotated[
        int, Parameter(help="How long mode corrected searches.", validator=validators.Number(gte=0))
    ] = AlignmentOptions().search_steps,
    profiles: Annotated[
        tuple[VendorProfile, ...],
        Parameter(
            help="Also offer devices by the names of a vendor's device plugin, nvidia.com/gpu, as a gateway with "
            "that profile."
        ),
    ] = (),
    reserved_cpus: ReservedCpus = "",
    cpu_options: Annotated[
        tuple[_CpuOption, ...], Parameter(name="--cpu-option", help="An option of kubelet's CPU manager, or several.")
    ] = (),
    prefer_closest: Annotated[bool, Parameter(help="kubelet's option prefer-closest-numa-nodes.")] = False,
    align_memory: Annotated[bool, Parameter(help="kubelet's memory manager policy Static.")] = False,
    reserved_memory: Annotated[
        tuple[str, ...],
        Parameter(help="Memory of a NUMA node that is never given out, as NODE=AMOUNT (0=1Gi), or several."),
    ] = (),
    own_shapes: OwnShapes = "",
    cpus: CpusOffered = "",
    decisions: Annotated[
        Path | None, Parameter(help="Write each decision into this folder, for `topobus explain --file`.")
    ] = None,
    save: Annotated[
        Path | None, Parameter(help="Also save the machine and its devices as JSON, to simulate elsewhere.")
    ] = None,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Plan pods, with their claims, on a recorded machine as its services would: placements and
    refusals with reasons, and the machine drawn afterwards.
    """
    reserved = read_reserved_cpus(reserved_cpus)
    if "align-by-socket" in cpu_options and policy is Policy.SINGLE_NUMA_NODE:
        raise UsageError(
            "--cpu-option align-by-socket cannot go with policy single-numa-node", next_step="leave one of them out"
        )
    settings = AlignmentOptions(
        policy=policy,
        scope=scope,
        mode=mode,
        search_steps=search_steps,
        prefer_closest_numa_nodes=prefer_closest,
        cpu=CpuOptions(**{option.replace("-", "_"): True for option in cpu_options}),
        aligns_memory=align_memory,
    )
    kept_memory = _by_node(reserved_memory)
    added = read_own_shapes(own_shapes)
    output = options.output()
    objects = read_wanted("simulate", pods, output.note)
    with open_machine(machine, read_cpus(cpus)) as node:
        for warning in node.warnings:
            output.note(warning)
        if save is not None:
            _write(save, encode(node.snapshot))
        _check_nodes(kept_memory, node.snapshot.machine)
        simulation = Simulation(node, settings, reserved, profiles, reserved_memory=kept_memory, own_shapes=added)
        claims = ClaimSimulation(simulation, objects)
        for api_object in claims.left_out:
            output.note(
                f"{name_of(api_object)} is left out: classic DRA is answered by running drivers alone "
                "(`topobus migrate` turns it into today's)"
            )
        wanted = [api_object for api_object in objects if api_object.kind == "Pod"]
        answers = [*_place_pods(simulation, claims, wanted, decisions, output), *_allocate_rest(claims, output)]
    vendors = set(get_args(VendorProfile)) - set(profiles)
    if named := sorted({name for pod in wanted for name in asked_in_profiles(request_of(pod), vendors)}):
        output.note(
            f"{', '.join(named)}: a vendor's device plugin has such names; `--profiles` plans with "
            "them as a gateway that serves them in its place"
        )
    return _finish(simulation, answers, output)


def _place_pods(
    simulation: Simulation, claims: ClaimSimulation, pods: Sequence[ApiObject], decisions: Path | None, output: Output
) -> Iterator[ClaimAnswer]:
    """Place the pods in their order, and show and write each decision. Yields what their claims get."""
    for number, pod in enumerate(pods, 1):
        result, answer = claims.place(pod)
        if decisions is not None:
            _write(decisions / f"{number:03d}-{metadata_of(pod).name}.json", encode(simulation.decisions[-1]))
        reply = PlaceReply(
            decision_id="", node=simulation.machine.node, result=result, ledger_sequence=simulation.ledger.sequence
        )
        output.show(reply_view(request_of(pod), reply, has_claims_alone=is_by_claims(pod)))
        if answer is not None:
            if isinstance(result, Placement):
                output.show(*(Text(f"  {line}") for line in claim_lines(answer)))
            yield answer


def _allocate_rest(claims: ClaimSimulation, output: Output) -> Iterator[ClaimAnswer]:
    """Allocate the claims that no pod uses, and show each."""
    for answer in claims.rest():
        verdict = f"would be allocated on {answer.node}" if answer.is_allocated else f"would wait: {answer.condition}"
        output.show(Text(f"{answer.name} {verdict}", "ok" if answer.is_allocated else "fail"))
        output.show(*(Text(f"  {line}") for line in claim_lines(answer)), *reason_lines(answer.reasons))
        yield answer


def _by_node(amounts: Sequence[str]) -> dict[int, int]:
    """Read bytes by NUMA node."""
    by_node: dict[int, int] = {}
    for text in amounts:
        node, _, amount = text.partition("=")
        try:
            size_bytes = Quantity.parse(amount).units
        except ValueError:
            size_bytes = -1
        if size_bytes < 0 or not (node.isascii() and node.isdecimal()) or int(node) in by_node:
            raise UsageError(
                f"--reserved-memory is {text!r}, wanted a NUMA node and an amount, each node once",
                next_step="write NODE=AMOUNT, such as 0=1Gi",
            )
        by_node[int(node)] = size_bytes
    return by_node


def _check_nodes(reserved: Mapping[int, int], machine: Machine) -> None:
    """Refuse memory of NUMA nodes that the machine does not have."""
    unknown = sorted(reserved.keys() - set(machine.node_set))
    if unknown:
        raise UsageError(
            f"--reserved-memory names NUMA node {unknown[0]}, and {machine.node} has {machine.node_set}",
            next_step="name one of these",
        )


def _finish(simulation: Simulation, answers: Sequence[ClaimAnswer], output: Output) -> int:
    refused = sum(not isinstance(decision.outcome, Placement) for decision in simulation.decisions)
    placed = len(simulation.decisions) - refused
    waiting = sum(not answer.is_allocated for answer in answers if answer.name.startswith("ResourceClaim"))
    output.document(
        {
            "placed": placed,
            "refused": refused,
            "decisions": simulation.decisions,
            "ledger": simulation.ledger,
            "claims": [{field: getattr(answer, field) for field in _SHOWN} for answer in answers],
        }
    )
    width = min(output.console.width, DRAWING_WIDTH)
    output.show(draw_machine(simulation.machine, simulation.inventories, simulation.ledger, width=width))
    waits = f", {waiting} claims wait" if waiting else ""
    output.show(Text(f"{placed} placed, {refused} refused{waits}", "fail" if refused or waiting else "ok"))
    return ExitCode.NO if refused or waiting else ExitCode.OK


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data + b"\n")
    except OSError as err:
        raise InputError(
            f"cannot write {path}: {err.strerror}", next_step="choose a place that this user may write to"
        ) from err
