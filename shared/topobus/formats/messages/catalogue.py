"""Everything that crosses NATS: subject, message, stream or bucket, writer, readers.

The one place where a noun is declared. The grammar that makes a subject or a key of a noun is in
`topobus.formats.messages.nouns`. The reference page, the AsyncAPI document and the NATS permissions
are generated from here.
"""

from __future__ import annotations

from typing import Any

from topobus.formats.messages import (
    adjust_messages,
    forget_messages,
    operation_messages,
    plan_messages,
    relay_messages,
    report_messages,
    sandbox_messages,
)
from topobus.formats.messages import messages as m
from topobus.formats.messages.device_classes import DEVICE_SERVICES
from topobus.formats.messages.nouns import Ask, Event, Notice, Noun, State
from topobus.values.device import Inventory
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine
from topobus.values.view import NodeAlignment

__all__ = [
    "ADJUST",
    "ADOPT",
    "ALIGNMENT",
    "ALL",
    "ASKS",
    "ATTACH",
    "BUCKETS",
    "COMMIT",
    "DECISION",
    "DETACH",
    "DISAGREEMENT",
    "EVENTS",
    "FORGET",
    "FORGETTER",
    "HEALTH",
    "HINT",
    "HINTS",
    "INVENTORY",
    "LEDGER",
    "LINK",
    "MACHINE",
    "MAINTENANCE",
    "NOTICES",
    "OBJECT",
    "OPERATE",
    "PERFORM",
    "PLACE",
    "PLAN",
    "PODS",
    "PREFER",
    "PREPARE",
    "PROVISIONER",
    "RELAY",
    "RELEASE",
    "REPAIR",
    "REPORT",
    "REPORTER",
    "STATES",
    "UNPREPARE",
]

# The one process that makes streams, where each process is a NATS user of its own. It
# runs in every installation. A node's own server has no controller: there it is
# another (setting nats.provisioner).
PROVISIONER = "controller"
# The one process that removes the keys of a node that is gone, because no process of the node is
# left to do it.
FORGETTER = "controller"
# Reads all that its node's server stores, to copy it to the hub.
_RELAY = "relay"
# Programs of others that report how devices are, by a login that allows nothing else.
REPORTER = "verdicts"
# The servers of a class: its own service, and the gateway for classes of other vendors' device
# plugins.
_CLASS_SERVERS = (*DEVICE_SERVICES, "gateway")

MACHINE = State(
    name="machine",
    parts=("node",),
    bucket="topobus_machines",
    message=Machine,
    writer=("discovery",),
    readers=(*_CLASS_SERVERS, "topology", "controller", _RELAY, "console", "cli"),
    description="NUMA nodes and distances, CPUs, caches, memory and the PCI tree of one node.",
    max_value_bytes=900 * 1024,
    max_bucket_bytes=192 * 1024 * 1024,
    may_be_compressed=True,
    is_rewritten=True,
)
INVENTORY = State(
    name="inventory",
    parts=("node", "device_class"),
    bucket="topobus_inventories",
    message=Inventory,
    writer=_CLASS_SERVERS,
    readers=("topology", "gateway", "controller", _RELAY, "console", "cli"),
    description="All devices of one class on one node with their health.",
    # That of other classes, and at a hub of all: there relays write, each for its own node.
    max_bucket_bytes=384 * 1024 * 1024,
    may_be_compressed=True,
    is_rewritten=True,
    classes_apart=DEVICE_SERVICES,
    max_class_bytes=192 * 1024 * 1024,
)
LEDGER = State(
    name="ledger",
    parts=("node",),
    bucket="topobus_ledgers",
    message=Ledger,
    writer=("topology",),
    readers=(*DEVICE_SERVICES, "gateway", "controller", _RELAY, "console", "cli"),
    description="The owners of everything that is held on one node, with the answers of the newest operations.",
    history=16,
    max_value_bytes=900 * 1024,
    # The most of all: sixteen revisions a node, each with its newest answers, and without room
    # for them nothing can be placed.
    max_bucket_bytes=768 * 1024 * 1024,
    entries="allocations",
)
ALIGNMENT = State(
    name="alignment",
    parts=("node",),
    bucket="topobus_alignments",
    message=NodeAlignment,
    writer=("topology",),
    readers=("topology", "gateway", "controller", _RELAY, "console", "cli"),
    description="How one node aligns: policy, scope, mode, reserved CPUs and memory, shapes, as its operator set them; "
    "and which of its device services are silent.",
    max_bucket_bytes=32 * 1024 * 1024,
)
RELAY = State(
    name="relay",
    parts=("node",),
    bucket="topobus_relays",
    message=relay_messages.NodeRelay,
    writer=(_RELAY,),
    readers=("cli",),
    description="How far the hub's copies of one node's events are; written only where nodes have servers of their own.",  # noqa: E501
    history=4,
    max_value_bytes=64 * 1024,
    max_bucket_bytes=32 * 1024 * 1024,
    is_rewritten=True,
)
MAINTENANCE = State(
    name="maintenance",
    parts=("node", "device_class"),
    bucket="topobus_maintenances",
    message=operation_messages.ClassMaintenance,
    writer=DEVICE_SERVICES,
    readers=(_RELAY, "controller", "cli"),
    description="Which devices of one class on one node an operator withholds, who and why, what was done to single "
    "devices lately, and the verdicts of others.",
    max_value_bytes=256 * 1024,
    # A full bucket refuses writes and drops nothing: a service that starts after it has become full
    # must still learn which devices are withheld.
    max_bucket_bytes=32 * 1024 * 1024,
    classes_apart=DEVICE_SERVICES,
    max_class_bytes=16 * 1024 * 1024,
)
OBJECT = State(
    name="object",
    parts=("kind", "namespace", "name"),
    bucket="topobus_objects",
    message=m.ApiObject,
    writer=("cli", "controller"),
    readers=("controller", "gateway", "console", "cli"),
    description="The stand-alone API: DeviceClasses, ResourceClaims and Pods in Kubernetes' wire shape. CLI writes spec, "  # noqa: E501
    "controller status.",
    # A claim may have 32 configurations of 10 KiB, and its allocation has them once more
    # (resource.k8s.io/v1): 640 KiB.
    max_value_bytes=900 * 1024,
    max_bucket_bytes=256 * 1024 * 1024,
)
REPAIR = State(
    name="repair",
    # One key, `_`: budgets count over all repairs, so all are one value.
    parts=("fleet",),
    bucket="topobus_repairs",
    message=m.RepairState,
    # The CLI pauses and resumes.
    writer=("controller", "cli"),
    readers=("controller", "console", "cli"),
    description="The policy of repairs, those under way, and the devices that they left to a person.",
    max_bucket_bytes=16 * 1024 * 1024,
)
HEALTH = Event(
    name="health",
    parts=("node", "device_class", "device"),
    stream="TOPOBUS_HEALTH",
    message=m.HealthEvent,
    event_type="dev.topobus.health.v1",
    writer=_CLASS_SERVERS,
    readers=("users", "gateway", _RELAY, "console", "cli"),
    description="A device's health, complete in each event; the newest of a subject is the present state.",
    max_per_subject=64,
    max_stream_bytes=256 * 1024 * 1024,
)
DECISION = Event(
    name="decision",
    parts=("node",),
    stream="TOPOBUS_DECISIONS",
    message=m.DecisionEvent,
    event_type="dev.topobus.decision.v1",
    writer=("topology", "controller"),
    readers=("users", _RELAY, "console", "cli"),
    description="Every decision with its inputs, enough to replay it offline.",
    max_per_subject=4096,
    max_stream_bytes=512 * 1024 * 1024,
    # A decision carries the node as it was seen: as large as a message may
    # be (tools/docpages/nats_files.py).
    max_event_bytes=1020 * 1024,
)
DISAGREEMENT = Event(
    name="disagreement",
    parts=("node", "device_class", "device"),
    stream="TOPOBUS_DISAGREEMENTS",
    message=m.DisagreementEvent,
    event_type="dev.topobus.disagreement.v1",
    writer=("gateway",),
    readers=("users", "gateway", _RELAY, "cli"),
    description="A device that kubelet gives to one and the ledger to another, with both sides; the newest of a subject "  # noqa: E501
    "is the present state.",
    max_per_subject=16,
    max_stream_bytes=64 * 1024 * 1024,
)
HINTS = Notice(
    name="hints",
    parts=("node", "device_class"),
    message=m.HintsEvent,
    event_type="dev.topobus.hints.v1",
    writer=(*_CLASS_SERVERS, "topology"),
    readers=("users", "cli"),
    description="The hint lists that were given for one class in one operation, sent once to all that listen.",
)
PLACE = Ask(
    name="place",
    parts=("node",),
    request=m.PlaceRequest,
    reply=m.PlaceReply,
    timeout_s=5.0,
    writer=("topology",),
    readers=("gateway", "controller", "cli"),
    description="Place all containers of a pod on this node, or give the reasons why not.",
)
PREFER = Ask(
    name="prefer",
    parts=("node",),
    request=m.PreferRequest,
    reply=m.PreferReply,
    timeout_s=1.0,
    writer=("topology",),
    readers=("gateway", "controller", "cli"),
    description="Choose the best devices out of those available.",
)
ADOPT = Ask(
    name="adopt",
    parts=("node",),
    request=m.AdoptRequest,
    reply=m.AdoptReply,
    timeout_s=5.0,
    writer=("topology",),
    readers=("gateway", "controller", "cli"),
    description="Write into the ledger what kubelet or a claim has decided.",
)
COMMIT = Ask(
    name="commit",
    parts=("node",),
    request=m.CommitRequest,
    reply=m.CommitReply,
    timeout_s=5.0,
    writer=("topology",),
    readers=("gateway", "controller", "cli"),
    description="Keep what an owner has reserved; release aborts it.",
)
RELEASE = Ask(
    name="release",
    parts=("node",),
    request=m.ReleaseRequest,
    reply=m.ReleaseReply,
    timeout_s=5.0,
    writer=("topology",),
    readers=("gateway", "controller", "cli"),
    description="Let go of all that an owner holds.",
)
HINT = Ask(
    name="hint",
    parts=("node", "device_class"),
    request=m.HintsRequest,
    reply=m.HintsReply,
    # The architecture's budget for a provider with custom hints. A later answer counts as an
    # explicit "no opinion".
    timeout_s=0.02,
    writer=_CLASS_SERVERS,
    # The controller asks for no hints: it only checks whether a service would answer.
    readers=("topology", "controller", "cli"),
    description="Hints of one class, by the device service itself.",
)
PREPARE = Ask(
    name="prepare",
    parts=("node", "device_class"),
    request=m.PrepareRequest,
    reply=m.PrepareReply,
    timeout_s=10.0,
    writer=_CLASS_SERVERS,
    readers=("gateway", "cli"),
    description="Make devices ready and return what a container needs to use them.",
)
UNPREPARE = Ask(
    name="unprepare",
    parts=("node", "device_class"),
    request=m.UnprepareRequest,
    reply=m.UnprepareReply,
    timeout_s=10.0,
    writer=_CLASS_SERVERS,
    readers=("gateway", "cli"),
    description="Undo prepare.",
)
ATTACH = Ask(
    name="attach",
    parts=("node", "device_class"),
    request=sandbox_messages.AttachRequest,
    reply=sandbox_messages.AttachReply,
    timeout_s=10.0,
    # Somebody else's device plugins attach nothing.
    writer=DEVICE_SERVICES,
    readers=("gateway",),
    description="Attach prepared devices to their pod's sandbox.",
)
DETACH = Ask(
    name="detach",
    parts=("node", "device_class"),
    request=sandbox_messages.DetachRequest,
    reply=sandbox_messages.DetachReply,
    timeout_s=10.0,
    writer=DEVICE_SERVICES,
    readers=("gateway",),
    description="Undo attach.",
)
ADJUST = Ask(
    name="adjust",
    parts=("node", "device_class"),
    request=adjust_messages.AdjustRequest,
    reply=adjust_messages.AdjustReply,
    # The container runtime waits for it.
    timeout_s=1.0,
    writer=DEVICE_SERVICES,
    readers=("gateway",),
    description="Say what one container with prepared devices gets, when it is made.",
)
PLAN = Ask(
    name="plan",
    parts=("node",),
    request=plan_messages.PlanRequest,
    reply=plan_messages.PlanReply,
    timeout_s=10.0,
    queue_group="controller",
    writer=("controller",),
    readers=("cli",),
    description="Find a node for a pod and place it there; the node in the subject is always `_`.",
)
FORGET = Ask(
    name="forget",
    parts=("node",),
    request=forget_messages.ForgetRequest,
    reply=forget_messages.ForgetReply,
    # A node with thousands of devices has as many subjects of health.
    timeout_s=60.0,
    queue_group="controller",
    writer=(FORGETTER,),
    readers=("cli",),
    description="Remove all that is stored of a node that is gone, from every bucket; the node in the subject is always `_`.",  # noqa: E501
)
OPERATE = Ask(
    name="operate",
    parts=("node",),
    request=operation_messages.OperateRequest,
    reply=operation_messages.OperateReply,
    timeout_s=15.0,
    # It has the ledger with the devices' holders, and it writes the decision.
    writer=("topology",),
    # The controller, for repairs that an operator's policy declares.
    readers=("controller", "cli"),
    description="Do what an operator wants with one device: keep it back, give it back, forgive its faults, reset it, bind it again, test it.",  # noqa: E501
)
PERFORM = Ask(
    name="perform",
    parts=("node", "device_class"),
    request=operation_messages.PerformRequest,
    reply=operation_messages.PerformReply,
    # A reset has a driver's time limit, and waits for its turn on the device before. What takes longer continues, and
    # the same request gets its result.
    timeout_s=12.0,
    # Devices of another vendor's device plugin are operated by that plugin.
    writer=DEVICE_SERVICES,
    readers=("topology",),
    description="Perform on one device what an operator wants and topology has decided.",
)
REPORT = Ask(
    name="report",
    parts=("node", "device_class"),
    request=report_messages.ReportRequest,
    reply=report_messages.ReportReply,
    timeout_s=5.0,
    # What another vendor's device plugin lists is that plugin's judgement.
    writer=DEVICE_SERVICES,
    readers=(REPORTER, "gateway", "cli"),
    description="Take a verdict on devices from somebody other than their driver, as far as the service trusts it.",
)
LINK = Ask(
    name="link",
    parts=("node",),
    request=relay_messages.LinkRequest,
    reply=relay_messages.NodeRelay,
    timeout_s=5.0,
    writer=(_RELAY,),
    # It only checks whether a relay would answer, and so would rewrite the keys that are removed.
    readers=("controller",),
    description="How far the relay of a node with a server of its own is, by its present note.",
)
PODS = Ask(
    name="pods",
    parts=("node",),
    request=m.PodsRequest,
    reply=m.PodsReply,
    timeout_s=6.0,
    writer=("gateway",),
    readers=("cli",),
    description="Which containers have which devices, as kubelet reports it, and where the ledger differs.",
)

STATES: tuple[State[Any], ...] = (MACHINE, INVENTORY, LEDGER, ALIGNMENT, RELAY, MAINTENANCE, OBJECT, REPAIR)
BUCKETS: tuple[State[Any], ...] = tuple(bucket for state in STATES for bucket in state.buckets())
"""Each state once for each of its buckets."""
EVENTS: tuple[Event[m.HealthEvent] | Event[m.DecisionEvent] | Event[m.DisagreementEvent], ...] = (
    HEALTH,
    DECISION,
    DISAGREEMENT,
)
NOTICES = (HINTS,)
ASKS = (
    PLACE,
    PREFER,
    ADOPT,
    COMMIT,
    RELEASE,
    HINT,
    PREPARE,
    UNPREPARE,
    ATTACH,
    DETACH,
    ADJUST,
    PLAN,
    FORGET,
    PODS,
    OPERATE,
    PERFORM,
    REPORT,
    LINK,
)
ALL: tuple[Noun, ...] = (*STATES, *EVENTS, *NOTICES, *ASKS)
