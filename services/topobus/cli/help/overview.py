"""The commands of `topobus` in groups, as its help shows them, and where each is.

Only the standard library: help is printed before anything else is imported.
"""

from __future__ import annotations

__all__ = ["COMMANDS", "PROGRAM", "import_path"]

PROGRAM = "Place pods on GPUs, NICs, FPGAs and CPUs that sit close to each other."

COMMANDS: dict[str, dict[str, str]] = {
    "Try it": {
        "demo": "The whole story in under a minute: start, place, refuse, kubelet, claim, fault.",
        "up": "Start NATS and the eight services and keep them running; Ctrl-C stops everything.",
        "simulate": "Plan pods on a recorded machine, without any server.",
        "size": "Show what a fleet of so many nodes needs, from measured figures.",
        "slices": "Print the ResourceSlices that a node of a recorded machine will publish.",
        "profile": "Recorded machines: list, build, break and play them.",
        "record": "Copy this machine's hardware tree, to read, test and break it elsewhere.",
    },
    "Any cluster": {
        "why": "Explain why a pod of any cluster has no node, and the smallest change that helps.",
        "free": "List the free devices of any cluster, and how many more of a pod fit.",
        "defrag": "Show the fewest pods that would have to move so that one more pod fits.",
        "what-if": "Show which pods would have a node, or lose theirs, with other nodes, classes or slices.",
        "snapshot": "Save what these commands read of a cluster to a file.",
    },
    "Look": {
        "machine": "Draw a machine: sockets, NUMA nodes, CPUs, devices, and who holds what.",
        "topo": "Show how devices reach each other, as nvidia-smi topo -m does, for every class.",
        "top": "Show all nodes live, sick ones first, and draw one: holders, health and the newest events.",
        "console": "Show the fleet live in a browser: devices, faults, what waits and why; it changes nothing.",
        "inventory": "List devices: location, health and holders.",
        "pods": "List pods: container, resource, devices, NUMA node and health, as kubelet reports them.",
        "holders": "List what each pod and claim holds, over all nodes, by any interface of kubelet.",
        "health": "How devices are, and how they are from now on.",
        "hints": "The hints that device services and topology give from now on.",
        "decisions": "What was decided lately.",
        "explain": "Take one decision apart and replay it offline.",
    },
    "Allocate": {
        "place": "Place a pod and show where and why, or why not and what would have to be released.",
        "release": "Release what `topobus place` or a claim without an object holds; stored claims: "
        "`topobus delete claim`.",
        "apply": "Create or replace objects of the stand-alone API: classes, claims, pods, in Kubernetes' YAML.",
        "diff": "Show what apply would change, as a unified diff; it writes nothing.",
        "get": "List objects, or show those named: topobus get claims, pods, deviceclasses.",
        "describe": "All about one object: devices, users, decisions, and why a claim waits.",
        "delete": "Delete objects; those that hold devices release them first.",
        "allocate": "Say where claims would be allocated, or why not, without writing anything.",
        "oci": "Print a container's OCI spec with its devices, as kubelet and a runtime would make it.",
        "migrate": "Turn classic DRA manifests into structured ones.",
    },
    "Operate": {
        "doctor": "Check a deployment, with a next step for each finding.",
        "logs": "What the programs of a `topobus up` log, in the order of time.",
        "version": "Versions of this program, of the NATS server and of each running service.",
        "device": "Work on single devices: maintain, exclude, return, forgive, reset, rebind, burn-in, report, list.",
        "repair": "Repairs by policy: list, explain, pause, resume.",
        "forget": "Remove what is stored about nodes that are gone.",
        "move-ledger": "Copy a node's ledger to another NATS server, while the node's services are stopped.",
    },
    "Set up": {
        "context": "Name the systems that commands talk to, and choose one.",
        "keys": "Make, change and show the passwords of NATS' users.",
        "completion": "Print the script by which a shell completes commands, options and names.",
        "verify": "Check the files of a release offline: signature, sums, SBOMs, provenance.",
        "help": "Help for a command: the same as COMMAND --help.",
    },
}
"""Group to its commands, each with the text of the overview."""

_ELSEWHERE = {
    "demo": "demo:demo",
    "profile": "commands.profile:profile_app",
    "record": "commands.record:record_machine",
    "snapshot": "commands.why:snapshot",
    "health": "commands.health:health_app",
    "hints": "commands.hints:hints_app",
    "release": "commands.place:release_app",
    "apply": "commands.objects:apply",
    "delete": "commands.objects:delete",
    "oci": "commands.oci:oci_app",
    "device": "commands.device:device_app",
    "repair": "commands.repair:repair_app",
    "forget": "commands.forget:forget_app",
    "context": "commands.context:context_app",
    "keys": "commands.keys:keys_app",
    "help": "commands.help:show_help",
}
"""Commands that are not functions of their name in a module of their name."""


def import_path(name: str) -> str:
    """Return where a command is.

    >>> import_path("move-ledger"), import_path("snapshot")
    ('topobus.cli.commands.move_ledger:move_ledger', 'topobus.cli.commands.why:snapshot')
    """
    word = name.replace("-", "_")
    return f"topobus.cli.{_ELSEWHERE.get(name, f'commands.{word}:{word}')}"
