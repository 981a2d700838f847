"""Reason codes of a node's placements and of what it cannot place.

The first sections of the catalogue (`reasons`), in the order of the page.
"""

from __future__ import annotations

from topobus.formats.reasons.reason_values import ReasonGroup, ReasonSection

__all__ = ["PLACEMENT_SECTIONS"]

PLACEMENT_SECTIONS: tuple[ReasonSection, ...] = (
    ReasonSection(
        title="Placements",
        groups=(
            ReasonGroup(
                ("aligned",),
                "every resource prefers this set of NUMA nodes",
                ("policy", "nodes", "decided_by", "tied", "tie_break"),
            ),
            ReasonGroup(
                ("aligned-not-preferred",),
                "the best common set, not preferred by all (best-effort)",
                ("policy", "nodes", "decided_by"),
            ),
            ReasonGroup(("no-affinity",), "no resource has an opinion", ("policy",)),
            ReasonGroup(("no-alignment",), "policy none", ("policy",)),
            ReasonGroup(("cpus-taken",), "the CPUs, and how many whole cores", ("cpus", "whole_cores", "numa_nodes")),
            ReasonGroup(
                ("memory-taken",),
                "the memory or huge pages, and from which NUMA nodes",
                ("resource", "numa_nodes", "size_bytes"),
            ),
            ReasonGroup(
                ("devices-chosen",),
                "the devices of a class and what decided",
                ("devices", "bottleneck", "bandwidth_gbps", "tied", "is_exact"),
            ),
            ReasonGroup(("outside-alignment",), "devices that had to come from elsewhere", ("devices", "alignment")),
            ReasonGroup(("same-switch",), "pairs of devices of two classes under one PCIe switch", ("pairs", "count")),
            ReasonGroup(
                ("locality-met", "locality-missed"),
                "the domain that a locality kept the pod in, and the soft ones that could not be had",
                ("domain", "met", "missed"),
            ),
            ReasonGroup(("searched",), "mode corrected found another way than kubelet's order", ("steps",)),
            ReasonGroup(("no-opinion",), "a service with hints of its own kept silent", ("resource",)),
        ),
    ),
    ReasonSection(
        title="Refusals",
        groups=(
            ReasonGroup(
                (
                    "count-zero",
                    "count-mismatch",
                    "duplicate-device",
                    "duplicate-container",
                    "no-containers",
                    "shared-needs-names",
                ),
                "the request contradicts itself",
                ("container", "resource", "wanted"),
            ),
            ReasonGroup(
                ("unknown-class", "unknown-device"), "nothing on this node has that name", ("resource", "device")
            ),
            ReasonGroup(
                ("unknown-resource",),
                "no service on this node offers a resource of that name, such as `nvidia.com/gpu`; the message "
                "names a service with a similar one",
                ("resource",),
            ),
            ReasonGroup(
                ("service-silent",),
                "the device service of a class does not answer, so its devices are Unknown; what is held stays held",
                ("resource", "since"),
            ),
            ReasonGroup(
                ("device-held", "device-unhealthy", "device-kept-back", "cpu-reserved"),
                "a device asked for by name cannot be had",
                ("device", "owner", "state"),
            ),
            ReasonGroup(
                ("counter-short",),
                "what is held leaves too little of a counter: a part beside its whole, or parts that do not "
                "fit together",
                ("resource", "counter", "total", "in_use", "wanted", "devices"),
            ),
            ReasonGroup(
                ("capacity-short",),
                "others have so much of a shared device that what is wanted is not left",
                ("resource", "device", "capacity", "wanted", "left", "total", "owners"),
            ),
            ReasonGroup(
                ("not-shared",), "a share is wanted of a device that is given whole only", ("resource", "device")
            ),
            ReasonGroup(
                ("claims-only",),
                "devices of the class are shared or exclude each other: they can be had by a claim, not by count",
                ("resource", "exists"),
            ),
            ReasonGroup(
                ("not-enough-devices", "not-enough-cpus"),
                "too few can be had at all",
                ("wanted", "free", "exists", "held", "unhealthy", "reserved"),
            ),
            ReasonGroup(
                ("not-enough-memory",),
                "no set of NUMA nodes around the alignment has enough memory",
                ("wanted", "nodes"),
            ),
            ReasonGroup(("memory-group",), "the NUMA nodes serve other groups of nodes already", ("nodes",)),
            ReasonGroup(("smt-alignment",), "full-pcpus-only wants whole cores", ("wanted", "threads", "free")),
            ReasonGroup(("no-numa-node",), "no set of NUMA nodes has enough of a resource", ("resources",)),
            ReasonGroup(("no-common-numa-node",), "the resources have no NUMA node in common", ("resources",)),
            ReasonGroup(("policy-not-met",), "the policy does not admit the best common set", ("policy", "nodes")),
            ReasonGroup(
                ("resource-nodes",), "where a resource is, and where it is offered", ("wanted", "nodes", "free")
            ),
            ReasonGroup(
                ("numa-node-unknown",),
                "enough is free, but not enough of it has a known NUMA node: only the policies none and "
                "best-effort place it",
                ("resource", "wanted", "policy", "devices"),
            ),
            ReasonGroup(
                ("locality-not-met",), "no domain of a hard locality has it all; names the closest", ("locality",)
            ),
            ReasonGroup(
                ("policy-forbidden",),
                "the pod asks for a policy, scope or locality that this node does not let it choose",
                ("what", "wanted", "node"),
            ),
            ReasonGroup(("no-other-way",), "mode corrected searched all ways, and none fits", ("steps",)),
            ReasonGroup(
                ("gave-up",),
                "mode corrected stopped at its budget: whether there is a way is not known",
                ("steps", "budget"),
            ),
            ReasonGroup(("fits-in-corrected-mode",), "mode corrected would place this pod"),
            ReasonGroup(
                ("relax",), "the smallest set of resources without which the rest would be admitted", ("resources",)
            ),
            ReasonGroup(
                ("too-many-numa-nodes",), "the machine has more NUMA nodes than the operator allows", ("nodes", "limit")
            ),
            ReasonGroup(("already-placed",), "the owner is placed already", ("owner",)),
            ReasonGroup(("operation-reused",), "the operation id belongs to another verb", ("op_id", "verb")),
            ReasonGroup(("released-since",), "a repeated operation whose devices were released since", ("decision",)),
            ReasonGroup(("prepared",), "nothing is released while it is prepared: containers may use it", ("owner",)),
            ReasonGroup(("prepared",), "the devices are prepared for their owner still", ("owner",)),
            ReasonGroup(("no-reservation",), "nothing to commit", ("owner",)),
            ReasonGroup(
                ("free-owner",),
                "an owner that would have to go",
                ("owner", "devices", "cpus", "numa_nodes"),
                codes_note="`free-owner` (in `to_free`)",
            ),
            ReasonGroup(
                ("wait", "return", "repair"),
                "a withheld device with which it would fit, where no other owner's release would help: "
                "it recovers by itself, an operator withholds it, or it is sick",
                ("device", "device_class", "until"),
                codes_note="`wait`, `return`, `repair` (in `to_free`)",
            ),
        ),
    ),
)
