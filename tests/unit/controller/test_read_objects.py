"""Claims and pods are read once a version, and a part that nobody can read is set aside alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from support.cluster_home import claim, pod
from topobus.controller.cluster.gated_pod_queue import GatedPodQueue
from topobus.controller.state.cluster.api_server_state import ApiServerState
from topobus.engine.claims import lifecycle, objects, reservations
from topobus.engine.claims.objects import Claim, Pod
from topobus.engine.claims.stored import Stored
from topobus.engine.scheduling.decisions import PodPlan, pre_filter
from topobus.engine.scheduling.pod_alignment import aligned_pod_request
from topobus.formats.messages.messages import ApiObject
from topobus.testing.clock import ManualClock
from topobus.values.errors import ContractError


def _claim(*, spec: Any = None, status: Any = None, annotations: dict[str, str] | None = None) -> ApiObject:
    devices = {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu.topobus.dev"}}]}}
    metadata = {"name": "c", "namespace": "ns", "uid": "u", "annotations": annotations or {}}
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata=metadata,
        spec=spec or devices,
        status=status or {},
    )


def test_stored_claim_is_read_once_when_many_ask() -> None:
    """Whoever asks for a part of a stored claim gets the very value that the first one got."""
    stored = Stored(3, _claim())

    assert stored.claim.spec is stored.claim.spec
    assert stored.metadata is stored.claim.metadata
    assert (stored.uid, stored.shown, str(stored.claim.owner)) == ("u", "ResourceClaim ns/c", "claim ns/c")


def test_claim_names_itself_and_its_other_parts_go_on_when_one_part_is_unreadable() -> None:
    """A status that nobody can read raises an error with the claim's name each time.

    The spec is answered.
    """
    claim = Claim(_claim(status={"allocation": 5}))

    for _ in range(2):
        with pytest.raises(ContractError, match="ResourceClaim ns/c: status"):
            _ = claim.allocation

    assert claim.spec.devices.requests[0].name == "r"
    assert claim.attempt is None


def test_claim_refuses_an_attempt_when_somebody_wrote_something_else_there() -> None:
    """A note that is none is an error that names the annotation, not an absent note: an absent one
    would let the claim be allocated twice.
    """
    claim = Claim(_claim(annotations={"topobus.dev/attempt": "{"}))

    with pytest.raises(ContractError, match=r"annotation topobus\.dev/attempt"):
        _ = claim.attempt


def test_pod_tells_its_node_and_end_when_its_spec_is_unreadable() -> None:
    """What a pod's claims are cannot be told, where it is can: it is let go of like any other."""
    metadata = {"name": "p", "uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"}
    pod = Pod(ApiObject(api_version="v1", kind="Pod", metadata=metadata, spec={"nodeName": "n1", "resourceClaims": 5}))

    with pytest.raises(ContractError, match="Pod default/p: spec"):
        _ = pod.uses

    assert (pod.node, pod.is_deleting, pod.is_bound) == ("n1", True, False)


def test_cluster_home_reads_claim_and_pod_once_when_many_rounds_look_at_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an informer brought is kept with what was read in it: rounds over the same versions
    parse nothing again.
    """
    state, reads = ApiServerState(), Counter[str]()
    queue = GatedPodQueue(ManualClock(), state, retry_s=1.0)
    state.put("ResourceClaim", "v1", claim("c", uid="u", resourceVersion="3"))
    gated = pod("p", "c")
    gated["metadata"] |= {"uid": "p", "resourceVersion": "4"}
    state.put("Pod", "v1", gated)
    for module, name in [
        (lifecycle, "read_claim"),
        (lifecycle, "status_of"),
        (reservations, "consumers_of"),
        (reservations, "claim_uses"),
        (objects, "metadata_of"),
        (objects, "pod_request"),
    ]:
        monkeypatch.setattr(module, name, _counted(getattr(module, name), name, reads))

    for _ in range(3):
        # A resync tells all again, and our own writes come by the watch as well.
        state.put("ResourceClaim", "v1", claim("c", uid="u", resourceVersion="3"))
        state.put("Pod", "v1", gated)
        [key] = queue.pending_pods()
        queue.versions_of(key)
        plan = pre_filter(state.pods[key].pod, lambda name: state.claims["default", name].claim, has_own_notes=False)
        assert isinstance(plan, PodPlan)
        assert aligned_pod_request(state.pods[key].pod, {"c0": "claim default/c"}) is None
        assert [pod_claim.name for pod_claim in plan.pending] == ["c"]

    # The pod was read as it came; of the claim only what holds devices was.
    assert reads == {"read_claim": 1, "status_of": 1, "consumers_of": 1, "metadata_of": 1, "pod_request": 1}


def _counted(reader: Any, name: str, reads: Counter[str]) -> Any:
    def read(api_object: ApiObject, **options: Any) -> Any:
        reads[name] += 1
        return reader(api_object, **options)

    return read
