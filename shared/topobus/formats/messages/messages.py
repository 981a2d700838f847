"""The messages that cross NATS and are not domain values already (machine, inventory and ledger
are).

Every field that came after the first version has a default. Unknown fields are ignored. A golden
file guards each message.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from topobus.formats.messages.release_messages import CommitReply, CommitRequest, ReleaseReply, ReleaseRequest
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.values.edits import ContainerEdits
from topobus.values.health import DeviceHealth, HealthState
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Adoption
from topobus.values.maintenance import DeviceOperation
from topobus.values.names import Generation
from topobus.values.outcome import HintList, MemoryBlock, Placement, Refusal, summary
from topobus.values.repair import Repair, RepairNote, RepairPause
from topobus.values.request import Owner, PodRequest
from topobus.values.vendor_profiles import VendorProfile
from topobus.values.view import NodeView

__all__ = [
    "OUTCOME",
    "AdoptReply",
    "AdoptRequest",
    "Adopted",
    "ApiObject",
    "CommitReply",
    "CommitRequest",
    "ContainerDevices",
    "DecisionEvent",
    "Disagreement",
    "DisagreementEvent",
    "GivenHints",
    "HealthEvent",
    "HeldDevice",
    "HintsEvent",
    "HintsReply",
    "HintsRequest",
    "PlaceReply",
    "PlaceRequest",
    "PodsReply",
    "PodsRequest",
    "PreferReply",
    "PreferRequest",
    "PrepareReply",
    "PrepareRequest",
    "Prepared",
    "ReleaseReply",
    "ReleaseRequest",
    "RepairState",
    "RuntimeConnection",
    "UnprepareReply",
    "UnprepareRequest",
    "entries_of",
]

OUTCOME = ":outcome"
"""The end of an operation id of an operator's request whose decision has the outcome."""


class ApiObject(Struct, frozen=True, kw_only=True, rename={"api_version": "apiVersion"}):
    """A Kubernetes object of the stand-alone API, in Kubernetes' own wire shape.

    All inner fields are kept as they are.
    """

    api_version: str
    kind: str
    metadata: dict[str, Any]
    spec: dict[str, Any] = {}
    status: dict[str, Any] = {}


def entries_of(value: object) -> list[dict[str, Any]]:
    """List the entries of a list that are objects: what is stored may have any form.

    >>> entries_of([{"name": "a"}, "b"]), entries_of(None)
    ([{'name': 'a'}], [])
    """
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


class HealthEvent(Struct, frozen=True, kw_only=True):
    """One device's present health.

    Each event is complete: the newest of a subject is the present state of that device.
    """

    node: str
    device_class: str
    device: str
    health: DeviceHealth
    previous: HealthState | None = None
    """None in the first event of a device."""
    generation: Generation
    """Grows by one with each event of this device; an older one is dropped."""
    inventory_generation: Generation = 0
    is_removed: bool = False
    """True when the device left the inventory for good."""
    affected: tuple[Owner, ...] = ()
    """The owners of the device, from the ledger. For an allocation of kubelet's device plugins this
    is the pod (without a uid), as soon as kubelet has reported it."""
    pods: tuple[Owner, ...] = ()
    """The pods that use the device, by a claim or by a device plugin, sorted. A pod that only
    kubelet has named has no uid."""
    time: str
    """RFC 3339, UTC."""


class DecisionEvent(Struct, frozen=True, kw_only=True):
    """One decision with all its inputs, enough to replay it offline."""

    id: str
    verb: str
    """`place`, `adopt`, `release`, `allocate`, `schedule`, `evict`, `quarantine`, or what an
    operator does with a device: `maintain`, `exclude`, `return`, `forgive`, `reset`, `rebind`,
    `burn-in`; or `repair`."""
    node: str
    op_id: str
    time: str
    """RFC 3339, UTC."""
    owner: Owner
    request: PodRequest | None = None
    view: NodeView | None = None
    """The inputs of a `place`; None for verbs that choose nothing."""
    outcome: Placement | Refusal | None = None
    ledger_sequence: int = 0
    """The ledger's sequence after the decision."""
    is_dry_run: bool = False
    user: Owner | None = None
    """The pod that used what a `release` freed, where the owner does not name it (an allocation of
    kubelet's)."""
    operation: DeviceOperation | None = None
    """What an operator wants of one device, for the verbs of `topobus device`."""
    health: DeviceHealth | None = None
    """That device's health when it was decided, with all evidence; of a repair, when this was
    published."""
    repair: RepairNote | None = None
    """What was decided about a repair by policy, for `repair`."""

    @property
    def is_begun(self) -> bool:
        """Say whether this allows an operator's request, which the device service is then asked to
        perform. The outcome is a decision of its own.
        """
        return self.operation is not None and self.outcome is None and not self.op_id.endswith(OUTCOME)

    @property
    def text(self) -> str:
        """Describe for people what was decided, for whom."""
        if self.repair is not None:
            return self.repair.text
        return self.operation.text if self.operation is not None else f"{self.verb} {self.user or self.owner}"

    @property
    def answer(self) -> str:
        """Summarize the answer in one line. An operator's request is begun until its outcome is
        decided.
        """
        if self.repair is not None:
            return self.repair.answer
        return "begun" if self.is_begun else summary(self.outcome)


class RepairState(Struct, frozen=True, kw_only=True):
    """All repairs of a fleet. It is written before an operation is asked for, by compare-and-set:
    so budgets hold, and a step is done once, whatever number of controllers there is.
    """

    policy: str = ""
    """The policy as JSON, of the controller that started last: all replicas follow one. A replica
    of another release that cannot read it does nothing."""
    repairs: tuple[Repair, ...] = ()
    """One for each device, sorted by place."""
    begun_s: tuple[float, ...] = ()
    """When repairs began in the last hour."""
    pause: RepairPause | None = None
    """The newest, also one that is over."""
    events: tuple[DecisionEvent, ...] = ()
    """Decisions to publish."""

    @property
    def under_way(self) -> tuple[Repair, ...]:
        """The repairs that have not ended."""
        return tuple(repair for repair in self.repairs if repair.end is None)


class PlaceRequest(Struct, frozen=True, kw_only=True):
    """Place all containers of a pod (or a claim's devices), or nothing."""

    op_id: str
    pod: PodRequest
    is_dry_run: bool = False
    is_reservation: bool = False
    """True: hold it for now. It is released when no `commit` comes in time, or at once by
    `release`."""
    besides: dict[str, tuple[str, ...]] = {}
    """For a dry run: also count these devices as held, class to names (CPUs by device name). The
    pod's claims are about to take them."""


class PlaceReply(Struct, frozen=True, kw_only=True):
    """The answer of `place`, the same for the same op_id."""

    decision_id: str
    node: str
    result: Placement | Refusal
    ledger_sequence: int = 0


class PreferRequest(Struct, frozen=True, kw_only=True):
    """Ask which of these devices are best together (kubelet's GetPreferredAllocation)."""

    op_id: str = ""
    device_class: str
    available: tuple[str, ...]
    must_include: tuple[str, ...] = ()
    size: int
    withheld: tuple[str, ...] = ()
    """Free devices that are about to be a claim's: they are chosen when nothing else is left."""
    is_from_end: bool = False
    """Among what is equally aligned prefer the largest names: the scheduler gives claims the
    smallest."""


class PreferReply(Struct, frozen=True, kw_only=True):
    """The choice. It keeps what must be included, has `size` names when so many are available, and
    is never an error.
    """

    devices: tuple[str, ...]
    reason: str = ""


class PodsRequest(Struct, frozen=True, kw_only=True):
    """Ask which containers have which of our devices, as kubelet reports it."""

    namespace: str = ""
    """Only pods of this namespace; empty: all."""


class HeldDevice(Struct, frozen=True, kw_only=True):
    """One device of a container with its node and health from the inventory."""

    name: str
    numa_nodes: NodeSet | None = None
    """None: not known, or the device is no longer in the inventory."""
    health: HealthState = HealthState.UNKNOWN
    reason: str = ""
    """The worst condition's reason; empty when the device is well."""


class ContainerDevices(Struct, frozen=True, kw_only=True):
    """The devices that one container has through one resource or one claim."""

    namespace: str
    pod: str
    container: str
    device_class: str
    resource: str = ""
    """`topobus.dev/gpu`; empty for a claim's devices."""
    claim: str = ""
    """Namespace and name; empty for a resource's devices."""
    devices: tuple[HeldDevice, ...]
    memory: tuple[MemoryBlock, ...] = ()
    """Memory that kubelet's memory manager gave it, by NUMA node, in addition to its exclusive
    CPUs (class `cpu`)."""


class Disagreement(Struct, frozen=True, kw_only=True):
    """A device for which kubelet and the ledger name different holders."""

    device_class: str
    device: str
    kubelet: str
    """Its user by kubelet."""
    ledger: str
    """Its owner by the ledger."""


class DisagreementEvent(Struct, frozen=True, kw_only=True):
    """kubelet and the ledger name different holders of a device: published once when it was seen
    twice, and once when it is over.
    """

    node: str
    device_class: str
    device: str
    kubelet: str
    """Its user by kubelet."""
    ledger: str
    """Its owner by the ledger."""
    is_over: bool = False
    """True: they no longer disagree; both sides are those of the event before."""
    time: str
    """RFC 3339, UTC."""


class RuntimeConnection(Struct, frozen=True, kw_only=True):
    """The gateway's connection to the container runtime (NRI).

    The gateway learns from it which containers exist, and through it pins claims' CPUs and moves
    devices into pods.
    """

    socket: str
    why_not: str = ""
    """Why there is none now; empty: there is one."""
    pins_cpus: bool = False
    """Claims get CPUs for themselves by it."""
    cpusets_unseen: str = ""
    """Why the gateway cannot read the containers' cpusets of the kernel; empty: it can, or need
    not."""


class KubeletRegistrations(Struct, frozen=True, kw_only=True):
    """What a gateway has registered with kubelet: `registered`, or the reason in words why it is
    not.
    """

    folder: str = ""
    """Where the gateway looks for kubelet's socket, as it sees its own files."""
    has_kubelet: bool = False
    """The socket is there."""
    plugins: dict[str, str] = {}
    """By resource."""
    drivers: dict[str, str] = {}
    """DRA drivers, by name."""


class PodsReply(Struct, frozen=True, kw_only=True):
    """The devices that kubelet's pods have, sorted. Nothing is known when `why` is given."""

    containers: tuple[ContainerDevices, ...] = ()
    disagreements: tuple[Disagreement, ...] = ()
    why: str = ""
    """Why kubelet does not report them; empty when it does."""
    runtime: RuntimeConnection | None = None
    """None: the gateway gives no CPUs (setting `cpus.owned`) and needs none."""
    dropped_slice_fields: tuple[str, ...] = ()
    """What the API server does not keep of this node's ResourceSlices, sorted:
    `spec.devices.*.consumesCounters`."""
    resource_rivals: dict[str, str] = {}
    """Resources of vendors' profiles that the gateway does not register, with the device plugin of
    somebody else that has them."""
    registrations: KubeletRegistrations = KubeletRegistrations()
    plugin_failures: dict[str, str] = {}
    """Resources of others' device plugins that have registered here and are not served now, and
    why."""
    profiles: tuple[VendorProfile, ...] = ()
    """The vendors whose device plugins the gateway replaces: pods may also ask by their names."""


class AdoptRequest(Adoption, frozen=True, kw_only=True):
    """Write a decision of kubelet (or of a claim's status) into the ledger."""

    op_id: str
    names_pods_of: str = ""
    """A decision: nothing is adopted; what the owner holds by it is used by `pods`, and by their
    `container`, from now on, and a later holding stays as it is. Empty: adopt."""
    owned_cpus: CpuSet | None = None
    """CPUs that may be chosen of groups; None: all."""


class Adopted(Struct, frozen=True, kw_only=True, tag="adopted", tag_field="outcome"):
    """The decision is in the ledger.

    `displaced` lists owners whose stale device-plugin holding was removed.
    """

    decision_id: str
    ledger_sequence: int = 0
    displaced: tuple[Owner, ...] = ()
    cpus: dict[str, CpuSet] = {}
    """Which CPUs the owner has of each group."""


class AdoptReply(Struct, frozen=True, kw_only=True):
    """The answer of `adopt`.

    Refused when another live owner holds a device, or a device does not exist.
    """

    result: Adopted | Refusal


class PrepareRequest(Struct, frozen=True, kw_only=True):
    """Make devices of one class ready for their owner."""

    op_id: str
    owner: Owner
    devices: tuple[str, ...]
    config: tuple[dict[str, Any], ...] = ()
    """Opaque configuration for this driver, class configs before claim configs."""
    device_config: dict[str, tuple[dict[str, Any], ...]] = {}
    """Configuration by device, in place of `config`, where it is not the same for all: a claim
    configures single requests."""
    looked_at: tuple[str, ...] = ()
    """Those of `devices` to which the owner has admin access, which includes sick ones."""
    tolerated: tuple[str, ...] = ()
    """Those of `devices` that the owner takes also when they are sick: its allocation tolerates
    their taint."""
    cpus: dict[str, CpuSet] = {}
    """Which CPUs the owner has of those of `devices` that are groups of CPUs."""
    is_again: bool = False
    """True: the owner has had them prepared before, and uses them: they are its own also when an
    operator keeps them back."""
    shares: dict[str, dict[str, int]] = {}
    """How much the owner has of those of `devices` that it shares with others: device to capacity
    to amount."""
    is_ahead: bool = False
    """True: the owner does not hold them yet, and may never. Answered only when nothing is changed
    by it, else refused as `not-ahead`; asked only of services whose inventory names the devices'
    drivers in `reading_drivers`."""


class Prepared(Struct, frozen=True, kw_only=True, tag="prepared", tag_field="outcome"):
    """Ready: the edits of each device, and those common to all of them in one container."""

    edits: dict[str, ContainerEdits]
    """Device name to its edits; every device asked for is here."""
    common: ContainerEdits = ContainerEdits()
    """Edits for a container that gets these devices (such as one variable that lists them all)."""
    to_attach: tuple[str, ...] = ()
    """Devices that must be attached to the pod's sandbox before any container of it starts."""
    to_adjust: tuple[str, ...] = ()
    """Devices whose driver is asked for each container that gets them, when it is made."""


class PrepareReply(Struct, frozen=True, kw_only=True):
    """The answer of `prepare`, the same for the same op_id."""

    result: Prepared | Refusal | Accepted


class UnprepareRequest(Struct, frozen=True, kw_only=True):
    """Undo `prepare`. Devices that were never prepared are no error."""

    op_id: str
    owner: Owner
    devices: tuple[str, ...]


class UnprepareReply(Struct, frozen=True, kw_only=True):
    """Done, or why not."""

    refusal: Refusal | None = None


class GivenHints(HintList, frozen=True, kw_only=True):
    """One hint list that a provider gave, and for which container."""

    container: str = ""
    """Empty: for all of the pod (scope pod), or the container was not
    known where the hints were given."""


class HintsEvent(Struct, frozen=True, kw_only=True):
    """All hint lists that were given for one class in one operation."""

    node: str
    device_class: str
    """Also `memory`, for memory and hugepages of all sizes."""
    op_id: str
    """The operation for which they were given, as in the decision that followed; empty when the
    asker named none."""
    by: str
    """Their source: `topology` by kubelet's rules, or the class's own `device-service`."""
    owner: Owner | None = None
    """The owner that they are for; None: it was not known where the hints were given."""
    lists: tuple[GivenHints, ...]
    omitted_lists: int = 0
    """How many more there were: one message has the lists of the first containers."""
    is_dry_run: bool = False
    time: str
    """RFC 3339, UTC."""


class HintsRequest(Struct, frozen=True, kw_only=True):
    """Ask a device service for its hints: `count` devices out of those available."""

    op_id: str = ""
    count: int
    available: tuple[str, ...]


class HintsReply(Struct, frozen=True, kw_only=True):
    """Hints by kubelet's rules. None is "no opinion"."""

    hints: tuple[Hint, ...] | None
    inventory_generation: int = 0
