"""A claim in protobuf: our entries of one class are changed, and every other byte stays, whatever the
claim's author wrote.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topobus.formats.kubernetes.claim_wire import claim_uid, with_device_statuses
from topobus.values.errors import ContractError

OURS, OTHER = "topobus.dev", "gpu.example.com"
READY = {
    "type": "Ready",
    "status": "True",
    "reason": "Attached",
    "message": "",
    "lastTransitionTime": "2026-11-23T04:00:00Z",
}
ENTRY = {
    "driver": OURS,
    "pool": "n1",
    "device": "nic-0",
    "conditions": [{**READY, "observedGeneration": 3}],
    "data": {"mtu": 1400},
    "networkData": {"interfaceName": "net1", "hardwareAddress": "02:00:00:00:00:01", "ips": ["10.1.2.3/24"]},
}
# With spaces and keys in an order of its author's: what a server writes anew in a patch.
PARAMETERS = b'{"b": 1, "a":  {"z": 1} }'


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field of up to 16383 bytes."""
    size = bytes([len(payload)]) if len(payload) < 128 else bytes([len(payload) & 0x7F | 0x80, len(payload) >> 7])
    return bytes([number << 3 | 2]) + size + payload


def text(number: int, value: str) -> bytes:
    """A field of text."""
    return field(number, value.encode())


def claim(*devices: bytes) -> bytes:
    """A claim as an API server gives it: the numbers of generated.proto."""
    metadata = field(1, text(1, "c") + text(3, "default") + text(5, "u-1") + text(6, "42"))
    allocation = field(1, field(1, field(2, field(2, text(1, OURS) + field(2, field(1, PARAMETERS))))))
    status = field(3, allocation + b"".join(field(4, device) for device in devices))
    unknown = (
        field(1, text(1, "resource.k8s.io/v1") + text(2, "ResourceClaim"))
        + field(2, metadata + field(2, b"") + status)
        + text(4, "x")
    )
    return b"k8s\x00" + unknown


def entry(driver: str, device: str, *conditions: str) -> bytes:
    """An entry as somebody wrote it before."""
    return (
        text(1, driver)
        + text(2, "n1")
        + text(3, device)
        + b"".join(field(4, text(1, condition)) for condition in conditions)
    )


def test_entry_is_written_in_the_apis_numbers() -> None:
    """Driver 1, pool 2, device 3, conditions 4, data 5, networkData 6, as in generated.proto.

    The uid is read.
    """
    condition = (
        text(1, "Ready")
        + text(2, "True")
        + b"\x18\x03"
        + field(4, b"\x08\xc0\xf4\x8e\xd8\x06")
        + text(5, "Attached")
        + text(6, "")
    )
    network = text(1, "net1") + text(2, "10.1.2.3/24") + text(3, "02:00:00:00:00:01")
    written = entry(OURS, "nic-0") + field(4, condition) + field(5, field(1, b'{"mtu": 1400}')) + field(6, network)

    assert with_device_statuses(claim(), "nic", [ENTRY]) == claim(written)
    assert claim_uid(claim()) == "u-1"


def test_others_entries_and_the_allocation_keep_their_bytes() -> None:
    """Another driver's entry, that of another class of ours, and the parameters with their spaces are
    what they were.
    """
    other, gpu = entry(OTHER, "nic-0", "Ready"), entry(OURS, "gpu-0", "Ready")

    changed = with_device_statuses(claim(other, gpu, entry(OURS, "nic-9", "Ready")), "nic", [ENTRY])

    assert field(4, other) + field(4, gpu) in changed
    assert PARAMETERS in changed
    assert b"nic-9" not in changed


def test_classes_replace_their_own_entries_alone() -> None:
    """A claim of a NIC and a GPU gets two writes in any order: neither takes the other's entry away."""
    gpu = {**ENTRY, "device": "gpu-0"}

    both = with_device_statuses(with_device_statuses(claim(), "nic", [ENTRY]), "gpu", [gpu])

    assert (both.count(b"nic-0"), both.count(b"gpu-0")) == (1, 1)
    assert with_device_statuses(both, "gpu", []) == with_device_statuses(claim(), "nic", [ENTRY])
    assert with_device_statuses(both, "nic", []) == with_device_statuses(claim(), "gpu", [gpu])


def test_shapes_are_a_class_of_their_own() -> None:
    """The entry of a shape stays when those of its parts' classes are replaced, and goes alone."""
    shape = {**ENTRY, "device": "shape-gpu-nic-0000-18-00-0"}

    both = with_device_statuses(with_device_statuses(claim(), "nic", [ENTRY]), "shape", [shape])

    assert with_device_statuses(both, "nic", []) == with_device_statuses(claim(), "shape", [shape])
    assert with_device_statuses(both, "shape", []) == with_device_statuses(claim(), "nic", [ENTRY])


def test_health_goes_with_the_entry() -> None:
    """It is our condition like Ready, whichever of the two is written next."""
    sick = with_device_statuses(claim(), "nic", [{**ENTRY, "conditions": [READY, {**READY, "type": "Healthy"}]}])

    assert with_device_statuses(sick, "nic", []) == claim()
    assert with_device_statuses(sick, "nic", [ENTRY]) == with_device_statuses(claim(), "nic", [ENTRY])


def test_conditions_of_others_stay_and_keep_their_entry() -> None:
    """Somebody else may watch our device: its condition stays when ours
    comes, and when ours goes.
    """
    watched = claim(entry(OURS, "nic-0", "Ready", "Watched"))

    there = with_device_statuses(watched, "nic", [ENTRY])
    gone = with_device_statuses(there, "nic", [])

    assert (there.count(b"Ready"), there.count(b"Watched")) == (1, 1)
    assert gone == claim(entry(OURS, "nic-0", "Watched"))
    assert with_device_statuses(claim(entry(OURS, "nic-0", "Ready")), "nic", []) == claim()


def test_shares_of_a_device_are_entries_of_their_own() -> None:
    """The key is pool, device and share."""
    changed = with_device_statuses(claim(), "nic", [{**ENTRY, "shareID": "a"}, {**ENTRY, "shareID": "b"}])

    assert (changed.count(text(7, "a")), changed.count(text(7, "b"))) == (1, 1)


@pytest.mark.parametrize("body", [b"", b"{}", b"k8s\x00\x12\x7f", b"k8s\x00\x13", b"k8s\x00" + b"\xff" * 20])
def test_what_is_no_claim_is_refused(body: bytes) -> None:
    """JSON, and what is cut off."""
    with pytest.raises(ContractError):
        with_device_statuses(body, "nic", [ENTRY])


@given(st.binary(max_size=200))
def test_any_bytes_are_a_claim_or_refused(data: bytes) -> None:
    """Nothing else can happen: no loop without end, no other error."""
    try:
        with_device_statuses(b"k8s\x00" + data, "nic", [ENTRY])
    except ContractError:
        return
