"""Every reason code that a Placement or a Refusal can carry: what it says and which facts come with it.

Codes are stable: programs act on them, and a code that was given once keeps its meaning. docs/reference/reasons.md is generated from here, and
tests/contract/test_reason_codes.py holds the source to it: whoever makes a Reason of a code that is not listed, or lists one that nobody gives, is told.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["SECTIONS", "ReasonGroup", "ReasonSection", "codes"]


class ReasonGroup(Struct, frozen=True):
    """Codes that say the same of different things. A `*` in a code stands for one of a few words, which `says` lists."""

    codes: tuple[str, ...]
    says: str
    facts: tuple[str, ...] = ()
    """Keys of `facts`: numbers, names and cpulists, never sentences."""
    facts_note: str = ""
    """What the table says of the facts beyond their keys."""
    codes_note: str = ""
    """What the table says of the codes beyond their names."""


class ReasonSection(Struct, frozen=True, kw_only=True):
    """Codes of one stage, in the order of the page; `before` and `after` are paragraphs around the table, as Markdown."""

    title: str
    groups: tuple[ReasonGroup, ...]
    before: str = ""
    after: str = ""


def codes() -> frozenset[str]:
    """Give all codes, those with a `*` as they are written."""
    return frozenset(code for section in SECTIONS for group in section.groups for code in group.codes)


SECTIONS: tuple[ReasonSection, ...] = (
    ReasonSection(
        title="Placements",
        groups=(
            ReasonGroup(
                ("aligned",), "every resource prefers this set of NUMA nodes", ("policy", "nodes", "decided_by", "tied", "tie_break")
            ),
            ReasonGroup(
                ("aligned-not-preferred",), "the best common set, not preferred by all (best-effort)", ("policy", "nodes", "decided_by")
            ),
            ReasonGroup(("no-affinity",), "no resource has an opinion", ("policy",)),
            ReasonGroup(("no-alignment",), "policy none", ("policy",)),
            ReasonGroup(("cpus-taken",), "the CPUs, and how many whole cores", ("cpus", "whole_cores", "numa_nodes")),
            ReasonGroup(("memory-taken",), "the memory or huge pages, and from which NUMA nodes", ("resource", "numa_nodes", "size_bytes")),
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
                ("count-zero", "count-mismatch", "duplicate-device", "duplicate-container", "no-containers", "shared-needs-names"),
                "the request contradicts itself",
                ("container", "resource", "wanted"),
            ),
            ReasonGroup(("unknown-class", "unknown-device"), "nothing on this node has that name", ("resource", "device")),
            ReasonGroup(
                ("unknown-resource",),
                "nobody on this node offers a resource of that name, such as `nvidia.com/gpu`; the message says who has something like it",
                ("resource",),
            ),
            ReasonGroup(
                ("service-silent",),
                "the device service of a class does not answer, so its devices are Unknown; what is held stays held",
                ("resource", "since"),
            ),
            ReasonGroup(
                ("device-held", "device-unhealthy", "cpu-reserved"),
                "a device asked for by name cannot be had",
                ("device", "owner", "state"),
            ),
            ReasonGroup(
                ("not-enough-devices", "not-enough-cpus"),
                "too few can be had at all",
                ("wanted", "free", "exists", "held", "unhealthy", "reserved"),
            ),
            ReasonGroup(("not-enough-memory",), "no set of NUMA nodes around the alignment has enough memory", ("wanted", "nodes")),
            ReasonGroup(("memory-group",), "the NUMA nodes serve other groups of nodes already", ("nodes",)),
            ReasonGroup(("smt-alignment",), "full-pcpus-only wants whole cores", ("wanted", "threads", "free")),
            ReasonGroup(("no-numa-node",), "no set of NUMA nodes has enough of a resource", ("resources",)),
            ReasonGroup(("no-common-numa-node",), "the resources have no NUMA node in common", ("resources",)),
            ReasonGroup(("policy-not-met",), "the policy does not admit the best common set", ("policy", "nodes")),
            ReasonGroup(("resource-nodes",), "where a resource is, and where it is offered", ("wanted", "nodes", "free")),
            ReasonGroup(("locality-not-met",), "no domain of a hard locality has it all; names the closest", ("locality",)),
            ReasonGroup(
                ("policy-forbidden",),
                "the pod asks for a policy, scope or locality that this node does not let it choose",
                ("what", "wanted", "node"),
            ),
            ReasonGroup(("no-other-way",), "mode corrected searched all ways, and none fits", ("steps",)),
            ReasonGroup(("gave-up",), "mode corrected stopped at its budget: whether there is a way is not known", ("steps", "budget")),
            ReasonGroup(("fits-in-corrected-mode",), "mode corrected would place this pod"),
            ReasonGroup(("relax",), "the smallest set of resources without which the rest would be admitted", ("resources",)),
            ReasonGroup(("too-many-numa-nodes",), "the machine has more NUMA nodes than the operator allows", ("nodes", "limit")),
            ReasonGroup(
                ("answers-differ",),
                "two answers came to one preparation and say different things: another device service runs, or somebody answers in its place",
                ("device_class",),
            ),
            ReasonGroup(("already-placed",), "the owner is placed already", ("owner",)),
            ReasonGroup(("operation-reused",), "the operation id belongs to another verb", ("op_id", "verb")),
            ReasonGroup(("released-since",), "an operation asked again whose devices were let go since", ("decision",)),
            ReasonGroup(("prepared",), "nothing is let go while it is prepared: containers may use it", ("owner",)),
            ReasonGroup(("prepared",), "the devices are prepared for their owner still", ("owner",)),
            ReasonGroup(("no-reservation",), "nothing to commit", ("owner",)),
            ReasonGroup(
                ("free-owner",),
                "an owner that would have to go",
                ("owner", "devices", "cpus", "numa_nodes"),
                codes_note="`free-owner` (in `to_free`)",
            ),
        ),
    ),
    ReasonSection(
        title="Refusals of claims",
        before="By the controller, when it looks for devices for a claim.",
        groups=(
            ReasonGroup(("too-few-devices",), "a node has not enough devices that fit the request", ("node", "found", "wanted")),
            ReasonGroup(("too-many-devices", "claim-too-large", "result-too-large"), "more than a claim or its result may hold", ("node",)),
            ReasonGroup(
                ("device-*",),
                "why devices of a node are out: `device-` and `capacity`, `constraint`, `counters`, `excluded`, `gate`, `in-use`, `node`, `outside`, `selector`, `service-silent` or `tainted`",
                ("node", "count"),
            ),
            ReasonGroup(
                ("evicted",),
                "a device of an allocated claim carries a taint that the claim does not tolerate (any longer): its allocation is taken back, its pods are deleted",
                ("claim", "device", "taint", "rule", "pods"),
            ),
            ReasonGroup(
                ("locality-not-met",),
                "no place of the node has it all by what the claim wishes; names the places tried",
                ("node", "wished", "tried", "domains"),
            ),
            ReasonGroup(("domain-misses", "more-domains"), "what one place lacks; how many more were tried", ("node", "domain", "count")),
            ReasonGroup(("locality-unknown",), "what lies where is not known: the node has published no machine", ("node",)),
            ReasonGroup(
                ("pool-*", "pool-invalid"),
                "a pool of devices cannot be used: it is incomplete, contradicts itself (invalid), or is obsolete",
                ("node", "pool"),
            ),
            ReasonGroup(("constraint-on-all",), "all devices are asked for, and one breaks a constraint"),
            ReasonGroup(("selector-error",), "an expression fails", ("claim", "line", "column")),
            ReasonGroup(
                ("unknown-request", "unknown-selector", "unknown-constraint", "unknown-mode"),
                "a claim says what this version does not know",
                ("claim", "request"),
            ),
            ReasonGroup(
                ("admin-access-forbidden",),
                "admin access is asked for in a namespace without the label for it",
                ("request", "namespace", "label"),
            ),
            ReasonGroup(("gate-off",), "a claim needs a feature that is switched off", ("claim", "request")),
            ReasonGroup(
                ("malformed", "malformed-slice", "malformed-quantity", "node-selector"),
                "something stored cannot be read as what it should be",
            ),
            ReasonGroup(
                ("no-node", "unknown-node", "more-nodes"),
                "no node, no such node, and how many nodes are left out of the list",
                ("node", "known", "count"),
            ),
            ReasonGroup(
                ("waits-for-binding",), "devices of a claim are not attached yet, or are being given back", ("claim", "conditions")
            ),
            ReasonGroup(("waits-for-claims",), "other claims of the same pod are not there yet", ("claims",)),
            ReasonGroup(("waits-for-pod",), "the claim is allocated with a pod, and no stored pod waits for it"),
            ReasonGroup(
                ("nearest-miss",),
                "the node that lacks least, for the request at which its search ended",
                ("node", "request", "wanted", "found", "lacking"),
            ),
            ReasonGroup(
                ("would-fit",),
                "what would fit there instead, found by a search: another owner lets go (`free`), fewer devices (`count`), taints borne (`tolerations`), a `constraint` or `selector` less",
                ("node", "change", "holders", "request", "count", "constraint", "attribute", "selector"),
            ),
            ReasonGroup(("condition",), "(`topobus describe`) the words of the object's condition, where no event tells more", ("reason",)),
        ),
    ),
    ReasonSection(
        title="Pods with claims",
        before="By the controller, when it schedules a pod; [scheduling](../explanation/scheduling.md).",
        after="A deleted claim or pod whose devices are in quarantine has a decision `quarantine` with `prepared` (a container may be using them) or `node-silent`.",
        groups=(
            ReasonGroup(
                ("claim-missing", "claim-not-made"),
                "a claim that the pod names is not stored, or not made from its template yet",
                ("entry", "claim", "template"),
            ),
            ReasonGroup(("claim-of-another",), "a claim of the generated name exists that was made for somebody else", ("claim",)),
            ReasonGroup(
                ("claim-deleting", "claim-in-flight", "claim-taken-back"),
                "the claim is being deleted, allocated, or its allocation is being taken back",
                ("claim",),
            ),
            ReasonGroup(("claim-immediate",), "the claim is to be allocated at once, without its pod, and is not yet", ("claim",)),
            ReasonGroup(
                ("claim-reserved", "claim-full"),
                "the claim is reserved though not allocated, or has its 256 users",
                ("claim", "reserved_for"),
            ),
            ReasonGroup(("claim-elsewhere",), "an allocated claim cannot be used on this node", ("node", "claim")),
            ReasonGroup(("refused-by-node", "node-silent"), "the node refused the pod a moment ago, or does not answer", ("node",)),
            ReasonGroup(
                ("node-failed",),
                "the node's service answered with an error or with what is no answer, or what the node says of itself cannot be worked with; other nodes are tried",
                ("node",),
            ),
            ReasonGroup(
                ("node-name", "node-selector-label", "node-affinity", "node-tainted"),
                "(in a cluster) the pod's own word, or a taint of the node, keeps it off this node",
                ("node",),
            ),
            ReasonGroup(("unschedulable",), "(in a cluster) kube-scheduler could not place the pod on this node a moment ago", ("node",)),
            ReasonGroup(("gated",), "the pod waits behind scheduling gates"),
        ),
    ),
    ReasonSection(
        title="Classic claims",
        before="By the classic drivers of Topobus and the scheduler's part of their negotiation; [classic DRA](classic.md).",
        groups=(
            ReasonGroup(
                ("claims-compete",),
                "each claim of a pod could be had on the node, all of them together cannot",
                ("node", "claims", "wanted"),
            ),
            ReasonGroup(("node-not-suitable",), "the class's `suitableNodes` leave the node out", ("node",)),
            ReasonGroup(("node-not-ready",), "the node has no ledger yet", ("node",)),
            ReasonGroup(("negotiating",), "a pod waits while drivers are asked, or its claims are allocated"),
            ReasonGroup(("waits-for-allocation",), "a claim of mode Immediate is not allocated yet"),
            ReasonGroup(("claim-in-use",), "a claim that is not shareable is reserved for another pod, or is being taken back"),
            ReasonGroup(("claim-of-another", "context-of-another"), "the claim, or the PodSchedulingContext, was made for another pod"),
        ),
    ),
    ReasonSection(
        title="Refusals on the node",
        before="By the gateway and the device services, when a container is about to get its devices.",
        groups=(
            ReasonGroup(
                ("claim-missing", "claim-replaced", "claim-unallocated", "claim-malformed", "claim-elsewhere"),
                "kubelet asks for a claim that is not so",
                ("wanted", "got", "pool", "node"),
            ),
            ReasonGroup(("no-devices", "device-unknown", "device-gone"), "the device service does not know what is asked for", ("device",)),
            ReasonGroup(
                ("device-not-offered",),
                "a passthrough driver holds the device by now, or its virtual functions are on: no container can use it as what it was",
                ("devices",),
            ),
            ReasonGroup(
                ("driver-not-loaded", "driver-failed", "driver-hung", "driver-incomplete"),
                "a vendor's driver is not there, failed, does not answer, or left devices out",
                ("driver", "device"),
            ),
            ReasonGroup(("cpu-offline",), "a CPU that was allocated went offline", ("cpus", "online")),
            ReasonGroup(("edits-conflict",), "two parts of a container's settings contradict each other", ("variable",)),
            ReasonGroup(
                ("edits-forbidden",),
                "a device service wants to give a container what its class [may not bring](dra-on-the-node.md#what-a-device-may-bring-into-a-container)",
                ("class", "device", "edit", "wanted"),
            ),
            ReasonGroup(("cdi-unresolved", "cdi-ambiguous"), "no CDI file, or several, define a device", ("device", "files")),
            ReasonGroup(
                ("plugin-gone", "plugin-unknown-device", "plugin-refused", "plugin-cdi-unresolved"),
                "another vendor's device plugin is gone, does not list the device, refused it, or names a CDI device that no file defines",
            ),
            ReasonGroup(
                ("sharing-malformed", "sharing-differs"),
                "SharingParameters that cannot be read, or that differ among the devices of one claim",
            ),
            ReasonGroup(("sharing-unsupported",), "the devices' driver does not know the strategy", ("driver", "strategy")),
            ReasonGroup(("time-slice-unsupported",), "a time slice other than the default, which nobody here sets", ("interval",)),
            ReasonGroup(("mps-not-running",), "MPS is asked for, and no control daemon runs on the node"),
            ReasonGroup(("prepare-incomplete",), "a device service prepared less than it was asked for", ("devices",)),
        ),
    ),
)
