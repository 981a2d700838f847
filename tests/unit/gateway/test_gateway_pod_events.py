"""Events of pods and claims: each thing that is said once, its repeats counted, on both, and with
what to do about it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from msgspec import structs

from topobus.gateway.claims.attempts import Failure
from topobus.gateway.claims.rules.claim_allocation import AllocatedDevice
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.cluster.event_recorder import EventRecorder, Involved
from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster
from topobus.gateway.cluster.objects import Rejected
from topobus.gateway.cluster.pod_events import PodEvents
from topobus.gateway.cluster.rules.waiting import NodePod
from topobus.gateway.containers.rules.cpusets import CpuDifference
from topobus.testing.clock import LoopClock
from topobus.values.errors import PeerUnavailable
from topobus.values.idset import CpuSet
from topobus.values.names import ClaimUid, PodUid, is_dns_subdomain
from topobus.values.outcome import Reason, Refusal
from topobus.values.request import Owner, OwnerKind
from topobus.values.sandbox import AttachedInterface, Sandbox

pytestmark = pytest.mark.virtual_time

LOSER = NodePod(uid=PodUid("u-loser"), namespace="default", name="loser", claims=("c",))
CLAIM = Owner(kind=OwnerKind.CLAIM, namespace="default", name="c", uid="u-c")
USER = Owner(kind=OwnerKind.POD, namespace="default", name="winner", uid="")
POD = Involved(api_version="v1", kind="Pod", namespace="default", name="p", uid="u-p")
SANDBOX = Sandbox(id="s", uid="u-p", namespace="default", name="p")
ENTRY = ClaimEntry(
    namespace="default",
    name="c",
    uid=ClaimUid("u-c"),
    device_class="nic",
    attempt="a",
    devices=(
        AllocatedDevice(request="r", pool="n1", device="nic-0"),
        AllocatedDevice(request="r", pool="n1", device="nic-1"),
    ),
    is_prepared=True,
)


class EventSink:
    """An API server's events, by name; `answers` first."""

    def __init__(self) -> None:
        self.events: dict[str, dict[str, Any]] = {}
        self.writes: list[tuple[float, str]] = []
        self.answers: list[Rejected | PeerUnavailable] = []

    async def create_event(self, namespace: str, event: Mapping[str, Any]) -> Rejected | None:
        """Keep an event."""
        self._write("create")
        name = event["metadata"]["name"]
        if name in self.events:
            return Rejected(code=409, message="already exists")
        answer = self._answer()
        if answer is None:
            self.events[name] = dict(event)
        return answer

    async def patch_event(self, namespace: str, name: str, changes: Mapping[str, Any]) -> Rejected | None:
        """Change an event."""
        self._write("patch")
        if name not in self.events:
            return Rejected(code=404, message="not found")
        self.events[name] |= changes
        return self._answer()

    def said_of(self, name: str) -> list[tuple[str, str, int]]:
        """What was said of an object: reason, message, how often."""
        return [
            (event["reason"], event["message"], event["count"])
            for event in self.events.values()
            if event["involvedObject"]["name"] == name
        ]

    def _write(self, verb: str) -> None:
        self.writes.append((asyncio.get_running_loop().time(), verb))

    def _answer(self) -> Rejected | None:
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, PeerUnavailable):
            raise answer
        return answer


@asynccontextmanager
async def recording(sink: EventSink) -> AsyncIterator[EventRecorder]:
    """A recorder that writes."""
    recorder = EventRecorder(cast(KubernetesCluster, sink), LoopClock(), "n1")
    task = asyncio.create_task(recorder.run())
    try:
        yield recorder
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def refusal(code: str, message: str) -> Refusal:
    """A refusal for one reason."""
    return Refusal(reasons=(Reason(code=code, message=message),))


async def test_error_is_told_again_when_it_becomes_known_who_has_the_device() -> None:
    """Kubelet lists a pod a moment after it has its devices: whoever waits hears its name as soon
    as it is there, once.
    """
    sink = EventSink()
    async with recording(sink) as recorder:
        events = PodEvents(recorder, "n1")
        for users in ({}, {}, {"gpu-0": USER}, {"gpu-0": USER}, {}):
            events.not_prepared(LOSER, CLAIM, Failure(error="held", at_s=1.0), users)
        await asyncio.sleep(100)

    tail = "; tried again as soon as that is over"
    wanted = [
        ("DevicesNotPrepared", f"node n1: held{tail}", 1),
        ("DevicesNotPrepared", f"node n1: held (pod default/winner uses gpu-0){tail}", 1),
    ]
    assert (sink.said_of("loser"), sink.said_of("c")) == (wanted, wanted)


async def test_each_try_counts_and_is_no_event_of_its_own() -> None:
    """Kubelet and the gateway try again for hours: one event, counted up once a minute."""
    sink = EventSink()
    async with recording(sink) as recorder:
        events = PodEvents(recorder, "n1")
        for at_s in range(100):
            events.not_prepared(
                LOSER, CLAIM, Failure(error="the pool is empty", at_s=at_s + 1.0, code="shared-pool-empty"), {}
            )
            await asyncio.sleep(2)
        await asyncio.sleep(100)

    message = "node n1: the pool is empty (shared-pool-empty); ask for fewer CPUs: the other containers need one"
    assert sink.said_of("loser") == [("CpusRefused", message, 100)]
    assert len(sink.writes) == 2 * 5


async def test_both_hear_what_happens_in_a_sandbox() -> None:
    """Attached as what, not attached and not taken back with the code and the next step.

    On the pod and on the claim.
    """
    sink = EventSink()
    net1 = AttachedInterface(name="net1", addresses=tuple(f"10.0.0.{index}/24" for index in range(6)))
    async with recording(sink) as recorder:
        events = PodEvents(recorder, "n1")
        events.attached(ENTRY, SANDBOX, {"nic-0": net1})
        events.attach_failed(ENTRY, SANDBOX, refusal("interface-config-invalid", "mtu is 70000, wanted at most 9000"))
        events.detach_failed(ENTRY, SANDBOX, refusal("link-busy", "net1 is still in the pod"))
        await asyncio.sleep(1)

    addresses = "10.0.0.0/24, 10.0.0.1/24, 10.0.0.2/24, 10.0.0.3/24, ..."
    assert sink.said_of("p") == [
        ("DevicesAttached", f"node n1: claim default/c: pod default/p has nic-0 as net1 ({addresses}), nic-1", 1),
        (
            "DevicesNotAttached",
            "node n1: claim default/c: not attached to pod default/p: mtu is 70000, wanted at most 9000 "
            "(interface-config-invalid); "
            "correct the configuration of the claim or its class, then create claim and pod again",
            1,
        ),
        (
            "DevicesNotDetached",
            "node n1: claim default/c: not taken back from pod default/p: net1 is still in the pod "
            "(link-busy); tried again as soon as that is over",
            1,
        ),
    ]
    assert sink.said_of("c") == sink.said_of("p")
    assert [event["type"] for event in sink.events.values()] == ["Normal", "Normal", *["Warning"] * 4]


async def test_all_hear_when_a_container_was_on_a_claims_cpus() -> None:
    """The pod that had them, the pod whose they are and its claim get the same event.

    What concerns nobody else is told to the container's pod alone.
    """
    owner = Sandbox(id="t", uid="u-t", namespace="default", name="owner")
    cpus = CpuDifference(sandbox=SANDBOX, container="main", has=CpuSet(0, 1), wanted=CpuSet(1))
    sink = EventSink()
    async with recording(sink) as recorder:
        events = PodEvents(recorder, "n1")
        events.cpus_differed(structs.replace(cpus, claims=(CLAIM,), sandboxes=(owner,), shared=CpuSet(0)))
        events.cpus_differed(structs.replace(cpus, error="no answer"))
        await asyncio.sleep(1)

    shared = [event for event in sink.events.values() if event["reason"] == "CpusShared"]
    (other,) = [event for event in sink.events.values() if event["reason"] == "CpusDiffered"]
    assert sorted(event["involvedObject"]["uid"] for event in shared) == ["u-c", "u-p", "u-t"]
    assert {event["message"].partition(";")[0] for event in shared} == {
        "node n1: container main of pod default/p was found on CPUs 0-1, wanted 1: 0 belong to claim default/c alone"
    }
    assert other["involvedObject"]["uid"] == "u-p"
    assert "not corrected yet: no answer" in other["message"]


async def test_long_error_keeps_its_next_step() -> None:
    """A message that the API server would refuse is cut before the words that help."""
    sink = EventSink()
    async with recording(sink) as recorder:
        PodEvents(recorder, "n1").attach_failed(ENTRY, SANDBOX, refusal("x", "ä" * 5000))
        await asyncio.sleep(1)

    ((_, message, _),) = sink.said_of("p")
    assert len(message.encode()) <= 1024
    assert message.endswith("...; tried again as soon as that is over")


@pytest.mark.parametrize("name", [("a" * 49 + ".") * 4 + "b", ("a" * 49 + ".") * 3 + "a" * 49 + "-b"])
async def test_event_of_a_long_name_has_a_name_that_the_server_takes(name: str) -> None:
    """A name is cut so that its last part ends with a letter or a digit.

    Else no event of this object would ever be written.
    """
    sink = EventSink()
    async with recording(sink) as recorder:
        recorder.note(
            Involved(api_version="v1", kind="Pod", namespace="default", name=name, uid="u"),
            "Other",
            "one",
            is_warning=True,
        )
        await asyncio.sleep(1)

    assert [is_dns_subdomain(event_name) for event_name in sink.events] == [True]


async def test_object_has_a_share_of_events() -> None:
    """A thousand different things said of one object: ten at once, then one a minute.

    Another object has its own share.
    """
    sink = EventSink()
    async with recording(sink) as recorder:
        for index in range(1000):
            recorder.note(POD, "Flood", f"message {index}", is_warning=True)
        recorder.note(
            Involved(api_version="v1", kind="Pod", namespace="default", name="q", uid="u-q"),
            "Other",
            "one",
            is_warning=True,
        )
        await asyncio.sleep(119)
        for index in range(1000):
            recorder.note(POD, "Flood", f"later {index}", is_warning=True)
        await asyncio.sleep(1)

    assert (len(sink.said_of("p")), len(sink.said_of("q"))) == (11, 1)


async def test_event_of_an_earlier_process_is_no_second_one_and_no_trouble() -> None:
    """The name follows from what is said.

    What the server has forgotten is made anew when it is said again.
    """
    sink = EventSink()
    for _ in range(2):
        async with recording(sink) as recorder:
            recorder.note(POD, "R", "m", is_warning=True)
            await asyncio.sleep(1)
            forgotten = sink.events.copy()
            sink.events.clear()
            recorder.note(POD, "R", "m", is_warning=True)
            await asyncio.sleep(100)

    assert len(forgotten) == 1
    assert [event[:2] for event in sink.said_of("p")] == [("R", "m")]


@pytest.mark.parametrize(
    "answer", [PeerUnavailable("away", retry_after_s=0.0), Rejected(code=403, message="forbidden")]
)
async def test_event_that_cannot_be_written_is_dropped_and_the_next_one_is_not(
    answer: Rejected | PeerUnavailable,
) -> None:
    """Nothing depends on an event: trouble with one delays no other, and it is not tried again by
    itself.
    """
    sink = EventSink()
    sink.answers = [answer]
    async with recording(sink) as recorder:
        recorder.note(POD, "R", "first", is_warning=True)
        recorder.note(POD, "R", "second", is_warning=True)
        await asyncio.sleep(1000)

    assert sink.said_of("p") == [("R", "second", 1)]


async def test_waiting_events_are_bounded_while_the_server_is_away() -> None:
    """Nothing is written and nothing grows: what comes when too many wait is dropped."""
    sink = EventSink()
    recorder = EventRecorder(cast(KubernetesCluster, sink), LoopClock(), "n1")
    for index in range(2000):
        recorder.note(
            Involved(api_version="v1", kind="Pod", namespace="d", name=f"p{index}", uid=f"u{index}"),
            "R",
            "m",
            is_warning=True,
        )

    task = asyncio.create_task(recorder.run())
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert len(sink.events) == 500
