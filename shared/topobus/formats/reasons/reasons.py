"""Every reason code that a Placement or a Refusal can carry: its meaning and the facts that come
with it.

Codes are stable: programs act on them, and a code that was given once keeps its meaning.
docs/reference/reasons.md is generated from here. tests/contract/test_reason_codes.py fails for a
Reason whose code is not listed, and for a listed code that is never given.
"""

from __future__ import annotations

from topobus.formats.reasons.device_work_reasons import DEVICE_WORK_SECTION
from topobus.formats.reasons.function_reasons import FUNCTION_SECTION
from topobus.formats.reasons.network_reasons import NETWORK_SECTIONS
from topobus.formats.reasons.placement_reasons import PLACEMENT_SECTIONS
from topobus.formats.reasons.reason_values import ReasonGroup, ReasonSection

__all__ = ["SECTIONS", "ReasonGroup", "ReasonSection", "codes"]


def codes() -> frozenset[str]:
    """Return all codes, those with a `*` as they are written."""
    return frozenset(code for section in SECTIONS for group in section.groups for code in group.codes)


SECTIONS: tuple[ReasonSection, ...] = (
    *PLACEMENT_SECTIONS,
    ReasonSection(
        title="Refusals of claims",
        before="By the controller, when it looks for devices for a claim.",
        groups=(
            ReasonGroup(
                ("too-few-devices",),
                "a node has not enough devices that fit the request: `found` is the most that it can have at "
                "once, beside what the requests before it have; with `found_at_least` it was not measured to "
                "the end",
                ("node", "request", "found", "wanted"),
            ),
            ReasonGroup(("claim-too-large", "result-too-large"), "more than a claim or its result may hold", ("node",)),
            ReasonGroup(
                ("device-*",),
                "why devices of a node are out: `device-` and `capacity`, `constraint`, `counters`, "
                "`excluded`, `gate`, `in-use`, `limit`, `node`, `outside`, `selector`, `service-silent` or "
                "`tainted`",
                ("node", "count"),
            ),
            ReasonGroup(
                ("evicted",),
                "a device of an allocated claim carries a taint that the claim does not tolerate (any "
                "longer): its allocation is taken back, its pods are deleted",
                ("claim", "device", "taint", "rule", "pods"),
            ),
            ReasonGroup(
                ("locality-not-met",),
                "no place of the node has it all by what the claim wishes; names the places tried",
                ("node", "wished", "tried", "domains"),
            ),
            ReasonGroup(
                ("domain-misses", "more-domains"),
                "what one place lacks; how many more were tried",
                ("node", "domain", "count"),
            ),
            ReasonGroup(
                ("locality-unknown",), "what lies where is not known: the node has published no machine", ("node",)
            ),
            ReasonGroup(
                ("pool-*", "pool-invalid"),
                "a pool of devices cannot be used: it is incomplete, contradicts itself (invalid), or is obsolete",
                ("node", "pool"),
            ),
            ReasonGroup(("constraint-on-all",), "all devices are asked for, and one breaks a constraint"),
            ReasonGroup(("selector-error",), "an expression fails", ("claim", "line", "column")),
            ReasonGroup(
                ("unknown-request", "unknown-selector", "unknown-constraint", "unknown-mode"),
                "a claim has a value that this version does not know",
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
                ("waits-for-binding",),
                "devices of a claim are not attached yet, or are being given back",
                ("claim", "conditions"),
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
                "what would fit there instead, found by a search: another owner releases devices (`free`), "
                "fewer devices (`count`), more `tolerations`, or one `constraint` or `selector` less",
                ("node", "change", "holders", "request", "count", "constraint", "attribute", "selector"),
            ),
            ReasonGroup(
                ("condition",),
                "(`topobus describe`) the message of the object's condition, where no event has more",
                ("reason",),
            ),
        ),
    ),
    ReasonSection(
        title="Pods with claims",
        before="By the controller, when it schedules a pod; [scheduling](../explanation/scheduling.md).",
        after="A deleted claim or pod whose devices are in quarantine has a decision `quarantine` with `prepared` "
        "(a container may be using them) or `node-silent`.",
        groups=(
            ReasonGroup(
                ("claim-missing", "claim-not-made"),
                "a claim that the pod names is not stored, or not made from its template yet",
                ("entry", "claim", "template"),
            ),
            ReasonGroup(
                ("claim-of-another",),
                "a claim of the generated name exists that was made for somebody else",
                ("claim",),
            ),
            ReasonGroup(
                ("claim-deleting", "claim-in-flight", "claim-taken-back"),
                "the claim is being deleted, allocated, or its allocation is being taken back",
                ("claim",),
            ),
            ReasonGroup(
                ("claim-immediate",),
                "the claim is to be allocated at once, without its pod, and is not yet",
                ("claim",),
            ),
            ReasonGroup(
                ("claim-reserved", "claim-full"),
                "the claim is reserved though not allocated, or has its 256 users",
                ("claim", "reserved_for"),
            ),
            ReasonGroup(("claim-elsewhere",), "an allocated claim cannot be used on this node", ("node", "claim")),
            ReasonGroup(
                ("shape-unknown",),
                "the machine no longer has the shape that a claim was about to get: its devices have changed",
                ("node", "devices"),
            ),
            ReasonGroup(
                ("refused-by-node", "node-silent"),
                "the node refused the pod a moment ago, or does not answer",
                ("node",),
            ),
            ReasonGroup(
                ("node-failed",),
                "the node's service answered with an error or with what is no answer, or the node's own "
                "description cannot be used; other nodes are tried",
                ("node",),
            ),
            ReasonGroup(
                ("node-name", "node-selector-label", "node-affinity", "node-tainted"),
                "(in a cluster) the pod's own fields, or a taint of the node, exclude this node",
                ("node",),
            ),
            ReasonGroup(
                ("no-room",),
                "(in a cluster) the node has too little left of what the pod requests, also without the pods "
                "of lower priority",
                ("node", "resources", "wanted", "free", "allocatable", "permanent"),
            ),
            ReasonGroup(
                ("unschedulable",),
                "(in a cluster) kube-scheduler could not place the pod on this node a moment ago",
                ("node",),
            ),
            ReasonGroup(("gated",), "the pod waits behind scheduling gates"),
        ),
    ),
    ReasonSection(
        title="Pods of any cluster",
        before="By `topobus why` and its kin, beside those of refused claims above; [what is checked](why.md).",
        groups=(
            ReasonGroup(
                ("host-port-taken",),
                "pods on the node have host ports that the pod wants",
                ("node", "ports", "wanted"),
            ),
            ReasonGroup(
                ("pod-affinity", "pod-anti-affinity", "anti-affinity-of-others"),
                "no pod is near that the pod has to be near to; or pods are near that it does "
                "not bear, or that do not bear it",
                ("node", "topology_key", "pods"),
            ),
            ReasonGroup(
                ("topology-spread",),
                "the pod would make its kind lie more unevenly over the domains than its constraint allows",
                ("node", "topology_key", "pods", "least", "skew", "max_skew", "domains"),
            ),
            ReasonGroup(
                (
                    "volume-claim-missing",
                    "volume-claim-lost",
                    "volume-claim-deleting",
                    "volume-claim-of-another",
                    "volume-claim-unbound",
                    "volume-missing",
                ),
                "a PersistentVolumeClaim of the pod is not there, on its way out, another's, "
                "or not bound; or its PersistentVolume is not there",
                ("volume", "claim"),
            ),
            ReasonGroup(
                ("volume-in-use",),
                "another pod has the pod's `ReadWriteOncePod` volume",
                ("volume", "claim"),
            ),
            ReasonGroup(
                ("volume-elsewhere", "volume-zone"),
                "a PersistentVolume of the pod can be used on other nodes only, or is in another zone or region",
                ("node", "volume", "claim", "label"),
            ),
            ReasonGroup(
                ("volume-unavailable",),
                "a PersistentVolumeClaim that waits for the pod would get no volume here, "
                "neither a free one nor a new one",
                ("node", "claim", "storage_class"),
            ),
            ReasonGroup(
                ("volume-limit",),
                "the CSI driver may attach no more volumes to the node",
                ("node", "driver", "wanted", "attached", "limit"),
            ),
            ReasonGroup(
                ("template-missing", "quota-exceeded"),
                "a claim of the pod is not made: its ResourceClaimTemplate is not there, or a ResourceQuota allows "
                "no more",
                ("entry", "template", "quota", "resource", "hard", "used"),
            ),
            ReasonGroup(
                ("other-scheduler", "scheduler-says", "preempting"),
                "what the answer rests on: which scheduler places the pod, what it says of it, and whether it is "
                "evicting others for it",
                ("scheduler", "node"),
            ),
            ReasonGroup(
                ("unseen", "unreadable", "gates-off"),
                "what was not checked: kinds that the user may not list, objects that cannot be read, feature gates "
                "that are off",
                ("kind", "name", "gates"),
            ),
        ),
    ),
    ReasonSection(
        title="Classic claims",
        before="By the classic drivers of Topobus and the scheduler's part of their negotiation; [classic "
        "DRA](classic.md).",
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
            ReasonGroup(
                ("claim-in-use",), "a claim that is not shareable is reserved for another pod, or is being taken back"
            ),
            ReasonGroup(
                ("claim-of-another", "context-of-another"),
                "the claim, or the PodSchedulingContext, was made for another pod",
            ),
        ),
    ),
    ReasonSection(
        title="Nodes that are not forgotten",
        before="By the controller, when an operator removes all that is stored of a node (`topobus forget node`).",
        groups=(
            ReasonGroup(
                ("node-alive",), "services of the node answer, or listen without answering", ("node", "services")
            ),
            ReasonGroup(
                ("node-holds",), "by the node's ledger, an owner holds something there", ("node", "owners", "count")
            ),
            ReasonGroup(
                ("node-keeps-back",), "an operator keeps devices of the node back", ("node", "devices", "count")
            ),
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
            ReasonGroup(
                ("shape-unknown",),
                "the machine does not have the claim's shape now: a device service has not reported yet, or it has "
                "other devices than before",
                ("device",),
            ),
            ReasonGroup(
                ("no-devices", "device-unknown", "device-gone"),
                "the device service does not know what is asked for",
                ("device",),
            ),
            ReasonGroup(
                ("device-not-offered",),
                "a passthrough driver holds the device by now, or its virtual functions are on: no container "
                "can use it as what it was",
                ("devices",),
            ),
            ReasonGroup(
                ("card-in-use",),
                "a card is to be cut otherwise, and somebody has a part of it, or a process has it open; it "
                "is tried again when kubelet asks again",
                ("address", "devices", "pids", "users"),
            ),
            ReasonGroup(
                ("functions-refused", "functions-unsettled"),
                "the kernel does not make or remove a card's virtual functions, or they do not come in time",
                ("address", "wanted", "error"),
            ),
            ReasonGroup(
                ("partition-mode-refused", "partition-mode-unsettled"),
                "the kernel does not bring the card into the mode, or KFD does not agree with it in time",
                ("address", "mode", "error"),
            ),
            ReasonGroup(
                ("driver-not-loaded", "driver-failed", "driver-hung", "driver-incomplete"),
                "a vendor's driver is not there, failed, does not answer, or left devices out",
                ("driver", "device"),
            ),
            ReasonGroup(
                ("not-ahead",),
                "preparing a device changes something, so it waits until the ledger has its owner; the "
                "gateway asks again then",
                ("devices",),
            ),
            ReasonGroup(
                ("attach-unsupported",),
                "a device is to be attached to a sandbox, and its driver attaches none",
                ("driver", "device"),
            ),
            ReasonGroup(
                ("device-dirty",),
                "the last owner's traces on the device could not be removed; it is tried again",
                ("device", "owner"),
            ),
            ReasonGroup(
                ("leftovers",),
                "a GPU is not clean: processes of its last tenant are on it, or its memory is not back; the "
                "device's health has it",
                ("pids", "pods", "used_bytes"),
            ),
            ReasonGroup(
                ("device-busy",), "another request works on the device for longer than a request waits", ("device",)
            ),
            ReasonGroup(
                ("device-kept-back",),
                "an operator withholds the device (`topobus device maintain` or `exclude`); the message "
                "has who and why",
                ("device",),
            ),
            ReasonGroup(
                ("journal-unreadable",),
                "what was done to the device before cannot be read, so it is withheld; other devices are not affected",
                ("device",),
            ),
            ReasonGroup(("undo-failed",), "what a crash or a failure left half done cannot be undone yet", ("device",)),
            ReasonGroup(("work-overdue",), "a driver's long work takes longer than it announced", ("driver",)),
            ReasonGroup(
                ("work-under-way",), "long work for the owner has not ended, so nothing can be undone yet", ("device",)
            ),
            ReasonGroup(("cpu-offline",), "a CPU that was allocated went offline", ("cpus", "online")),
            ReasonGroup(
                ("cpu-parameters-invalid",),
                "a claim's CpuParameters have a field or a value that is none",
                ("field", "got", "wanted"),
            ),
            ReasonGroup(
                ("cpus-not-chosen",),
                "which CPUs of a group the owner has was not chosen: only a claim may have some, through a "
                "gateway of at least this release",
                ("devices",),
            ),
            ReasonGroup(
                ("cpu-not-ours", "cpu-of-kubelet"),
                "a claim is to have a CPU for itself that the gateway's setting `cpus.owned` does not name, "
                "or that kubelet's CPU manager gave to a container",
                ("cpus", "owned"),
            ),
            ReasonGroup(
                ("cpu-of-claim",),
                "a claim is to have a CPU for itself that another prepared claim has by the gateway's "
                "checkpoint, though the ledger (lost, or older) differs",
                ("cpus",),
            ),
            ReasonGroup(
                ("claim-not-prepared",),
                "a container names devices of a claim that is not prepared on this node; the gateway does "
                "not let it start",
                ("claim_uid", "device_class"),
            ),
            ReasonGroup(
                ("claim-not-for-pod", "pod-on-host-network", "device-in-another-pod"),
                "a claim's devices cannot go into this pod's sandbox",
                ("claim", "devices"),
            ),
            ReasonGroup(
                ("attach-failed", "attach-unanswered", "attach-pending", "attach-malformed"),
                "a claim's devices are not in the pod's sandbox: the device service failed, is away, is "
                "still at work, or answers what cannot be true",
                ("claim", "devices"),
            ),
            ReasonGroup(
                ("adjust-unanswered", "adjust-malformed", "adjust-unsupported"),
                "a container cannot be made yet: its device service did not answer in time what it gets, "
                "or its answer cannot be true or cannot be carried out then",
                ("claim", "devices"),
            ),
            ReasonGroup(
                ("shared-pool-empty",), "a claim would take the last CPU of all other containers", ("cpus", "shared")
            ),
            ReasonGroup(
                ("edits-conflict",), "two parts of a container's settings contradict each other", ("variable",)
            ),
            ReasonGroup(
                ("edits-forbidden",),
                "a device service wants to give a container what its class [may not "
                "bring](dra-on-the-node.md#what-a-device-may-bring-into-a-container)",
                ("class", "device", "edit", "wanted", "count"),
            ),
            ReasonGroup(
                ("cdi-unresolved", "cdi-ambiguous"), "no CDI file, or several, define a device", ("device", "files")
            ),
            ReasonGroup(
                ("plugin-gone", "plugin-unknown-device", "plugin-refused", "plugin-cdi-unresolved"),
                "another vendor's device plugin is gone, does not list the device, refused it, or names a "
                "CDI device that no file defines",
            ),
            ReasonGroup(
                ("sharing-malformed", "sharing-differs"),
                "SharingParameters that cannot be read, or that differ among the devices of one claim",
            ),
            ReasonGroup(
                ("passthrough-malformed", "passthrough-forbidden"),
                "PassthroughParameters that cannot be read or contradict another parameter, or a "
                "device that no rule of `passthrough.allow` is true of",
                ("device",),
            ),
            ReasonGroup(
                ("passthrough-unsupported",),
                "the device cannot go to a virtual machine here: it is a part of a function, or the node "
                "lacks IOMMU, iommufd or the kernel driver",
                ("device", "what"),
            ),
            ReasonGroup(
                ("passthrough-group",),
                "other functions are in the device's IOMMU group, and the claim does not pass them through",
                ("device", "group", "others"),
            ),
            ReasonGroup(
                ("passthrough-busy", "passthrough-blind"),
                "the function is in use, or its use cannot be seen; its own driver has it",
                ("devices", "processes"),
            ),
            ReasonGroup(
                ("passthrough-failed",),
                "the kernel does not switch the function; its own driver has it again",
                ("error",),
            ),
            ReasonGroup(
                ("device-passed-through",),
                "a virtual machine of another owner has the device, or another owner has it at all",
                ("device", "owner"),
            ),
            ReasonGroup(
                ("sharing-unsupported",), "the devices' driver does not know the strategy", ("driver", "strategy")
            ),
            ReasonGroup(
                ("time-slice-unsupported",),
                "a time slice other than the default, which cannot be set here: no nvidia-smi, or a part of a GPU",
                ("interval", "missing"),
            ),
            ReasonGroup(
                ("time-slice-differs",),
                "somebody else has a share of the GPU with another time slice",
                ("device", "interval", "present"),
            ),
            ReasonGroup(
                ("time-slice-failed",),
                "nvidia-smi reports that it has not set the time slice: it needs root, and a GPU that has slices",
                ("device", "interval"),
            ),
            ReasonGroup(("mps-not-running",), "MPS is asked for, and no control daemon runs on the node"),
            ReasonGroup(
                ("mps-start-failed",),
                "the gpu service owns the MPS control daemons (`mps.owned`), and this one does not start; "
                "its log is kept",
                ("device", "log"),
            ),
            ReasonGroup(("mps-program-missing",), "a program of MPS is not in the driver root", ("missing", "roots")),
            ReasonGroup(
                ("mps-partition",), "MPS is asked for on a MIG instance, or on a GPU that is cut into instances"
            ),
            ReasonGroup(("mps-uuid-unknown",), "a daemon gets its GPUs by UUID, and one has none that is known"),
            ReasonGroup(
                ("mps-several-daemons",),
                "a part of a GPU under MPS is asked for beside other GPUs: a process has one daemon",
            ),
            ReasonGroup(
                ("mps-mixed",),
                "others have a part of the GPU by MPS and this one would not, or the other way round",
                ("device",),
            ),
            ReasonGroup(
                ("driver-files-incomplete",),
                "the files of the loaded NVIDIA driver are not all on the host, and "
                "`hardware.driver_files.bring` is `always`",
                ("root", "wanted", "got"),
            ),
            ReasonGroup(
                ("loader-hook-missing",),
                "`hardware.driver_files.loader` is `hook`, and the program is not where it is looked for",
            ),
            ReasonGroup(("access-malformed",), "the configuration `Access` of a claim for GPUs cannot be read"),
            ReasonGroup(
                ("access-unavailable",), "a claim asks for a device node that the host does not have", ("missing",)
            ),
            ReasonGroup(
                ("mig-unreadable",),
                "NVML does not report now which MIG instances a GPU has; kubelet asks again",
                ("devices",),
            ),
            ReasonGroup(
                ("mig-occupied",),
                "a MIG instance cannot be made for a claim, since another one that is not ours takes what it needs",
                ("devices",),
            ),
            ReasonGroup(
                ("mig-capability-missing",),
                "the kernel module names no capability for a MIG instance, or the host lacks its node; the "
                "container would see no device",
                ("capability",),
            ),
            ReasonGroup(("prepare-incomplete",), "a device service prepared less than it was asked for", ("devices",)),
        ),
    ),
    FUNCTION_SECTION,
    DEVICE_WORK_SECTION,
    *NETWORK_SECTIONS,
)
