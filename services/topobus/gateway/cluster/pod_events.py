"""Creates Kubernetes events on pods and claims about their devices on this node, so that
`kubectl describe` shows the reason, its code and what to do.

`event_recorder` writes them. No call waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from topobus.gateway.claims.attempts import Failure
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.claims.rules.device_status import text_of
from topobus.gateway.cluster.event_recorder import EventRecorder, Involved, claim_object, pod_object
from topobus.gateway.cluster.rules.device_faults import HealthNote
from topobus.gateway.cluster.rules.next_steps import next_step
from topobus.gateway.cluster.rules.shortening import shortened
from topobus.gateway.cluster.rules.waiting import NodePod
from topobus.gateway.containers.rules.cpusets import CpuDifference
from topobus.values.names import ClaimUid, PodUid
from topobus.values.outcome import Refusal
from topobus.values.request import Owner
from topobus.values.sandbox import AttachedInterface, Sandbox

__all__ = ["PodEvents"]

_NOT_PREPARED, _CPUS_REFUSED = "DevicesNotPrepared", "CpusRefused"
_ATTACHED, _NOT_ATTACHED, _NOT_DETACHED = "DevicesAttached", "DevicesNotAttached", "DevicesNotDetached"
_UNHEALTHY, _HEALTHY = "DeviceUnhealthy", "DeviceHealthy"
_CPUS_SHARED, _CPUS_DIFFERED = "CpusShared", "CpusDiffered"
_WHO_ELSE = (
    "should it come again, find out what else changes cpusets on this node, what keeps its gateway away, or why "
    "a container takes so long to start"
)
_OF_CPUS = ("cpu-", "shared-pool-")
_MESSAGE_LIMIT = 1000
# What happens to a pod whose device is unhealthy. The cluster's own eviction ignores the claim made
# for a pod's resources.
_BY_CLAIM = "`topobus health` shows what is known; the cluster evicts pods whose claims do not tolerate it"
_BY_RESOURCE = (
    "`topobus health` shows what is known; delete and create the pod again for another device (the gateway's "
    "setting cluster.evict_after_s does)"
)
# An interface may have hundreds.
_MAX_ADDRESSES = 4


class PodEvents:
    """Creates events for one node's pods."""

    def __init__(self, recorder: EventRecorder, node: str) -> None:
        self._recorder = recorder
        self._node = node
        self._published: dict[str, tuple[str, str, float]] = {}
        """By uid of a pod or claim, its last event: the error, the pods that have the devices,
        and when that try ended."""

    def keep(self, uids: Collection[PodUid | ClaimUid]) -> None:
        """Keep these uids and forget all others."""
        self._published = {uid: event for uid, event in self._published.items() if uid in uids}

    def not_prepared(self, pod: NodePod, claim: Owner, failure: Failure, users: Mapping[str, Owner]) -> None:
        """Report on the pod and the claim why the claim is not prepared.

        It is called repeatedly while the pod waits, and each try is reported once. Kubelet lists a
        pod a moment after it has its devices, so the same error is reported once more when its
        users become known, and not when they disappear.

        Shapes: users — the pods that have a device of the claim, as far as they are known.
        """
        who = "".join(f" ({user} uses {name})" for name, user in sorted(users.items()))
        reason = _CPUS_REFUSED if failure.code.startswith(_OF_CPUS) else _NOT_PREPARED
        for involved in (pod_object(pod.namespace, pod.name, pod.uid), claim_object(claim)):
            earlier_error, earlier_who, earlier_s = self._published.get(involved.uid, ("", "", 0.0))
            is_same = failure.error == earlier_error
            # The pods that had the devices a moment ago are still named, so that a repeat is the
            # same event.
            here = who or (earlier_who if is_same else "")
            if is_same and here == earlier_who and failure.at_s <= earlier_s:
                continue
            self._published[involved.uid] = (failure.error, here, failure.at_s)
            self._warn([involved], reason, f"{failure.error}{_code(failure.code)}{here}", next_step(failure.code))

    def attached(self, entry: ClaimEntry, sandbox: Sandbox, interfaces: Mapping[str, AttachedInterface]) -> None:
        """Report on the pod and the claim that the devices are in the pod, and in which form."""
        names = entry.to_attach or tuple(sorted({device.device for device in entry.devices}))
        shown = ", ".join(_shown(name, interfaces.get(name)) for name in names)
        message = f"node {self._node}: claim {entry.namespace}/{entry.name}: pod {sandbox} has {shown}"
        for involved in _both(entry, sandbox):
            self._recorder.note(involved, _ATTACHED, message, is_warning=False)

    def cpus_differed(self, difference: CpuDifference) -> None:
        """Report to the container's pod, and to the claims and pods whose CPUs it had, that a
        promise was not kept for a while.
        """
        pods = {sandbox.uid: sandbox for sandbox in (difference.sandbox, *difference.sandboxes) if sandbox.uid}
        concerned = [pod_object(sandbox.namespace, sandbox.name, sandbox.uid) for sandbox in pods.values()]
        concerned += map(claim_object, difference.claims)
        self._warn(concerned, _CPUS_SHARED if difference.claims else _CPUS_DIFFERED, str(difference), _WHO_ELSE)

    def attach_failed(self, entry: ClaimEntry, sandbox: Sandbox, refusal: Refusal) -> None:
        """Report on the pod and the claim why the pod does not get the devices.

        Kubelet creates the sandbox again, and the repeats are counted.
        """
        self._refused(entry, sandbox, _NOT_ATTACHED, "not attached to pod", refusal)

    def detach_failed(self, entry: ClaimEntry, sandbox: Sandbox, refusal: Refusal) -> None:
        """Report on the pod and the claim why the devices could not be taken out unchanged.

        No other pod gets them before that is repaired.
        """
        self._refused(entry, sandbox, _NOT_DETACHED, "not taken back from pod", refusal)

    def device_health(
        self, entry: ClaimEntry, pods: Iterable[NodePod], device: str, note: HealthNote, *, is_of_claim: bool = True
    ) -> None:
        """Report to a claim's pods, and with `is_of_claim` to the claim itself, that a device fails
        or is healthy again.
        """
        claim = entry.claim.owner
        where = f"claim {claim.namespace}/{claim.name}: {device}"
        step = _BY_CLAIM
        for pod in pods:
            # A claim made for a pod's resources belongs to that pod alone.
            step = _BY_RESOURCE if pod.resource_claim == entry.name else _BY_CLAIM
            self._tell_health(pod_object(pod.namespace, pod.name, pod.uid), where, note, step)
        if is_of_claim:
            self._tell_health(claim_object(claim), where, note, step)

    def _tell_health(self, involved: Involved, where: str, note: HealthNote, step: str) -> None:
        if note.is_healthy:
            self._recorder.note(involved, _HEALTHY, f"node {self._node}: {where} is well again", is_warning=False)
        else:
            self._warn([involved], _UNHEALTHY, f"{where} is unhealthy: {note.message}{_code(note.code)}", step)

    def _refused(self, entry: ClaimEntry, sandbox: Sandbox, reason: str, what: str, refusal: Refusal) -> None:
        code, text = text_of(refusal)
        message = f"claim {entry.namespace}/{entry.name}: {what} {sandbox}: {text}{_code(code)}"
        self._warn(_both(entry, sandbox), reason, message, next_step(code))

    def _warn(self, involved: Iterable[Involved], reason: str, message: str, step: str) -> None:
        """Queue a warning for each object. The next step comes last and is never truncated."""
        shown = shortened(f"node {self._node}: {message}", _MESSAGE_LIMIT - len(step))
        for each_involved in involved:
            self._recorder.note(each_involved, reason, f"{shown}; {step}", is_warning=True)


def _both(entry: ClaimEntry, sandbox: Sandbox) -> tuple[Involved, Involved]:
    claim = entry.claim
    return pod_object(sandbox.namespace, sandbox.name, sandbox.uid), claim_object(claim.owner)


def _code(code: str) -> str:
    return f" ({code})" if code else ""


def _shown(device: str, interface: AttachedInterface | None) -> str:
    if interface is None:
        return device
    addresses = ", ".join(interface.addresses[:_MAX_ADDRESSES]) + (
        ", ..." if len(interface.addresses) > _MAX_ADDRESSES else ""
    )
    return f"{device} as {interface.name}" + (f" ({addresses})" if addresses else "")
