"""Every reason code that a Placement or a Refusal can carry: what it says and which facts come with it.

Codes are stable: programs act on them, and a code that was given once keeps its meaning. docs/reference/reasons.md is generated from here, and
tests/contract/test_reason_codes.py holds the source to it: whoever makes a Reason of a code that is not listed, or lists one that nobody gives, is told.
"""

from __future__ import annotations

from topobus.contracts.function_reasons import FUNCTION_SECTION
from topobus.contracts.node_reasons import NODE_SECTION
from topobus.contracts.placement_reasons import PLACEMENT_SECTIONS
from topobus.contracts.reason_values import ReasonGroup, ReasonSection

__all__ = ["SECTIONS", "ReasonGroup", "ReasonSection", "codes"]


def codes() -> frozenset[str]:
    """Give all codes, those with a `*` as they are written."""
    return frozenset(code for section in SECTIONS for group in section.groups for code in group.codes)


SECTIONS: tuple[ReasonSection, ...] = (
    *PLACEMENT_SECTIONS,
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
    NODE_SECTION,
    FUNCTION_SECTION,
    ReasonSection(
        title="Work on single devices",
        before="By topology and the device services, to an operator (`topobus device`); [operate a device](../how-to/operate-a-device.md).",
        groups=(
            ReasonGroup(
                ("device-held",),
                "the device, or a part of it that a reset would take along, is held or prepared; names the holders",
                ("device", "owners"),
            ),
            ReasonGroup(("not-ours",), "the class is served by somebody else's device plugin", ("resource",)),
            ReasonGroup(("reset-unsupported",), "neither the device's driver nor the kernel can reset it", ("device", "driver")),
            ReasonGroup(("reset-failed",), "the kernel refused to reset the PCI function", ("device", "error")),
        ),
    ),
    ReasonSection(
        title="Network interfaces",
        before="By the nic service, when it checks, hands over or takes back an interface; [configuration](nic-configuration.md).",
        groups=(
            ReasonGroup(
                ("interface-config-invalid",),
                "a field of the configuration is wrong, or this device cannot have it; one reason a field",
                ("field", "got", "wanted"),
            ),
            ReasonGroup(("package-missing",), "interfaces are handed over by a package that is not installed", ("package", "extra")),
            ReasonGroup(
                ("namespace-gone", "namespace-of-host"),
                "the path of the sandbox leads to no network namespace, or to the host's own",
                ("path", "error"),
            ),
            ReasonGroup(("interface-gone",), "the host has no interface of that name", ("interface",)),
            ReasonGroup(
                ("interface-of-node", "interface-changed"),
                "since it was offered, the node's default route came to the interface, or its name became another's; nothing was changed",
                ("device", "interface"),
            ),
            ReasonGroup(("name-taken",), "the pod has an interface of that name already; nothing was changed", ("field", "name")),
            ReasonGroup(("not-permitted",), "the service may not change interfaces: a capability is missing", ("step", "error")),
            ReasonGroup(("hand-over-failed",), "the kernel refuses a step; what was done is undone", ("step", "error")),
            ReasonGroup(
                ("address-in-use", "address-not-ready"),
                "duplicate detection, asked for by `wait`, found another machine with the address, or did not end in time",
                ("address",),
            ),
            ReasonGroup(("share-failed",), "the kernel makes no child of this interface", ("interface", "mode", "error")),
            ReasonGroup(("vf-gone",), "the physical function has no such virtual function", ("physical", "index")),
            ReasonGroup(("vf-refused",), "the driver of the physical function does not take a setting", ("field", "physical", "error")),
            ReasonGroup(
                ("vf-count-held", "vf-count-in-use", "vf-count-impossible", "vf-count-failed"),
                "the number of virtual functions that the settings ask for cannot be had, or not now",
                ("address", "wanted", "present", "total", "users", "error"),
            ),
            ReasonGroup(
                ("interface-renamed",), "it came back under another name, since its own is taken on the host", ("interface", "name")
            ),
            ReasonGroup(("interface-lost",), "a virtual interface went away with the pod's namespace", ("interface", "kind")),
        ),
    ),
    ReasonSection(
        title="CNI plugins",
        before="By the nic service, when a pod is attached by a chain of CNI plugins; [what to do about each](cni-errors.md).",
        groups=(
            ReasonGroup(
                ("cni-config-invalid",),
                "a configuration list, a claim's part of it, or a name cannot be used",
                ("where", "field", "wanted"),
            ),
            ReasonGroup(("cni-chain-forbidden",), "a claim brings a list of its own, and the operator does not allow that", ("where",)),
            ReasonGroup(("cni-network-unknown",), "the operator has named no such network", ("network", "known")),
            ReasonGroup(("cni-plugin-forbidden",), "the operator does not allow this type of plugin", ("plugin", "allowed")),
            ReasonGroup(("cni-plugin-missing",), "no folder of plugins has this binary", ("plugin", "field", "looked_in")),
            ReasonGroup(("cni-plugin-unusable",), "the binary cannot be started, or everybody may write to it", ("plugin", "path")),
            ReasonGroup(("cni-version-unsupported",), "list and plugin have no version in common", ("wanted", "plugin", "supported")),
            ReasonGroup(("cni-version-answered",), "a plugin answered in another version than asked", ("plugin", "wanted", "answered")),
            ReasonGroup(
                ("cni-plugin-timeout", "cni-plugin-killed"),
                "a plugin did not end in time, or died of a signal; with its children, it is dead",
                ("plugin", "command", "limit_s", "signal"),
            ),
            ReasonGroup(
                ("cni-plugin-nonsense", "cni-output-too-large"),
                "a plugin's answer is not what the specification says, or has no end",
                ("plugin", "command", "limit_bytes"),
            ),
            ReasonGroup(("cni-plugin-failed",), "a plugin's own error, with its number", ("plugin", "command", "error_code")),
            ReasonGroup(("cni-try-again",), "a plugin's own error 11: it is to be asked later", ("plugin", "command", "error_code")),
            ReasonGroup(("cni-ports-unknown",), "the chain opens host ports, and the pod's could not be read", ("pod",)),
            ReasonGroup(("cni-interface-missing",), "the chain reports no interface inside the sandbox", ("network", "interface", "got")),
            ReasonGroup(("cni-check-unsupported",), "CHECK came with 0.4.0, and a list may switch it off", ("network", "version")),
            ReasonGroup(("cni-state-unreadable",), "the record of an attachment cannot be read or written", ("path",)),
        ),
    ),
)
