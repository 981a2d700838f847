"""Keys and what stands at them: odd keys and misplaced values are refused where they are read."""

from __future__ import annotations

import pytest

from topobus.formats.messages.catalogue import INVENTORY, MACHINE, OBJECT
from topobus.formats.messages.codec import decode
from topobus.formats.messages.messages import ApiObject
from topobus.formats.messages.nouns import CLUSTER, to_token
from topobus.values.device import Inventory
from topobus.values.errors import ContractError
from topobus.values.machine import Machine


@pytest.mark.parametrize("key", ["$KV", "a b", "", "a.b", "ü", "x" * 300, "n1/gpu"])
def test_key_is_refused_when_no_name_makes_it(key: str) -> None:
    """A key that no node's name gives is an error, not a node that nobody can ask."""
    with pytest.raises(ContractError):
        MACHINE.parse_key(key)


def test_token_is_refused_when_the_name_is_longer_than_dns_allows() -> None:
    """A name too long for DNS never becomes a subject, which would cost us the connection.

    The message does not repeat it.
    """
    with pytest.raises(ContractError) as caught:
        to_token("x" * 5000)

    assert len(str(caught.value)) < 300
    assert to_token("x" * 253) == "x" * 253
    assert to_token(CLUSTER) == CLUSTER


@pytest.mark.parametrize(
    ("node", "device_class", "is_good"), [("n1", "gpu", True), ("n2", "gpu", False), ("n1", "nic", False)]
)
def test_value_is_refused_when_it_says_that_it_belongs_elsewhere(node: str, device_class: str, is_good: bool) -> None:
    """A value under another node's or class's key counts as garbage."""
    parts = {"node": "n1", "device_class": "gpu"}
    value = Inventory(node=node, device_class=device_class, generation=1, devices=())
    if is_good:
        INVENTORY.check_place(value, parts)
        return
    with pytest.raises(ContractError, match="its key has"):
        INVENTORY.check_place(value, parts)


def test_value_is_taken_when_its_kind_differs_in_case_alone() -> None:
    """Objects have their kind in Kubernetes' spelling, keys in lower case."""
    OBJECT.check_place(
        ApiObject(api_version="v1", kind="Pod", metadata={"name": "a"}),
        {"kind": "pod", "namespace": "default", "name": "a"},
    )


@pytest.mark.parametrize(
    "data",
    [b"[" * 100_000, b'{"a":' * 100_000, b'{"node":"n","x":' + b"[" * 100_000],
    ids=["lists", "objects", "inside"],
)
def test_decode_raises_a_contract_error_when_nesting_is_deeper_than_the_decoder_goes(data: bytes) -> None:
    """Deep nesting is a sender's mistake like any other, never Python's own RecursionError."""
    with pytest.raises(ContractError):
        decode(data, Machine)
