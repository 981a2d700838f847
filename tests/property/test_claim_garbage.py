"""Whatever stands in the store, the controller answers with a reason or leaves it alone.

It never falls over.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from support.laws import examples
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.search import allocate
from topobus.engine.claims import attempts, lifecycle
from topobus.engine.claims.objects import Claim
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.claims.templates import owner_pod_uid, wanted_claims
from topobus.formats.kubernetes.objects import (
    admit,
    ask_deletion,
    metadata_of,
    name_of,
    object_parts,
)
from topobus.formats.kubernetes.pod import pod_request
from topobus.formats.messages.messages import ApiObject
from topobus.values.device import Device, Inventory
from topobus.values.errors import ContractError
from unit.controller.allocation import COMPILER

WORDS = st.sampled_from(
    [
        "name", "uid", "namespace", "annotations", "finalizers", "deletionTimestamp", "ownerReferences", "topobus.dev/attempt", "topobus.dev/attempts",  # noqa: E501
        "devices", "requests", "exactly", "deviceClassName", "gpu.topobus.dev", "selectors", "cel", "expression", "count", "allocationMode", "All",  # noqa: E501
        "constraints", "matchAttribute", "config", "opaque", "driver", "parameters", "conditions", "allocation", "results", "consumedCapacity",  # noqa: E501
        "containers", "resources", "limits", "cpu", "resourceClaims", "x", "", "1Ki", "resource.kubernetes.io/pcieRoot", "request", "pool", "shareID",  # noqa: E501
        "firstAvailable", "tolerations", "capacity", "kind", "Pod", "controller", "{", "true",
    ]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=25,
)
OBJECTS = st.builds(
    ApiObject,
    api_version=st.just("resource.k8s.io/v1"),
    kind=st.sampled_from(["ResourceClaim", "DeviceClass", "ResourceSlice", "Pod", "ResourceClaimTemplate"]),
    metadata=st.dictionaries(WORDS, JSON, max_size=5),
    spec=st.dictionaries(WORDS, JSON, max_size=4),
    status=st.dictionaries(WORDS, JSON, max_size=4),
)


def _may_refuse(action: Any, *arguments: Any) -> Any:
    try:
        return action(*arguments)
    except ContractError:
        return None


@settings(deadline=None, max_examples=examples(400))
@given(OBJECTS)
def test_objects_are_read_or_refused_whatever_they_are(drawn: ApiObject) -> None:
    """Any object can be named, told a condition and deleted.

    Reading it gives a value or a ContractError.
    """
    name_of(drawn)
    object_parts(drawn)
    metadata_of(drawn)
    lifecycle.owner_of(drawn)
    attempts.number_of(drawn)
    lifecycle.is_finished(lifecycle.without_protection(drawn))
    api_object = lifecycle.with_condition(drawn, is_true=False, reason="R", message="m", now="t")
    assert lifecycle.with_condition(api_object, is_true=False, reason="R", message="m", now="u") is api_object
    _may_refuse(lambda: ask_deletion(drawn, now="t"))
    _may_refuse(lambda: admit(drawn, uid="u", now="t"))
    for action in (
        lifecycle.status_of,
        attempts.attempt_of,
        attempts.allocation_of,
        owner_pod_uid,
        wanted_claims,
        lambda pod: pod_request(pod, uid="u"),
    ):
        _may_refuse(action, drawn)


@settings(deadline=None, max_examples=examples(400))
@given(st.lists(OBJECTS, max_size=4), st.dictionaries(WORDS, JSON, max_size=4))
def test_world_answers_whatever_is_stored(stored: list[ApiObject], spec: dict[str, Any]) -> None:
    """A world full of garbage still gives every readable claim an outcome."""
    state = StandaloneState()
    state.put_inventory(
        Inventory(node="n1", device_class="gpu", generation=1, devices=(Device(name="gpu-0", device_class="gpu"),))
    )
    for index, api_object in enumerate(stored):
        _may_refuse(state.put_object, ObjectKey(api_object.kind.lower(), "default", f"o{index}"), Stored(1, api_object))
    own_api_object = ApiObject(
        api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata={"name": "mine", "uid": "u"}, spec=spec
    )

    for claim in (own_api_object, *(api_object for api_object in stored if api_object.kind == "ResourceClaim")):
        read = _may_refuse(lifecycle.read_claim, claim)
        if read is not None:
            for node in state.nodes_for(Claim(claim)):
                allocate(state.input_for(node, [(Claim(claim), read)]), COMPILER, step_budget=500)
