"""The commands of `topobus` in groups, as its help shows them: name, the module below topobus.cli,
and the text of the overview.

Only the standard library: help is printed before anything else is imported.
"""

from __future__ import annotations

__all__ = ["COMMANDS", "GROUPS", "PROGRAM"]

PROGRAM = "Place pods on GPUs, NICs, FPGAs and CPUs that sit close to each other."

COMMANDS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "Try it": (
        ("demo", "demo:demo", "The whole story in under a minute: start, place, refuse, kubelet, claim, fault."),
        ("up", "commands.up:up", "Start NATS and the eight services and keep them running; Ctrl-C stops everything."),
        ("simulate", "commands.simulate:simulate", "Plan pods on a recorded machine, without any server."),
        ("size", "commands.size:size", "Show what a fleet of so many nodes needs, from measured figures."),
        (
            "slices",
            "commands.slices:slices",
            "Print the ResourceSlices that a node of a recorded machine will publish.",
        ),
        ("profile", "commands.profile:profile_app", "Recorded machines: list, build, break and play them."),
        (
            "record",
            "commands.record:record_machine",
            "Copy this machine's hardware tree, to read, test and break it elsewhere.",
        ),
    ),
    "Any cluster": (
        (
            "why",
            "commands.why:why",
            "Explain why a pod of any cluster has no node, and the smallest change that helps.",
        ),
        ("free", "commands.free:free", "List the free devices of any cluster, and how many more of a pod fit."),
        (
            "defrag",
            "commands.defrag:defrag",
            "Show the fewest pods that would have to move so that one more pod fits.",
        ),
        (
            "what-if",
            "commands.what_if:what_if",
            "Show which pods would have a node, or lose theirs, with other nodes, classes or slices.",
        ),
        ("snapshot", "commands.why:snapshot", "Save what these commands read of a cluster to a file."),
    ),
    "Look": (
        (
            "machine",
            "commands.machine:machine",
            "Draw a machine: sockets, NUMA nodes, CPUs, devices, and who holds what.",
        ),
        (
            "topo",
            "commands.topo:topo",
            "Show how devices reach each other, as nvidia-smi topo -m does, for every class.",
        ),
        (
            "top",
            "commands.top:top",
            "Show all nodes live, sick ones first, and draw one: holders, health and the newest events.",
        ),
        (
            "console",
            "commands.console:console",
            "Show the fleet live in a browser: devices, faults, what waits and why; it changes nothing.",
        ),
        ("inventory", "commands.inventory:inventory", "List devices: location, health and holders."),
        (
            "pods",
            "commands.pods:pods",
            "List pods: container, resource, devices, NUMA node and health, as kubelet reports them.",
        ),
        (
            "holders",
            "commands.holders:holders",
            "List what each pod and claim holds, over all nodes, by any interface of kubelet.",
        ),
        ("health", "commands.health:health_app", "How devices are, and how they are from now on."),
        ("hints", "commands.hints:hints_app", "The hints that device services and topology give from now on."),
        ("decisions", "commands.decisions:decisions", "What was decided lately."),
        ("explain", "commands.explain:explain", "Take one decision apart and replay it offline."),
    ),
    "Allocate": (
        (
            "place",
            "commands.place:place",
            "Place a pod and show where and why, or why not and what would have to be released.",
        ),
        (
            "release",
            "commands.place:release_app",
            "Release what `topobus place` or a claim without an object holds; stored claims: `topobus delete claim`.",
        ),
        (
            "apply",
            "commands.objects:apply",
            "Create or replace objects of the stand-alone API: classes, claims, pods, in Kubernetes' YAML.",
        ),
        ("diff", "commands.diff:diff", "Show what apply would change, as a unified diff; it writes nothing."),
        ("get", "commands.get:get", "List objects, or show those named: topobus get claims, pods, deviceclasses."),
        (
            "describe",
            "commands.describe:describe",
            "All about one object: devices, users, decisions, and why a claim waits.",
        ),
        ("delete", "commands.objects:delete", "Delete objects; those that hold devices release them first."),
        (
            "allocate",
            "commands.allocate:allocate",
            "Say where claims would be allocated, or why not, without writing anything.",
        ),
        (
            "oci",
            "commands.oci:oci_app",
            "Print a container's OCI spec with its devices, as kubelet and a runtime would make it.",
        ),
        ("migrate", "commands.migrate:migrate", "Turn classic DRA manifests into structured ones."),
    ),
    "Operate": (
        ("doctor", "commands.doctor:doctor", "Check a deployment, with a next step for each finding."),
        ("logs", "commands.logs:logs", "What the programs of a `topobus up` log, in the order of time."),
        (
            "version",
            "commands.version:version",
            "Versions of this program, of the NATS server and of each running service.",
        ),
        (
            "device",
            "commands.device:device_app",
            "Work on single devices: maintain, exclude, return, forgive, reset, rebind, burn-in, report, list.",
        ),
        ("repair", "commands.repair:repair_app", "Repairs by policy: list, explain, pause, resume."),
        ("forget", "commands.forget:forget_app", "Remove what is stored about nodes that are gone."),
        (
            "move-ledger",
            "commands.move_ledger:move_ledger",
            "Copy a node's ledger to another NATS server, while the node's services are stopped.",
        ),
    ),
    "Set up": (
        ("context", "commands.context:context_app", "Name the systems that commands talk to, and choose one."),
        ("keys", "commands.keys:keys_app", "Make, change and show the passwords of NATS' users."),
        (
            "completion",
            "commands.completion:completion",
            "Print the script by which a shell completes commands, options and names.",
        ),
        (
            "verify",
            "commands.verify:verify",
            "Check the files of a release offline: signature, sums, SBOMs, provenance.",
        ),
        ("help", "commands.help:show_help", "Help for a command: the same as COMMAND --help."),
    ),
}

GROUPS = tuple(COMMANDS)
