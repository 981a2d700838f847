"""`topobus allocate --dry-run`: where claims would be allocated, or why not, without any write.

The controller's engine answers in a process of its own, which needs neither NATS nor a running
controller, because only the controller has a CEL evaluator.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter
from rich.text import Text

from topobus.bus.bus import Bus
from topobus.cli.cluster_questions import CLUSTER_DEFAULTS, ClusterOptions
from topobus.cli.engine_process import ask_dry_run
from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.objects.manifests import manifest_files, read_mixed, read_wanted
from topobus.cli.options import BUS_DEFAULTS, BusOptions, open_bus
from topobus.cli.render.answers import reason_lines, with_parts
from topobus.cli.render.output import Output, TextOrJson
from topobus.formats.kubernetes.objects import object_parts
from topobus.formats.messages.catalogue import ALIGNMENT, INVENTORY, LEDGER, MACHINE, OBJECT
from topobus.formats.messages.messages import ApiObject
from topobus.values.outcome import Reason

__all__ = ["allocate", "answers_of_system", "show_answer"]

_ASKED = ("ResourceClaim", "Pod")
_SHOWN = ("name", "condition", "node", "allocations", "parts", "reasons")


async def allocate(
    *,
    file: Annotated[
        tuple[Path, ...],
        Parameter(
            name=("--file", "-f", "--pods"),
            help="A manifest or a folder of them, or several; - reads standard input. Pods of Deployments and the "
            "like are included.",
            allow_leading_hyphen=True,
        ),
    ] = (),
    dry_run: Annotated[
        bool, Parameter(help="Implied: this command writes nothing, `topobus apply` allocates.")
    ] = False,
    slices: Annotated[
        tuple[Path, ...],
        Parameter(
            help="ResourceSlices, DeviceClasses, allocated claims and Nodes, as `kubectl get -o yaml` writes them."
        ),
    ] = (),
    cluster: Annotated[bool, Parameter(help="Take them from the cluster of a kubeconfig.")] = False,
    mode: Annotated[
        Literal["corrected", "compatible"],
        Parameter(help="Where kube-scheduler has a defect, give the right answer, or the one of kube-scheduler."),
    ] = "corrected",
    output_form: TextOrJson = "text",
    kubernetes: ClusterOptions = CLUSTER_DEFAULTS,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Show where claims and pods of a manifest would be allocated, or why not and what would fit.

    Without --slices and --cluster, in the running system.
    """
    del dry_run  # this is a dry run in any case
    if not file:
        raise UsageError(
            "nothing to allocate is named: wanted -f FILE or -f FOLDER",
            next_step="topobus allocate --help; examples/claims has manifests to start from",
        )
    if slices and cluster:
        raise UsageError(
            "got --slices and --cluster, wanted one of them",
            next_step="--slices reads a file, --cluster asks an API server",
        )
    output = Output(is_json=options.json or output_form == "json")
    objects = read_wanted("allocate", file, output.note)
    situation: dict[str, Any] = {
        "wanted": objects,
        "objects": [api_object for api_object in objects if api_object.kind not in _ASKED],
        "mode": mode,
    }
    arguments: list[str] = []
    if slices:
        situation["objects"] += read_mixed(manifest_files(slices), output.note, has_nodes=True)
    elif cluster:
        arguments = ["--cluster", *kubernetes.server()]
    else:
        async with open_bus(options) as bus:
            situation |= await _as_it_runs(bus, objects, situation["objects"])
    answered = await ask_dry_run(situation, arguments)
    answers = _shown(answered)
    if not answers:
        output.note("no pod in it has a claim: `topobus place --dry-run` shows where pods without claims would go")
    for fault in answered.get("faults", ()):
        output.note(f"left out, because it cannot be read: {fault}")
    output.document({"answers": answers})
    for answer in answers:
        show_answer(output, answer)
    return ExitCode.OK if all(answer["condition"] == "Allocated" for answer in answers) else ExitCode.NO


async def answers_of_system(bus: Bus, objects: Sequence[ApiObject]) -> list[dict[str, Any]]:
    """Return where claims, and pods with claims, would be allocated in a running system if they
    were stored.

    Errors: as `ask_dry_run`.
    """
    others = [api_object for api_object in objects if api_object.kind not in _ASKED]
    return _shown(
        await ask_dry_run({"wanted": objects, "mode": "corrected", **await _as_it_runs(bus, objects, others)})
    )


async def _as_it_runs(bus: Bus, objects: Sequence[ApiObject], others: Sequence[ApiObject]) -> dict[str, Any]:
    """Collect the input of a dry run from a running system.

    The wanted objects count as they are in the manifest.
    """
    given = [object_parts(api_object) for api_object in objects]
    return {
        "objects": [*others, *(entry.value for entry in await bus.list(OBJECT) if entry.parts not in given)],
        "machines": [entry.value for entry in await bus.list(MACHINE)],
        "inventories": [entry.value for entry in await bus.list(INVENTORY)],
        "ledgers": [entry.value for entry in await bus.list(LEDGER)],
        "alignments": [entry.value for entry in await bus.list(ALIGNMENT)],
    }


def _shown(dry_run: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in answer.items() if key in _SHOWN} for answer in dry_run["answers"]]


def show_answer(output: Output, claim_result: dict[str, Any]) -> None:
    """Show where a claim or a pod would be allocated, or why not."""
    name = Text(claim_result["name"], "name")
    if claim_result["condition"] == "Allocated":
        output.show(Text.assemble(name, (f" would be allocated on node {claim_result['node']}", "ok")))
        for claim, allocation in claim_result.get("allocations", {}).items():
            for result in allocation["devices"]["results"]:
                of = f"{claim} " if len(claim_result["allocations"]) > 1 else ""
                takes = "".join(
                    f", takes {name} {amount}"
                    for name, amount in sorted((result.get("consumedCapacity") or {}).items())
                )
                device = with_parts(result["device"], claim_result.get("parts", {}))
                place = f"({result['driver']}, pool {result['pool']}{takes})"
                output.show(Text(f"  {of}{result['request']}: {device}  {place}"))
        return
    output.show(Text.assemble(name, (f" would wait: {claim_result['condition']}", "fail")))
    output.show(*reason_lines(msgspec.convert(claim_result.get("reasons", []), list[Reason])))
