"""Reason codes of what the gateway and the device services refuse when a container is about to get its devices; a section of the catalogue (`reasons`).

Flows in: nothing. Flows out: the section.
"""

from __future__ import annotations

from topobus.contracts.reason_values import ReasonGroup, ReasonSection

__all__ = ["NODE_SECTION"]

NODE_SECTION = ReasonSection(
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
            ("card-in-use",),
            "a card is to be cut otherwise, and somebody has a part of it, or a process has it open; it is tried again when kubelet asks again",
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
        ReasonGroup(("attach-unsupported",), "a device is to be attached to a sandbox, and its driver attaches none", ("driver", "device")),
        ReasonGroup(
            ("device-dirty",), "the last owner's traces on the device could not be removed; it is tried again", ("device", "owner")
        ),
        ReasonGroup(
            ("leftovers",),
            "a GPU is not clean: processes of its last tenant are on it, or its memory is not back; it stands in the device's health",
            ("pids", "pods", "used_bytes"),
        ),
        ReasonGroup(("device-busy",), "another request works on the device for longer than a request waits", ("device",)),
        ReasonGroup(
            ("device-kept-back",),
            "an operator keeps the device back (`topobus device maintain` or `exclude`); the message says who and why",
            ("device",),
        ),
        ReasonGroup(
            ("journal-unreadable",),
            "what was done to the device before cannot be read, so nobody gets it; other devices go on",
            ("device",),
        ),
        ReasonGroup(("undo-failed",), "what a crash or a failure left half done cannot be undone yet", ("device",)),
        ReasonGroup(("work-overdue",), "a driver's long work takes longer than it said it would", ("driver",)),
        ReasonGroup(("work-under-way",), "long work for the owner has not ended, so nothing can be undone yet", ("device",)),
        ReasonGroup(("cpu-offline",), "a CPU that was allocated went offline", ("cpus", "online")),
        ReasonGroup(
            ("cpu-parameters-invalid",), "a claim's CpuParameters have a field or a value that is none", ("field", "got", "wanted")
        ),
        ReasonGroup(
            ("cpus-not-chosen",),
            "nobody chose which CPUs of a group the owner has: only a claim may have some, through a gateway that is as new",
            ("devices",),
        ),
        ReasonGroup(
            ("cpu-not-ours", "cpu-of-kubelet"),
            "a claim is to have a CPU for itself that the gateway's setting `cpus.owned` does not name, or that kubelet's CPU manager gave to a container",
            ("cpus", "owned"),
        ),
        ReasonGroup(
            ("cpu-of-claim",),
            "a claim is to have a CPU for itself that another prepared claim has by the gateway's checkpoint, though the ledger (lost, or older) says otherwise",
            ("cpus",),
        ),
        ReasonGroup(
            ("claim-not-prepared",),
            "a container names devices of a claim that is not prepared on this node; the gateway does not let it start",
            ("claim_uid", "device_class"),
        ),
        ReasonGroup(
            ("claim-not-for-pod", "pod-on-host-network", "device-in-another-pod"),
            "a claim's devices cannot go into this pod's sandbox",
            ("claim", "devices"),
        ),
        ReasonGroup(
            ("attach-failed", "attach-unanswered", "attach-pending", "attach-malformed"),
            "a claim's devices are not in the pod's sandbox: the device service failed, is away, is still at work, or answers what cannot be true",
            ("claim", "devices"),
        ),
        ReasonGroup(
            ("adjust-unanswered", "adjust-malformed", "adjust-unsupported"),
            "a container cannot be made yet: its device service did not say in time what it gets, or said what cannot be true or be done then",
            ("claim", "devices"),
        ),
        ReasonGroup(("shared-pool-empty",), "a claim would take the last CPU of all other containers", ("cpus", "shared")),
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
        ReasonGroup(
            ("passthrough-malformed", "passthrough-forbidden"),
            "PassthroughParameters that cannot be read or stand beside what contradicts them, or a device that no rule of `passthrough.allow` is true of",
            ("device",),
        ),
        ReasonGroup(
            ("passthrough-unsupported",),
            "the device cannot go to a virtual machine here: it is a part of a function, or the node lacks IOMMU, iommufd or the kernel driver",
            ("device", "what"),
        ),
        ReasonGroup(
            ("passthrough-group",),
            "other functions are in the device's IOMMU group, and the claim does not pass them through",
            ("device", "group", "others"),
        ),
        ReasonGroup(
            ("passthrough-busy", "passthrough-blind"),
            "the function is in use, or nobody may see whether it is; its own driver has it",
            ("devices", "processes"),
        ),
        ReasonGroup(("passthrough-failed",), "the kernel does not switch the function; its own driver has it again", ("error",)),
        ReasonGroup(
            ("device-passed-through",),
            "a virtual machine of another owner has the device, or another owner has it at all",
            ("device", "owner"),
        ),
        ReasonGroup(("sharing-unsupported",), "the devices' driver does not know the strategy", ("driver", "strategy")),
        ReasonGroup(("time-slice-unsupported",), "a time slice other than the default, which nobody here sets", ("interval",)),
        ReasonGroup(("mps-not-running",), "MPS is asked for, and no control daemon runs on the node"),
        ReasonGroup(
            ("mps-start-failed",),
            "the gpu service owns the MPS control daemons (`mps.owned`), and this one does not start; its log is kept",
            ("device", "log"),
        ),
        ReasonGroup(("mps-program-missing",), "a program of MPS is not in the driver root", ("missing", "roots")),
        ReasonGroup(("mps-partition",), "MPS is asked for on a MIG instance, or on a GPU that is cut into instances"),
        ReasonGroup(("mps-uuid-unknown",), "a daemon is told its GPUs by UUID, and one has none that is known"),
        ReasonGroup(("mps-several-daemons",), "a part of a GPU under MPS is asked for beside other GPUs: a process has one daemon"),
        ReasonGroup(("mps-mixed",), "others have a part of the GPU by MPS and this one would not, or the other way round", ("device",)),
        ReasonGroup(
            ("driver-files-incomplete",),
            "the files of the loaded NVIDIA driver are not all on the host, and `hardware.driver_files.bring` is `always`",
            ("root", "wanted", "got"),
        ),
        ReasonGroup(("loader-hook-missing",), "`hardware.driver_files.loader` is `hook`, and the program is not where it is looked for"),
        ReasonGroup(("access-malformed",), "the configuration `Access` of a claim for GPUs cannot be read"),
        ReasonGroup(("access-unavailable",), "a claim asks for a device node that the host does not have", ("missing",)),
        ReasonGroup(("mig-unreadable",), "NVML does not tell now which MIG instances a GPU has; kubelet asks again", ("devices",)),
        ReasonGroup(
            ("mig-capability-missing",),
            "the kernel module names no capability for a MIG instance, or the host lacks its node; the container would see no device",
            ("capability",),
        ),
        ReasonGroup(("prepare-incomplete",), "a device service prepared less than it was asked for", ("devices",)),
    ),
)
