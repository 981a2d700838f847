"""Whatever stands in a claim, the gateway reads it or refuses it with a reason.

It never falls over, and never prepares what is not there.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from topobus.formats.messages.messages import ApiObject
from topobus.gateway.claims.rules.claim_allocation import ClaimAllocation, allocation_of, is_allocated_here
from topobus.gateway.cluster.rules.api_versions import from_served, to_served
from topobus.values.outcome import Refusal

WORDS = st.sampled_from(
    [
        "allocation", "devices", "results", "config", "request", "driver", "pool", "device", "adminAccess", "shareID", "opaque", "parameters",  # noqa: E501
        "requests", "source", "FromClass", "topobus.dev", "gpu.topobus.dev", "nic.topobus.dev/v1", "gpu.example.com", "n1", "n1/cpu", "n2", "gpu-0", "nic-0", "r", "r/s", "",  # noqa: E501
    ]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=20,
)
RESULT = st.fixed_dictionaries(
    {"request": WORDS, "driver": WORDS, "pool": WORDS, "device": WORDS},
    optional={"adminAccess": JSON, "shareID": JSON, "more": JSON},
)
CONFIG = st.fixed_dictionaries(
    {"opaque": st.fixed_dictionaries({"driver": WORDS, "parameters": JSON}) | JSON},
    optional={"requests": JSON, "source": WORDS},
)
STATUS = st.dictionaries(WORDS, JSON, max_size=3) | st.fixed_dictionaries(
    {
        "allocation": st.fixed_dictionaries(
            {
                "devices": st.fixed_dictionaries(
                    {"results": st.lists(RESULT | JSON, max_size=4)},
                    optional={"config": st.lists(CONFIG | JSON, max_size=3) | JSON},
                )
            }
        )
    }
)


@given(STATUS)
def test_claim_is_read_or_refused_whatever_it_holds(status: dict[str, Any]) -> None:
    """What is prepared stands in the allocation, on this node and for our driver.

    What is held by share is held; each refusal has a text.
    """
    claim = ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata={"uid": "u"}, status=status)

    allocation = allocation_of(claim, namespace="default", name="c", uid="u", node="n1")

    is_allocated_here(claim, "u", "n1")
    if isinstance(allocation, Refusal):
        assert allocation.reasons[0].message
        return
    assert isinstance(allocation, ClaimAllocation)
    given_out = {
        (result["device"], result["pool"])
        for result in status["allocation"]["devices"]["results"]
        if result["driver"] == "topobus.dev"
    }
    assert {(device.device, device.pool) for device in allocation.devices} == given_out
    assert {pool for _, pool in given_out} <= {"n1", "n1/cpu"}
    assert all(set(names) <= set(allocation.held[device_class]) for device_class, names in allocation.by_share.items())
    assert allocation.config.keys() <= set(allocation.names)


@given(
    st.dictionaries(WORDS, JSON, max_size=3), st.sampled_from(["v1", "v1beta2", "v1beta1"]), st.lists(JSON, max_size=3)
)
def test_slice_of_any_shape_is_carried_between_versions(spec: dict[str, Any], version: str, devices: list[Any]) -> None:
    """Garbage stays garbage for its reader to refuse.

    Carrying it over never fails, and changes nothing of what is no device.
    """
    body = {"spec": {**spec, "devices": devices}, "metadata": {"name": "s"}}

    shown = from_served("ResourceSlice", body, version)
    sent = to_served("ResourceSlice", body, version)

    assert shown["metadata"] == sent["metadata"] == {"name": "s"}
    assert {key: value for key, value in shown["spec"].items() if key != "devices"} == {
        key: value for key, value in spec.items() if key != "devices"
    }


@given(
    st.lists(st.fixed_dictionaries({"name": WORDS, "attributes": st.dictionaries(WORDS, JSON, max_size=2)}), max_size=3)
)
def test_slice_comes_back_as_it_was_sent_when_a_server_is_older(devices: list[dict[str, Any]]) -> None:
    """What v1beta1 was given, read back, is what v1 would hold: no
    difference is seen that is none.
    """
    body = {"apiVersion": "resource.k8s.io/v1", "spec": {"driver": "d", "devices": devices}}

    for version in ("v1", "v1beta2", "v1beta1"):
        assert from_served("ResourceSlice", to_served("ResourceSlice", body, version), version)["spec"] == body["spec"]
