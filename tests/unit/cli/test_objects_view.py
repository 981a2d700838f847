"""Kinds as they are typed, tables and descriptions of objects: what
people read, from values alone.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec import structs

from support.printed import printed
from topobus.cli.exits import UsageError
from topobus.cli.objects.kinds import kind_of, read_target
from topobus.cli.render.description import describe, view
from topobus.cli.render.tables import age, object_listing, state_of
from topobus.formats.messages.messages import ApiObject, DecisionEvent
from topobus.values.device import Device, Inventory
from topobus.values.idset import NodeSet
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.outcome import Reason, Refusal
from topobus.values.request import Owner, OwnerKind

NOW = datetime(2026, 1, 1, 0, 5, tzinfo=UTC)


def _claim(**status: Any) -> ApiObject:
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={
            "name": "fast",
            "namespace": "default",
            "uid": "u-1",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "generation": 1,
        },
        spec={
            "devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.topobus.dev", "count": 2}}]}
        },
        status=status,
    )


def _condition(status: str, reason: str, message: str) -> dict[str, Any]:
    return {"type": "Allocated", "status": status, "reason": reason, "message": message, "observedGeneration": 1}


ALLOCATED = _claim(
    allocation={"devices": {"results": [{"request": "gpu", "driver": "topobus.dev", "pool": "n1", "device": "gpu-0"}]}},
    reservedFor=[{"resource": "pods", "name": "trainer", "uid": "p"}],
    conditions=[_condition("True", "Allocated", "1 device allocated")],
)


@pytest.mark.parametrize(
    ("words", "kinds", "names"),
    [
        (("claims",), ("ResourceClaim",), ()),
        (("claim", "a", "b"), ("ResourceClaim",), ("a", "b")),
        (("resourceclaim/a", "claim/b"), ("ResourceClaim",), ("a", "b")),
        (("pods,deviceclasses",), ("Pod", "DeviceClass"), ()),
        (("po", "x"), ("Pod",), ("x",)),
    ],
)
def test_target_is_read_as_kubectl_reads_it(
    words: tuple[str, ...], kinds: tuple[str, ...], names: tuple[str, ...]
) -> None:
    """KIND, KIND NAME, KIND/NAME and KIND,KIND mean what kubectl's users expect."""
    assert read_target(words, verb="get") == (kinds, names)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "wanted what to get"),
        (("resourceclams",), 'did you mean "resourceclaims"'),
        (("pods,claims", "a"), "a name needs one kind"),
        (("pod/a", "claim/b"), "one kind"),
        (("pod/",), "KIND/NAME"),
        (("nodeallocationstates", "n1"), "no stored object but a view"),
    ],
)
def test_target_is_refused_with_a_way_on_when_it_cannot_be_meant(words: tuple[str, ...], said: str) -> None:
    """What cannot be read is named, with what could be written."""
    with pytest.raises(UsageError) as raised:
        read_target(words, verb="get")

    assert said in str(raised.value)
    assert raised.value.next_step


def test_kind_is_found_when_the_group_is_written_out() -> None:
    """Names as `kubectl api-resources` prints them are taken, too."""
    assert kind_of("resourceclaims.v1.resource.k8s.io") == "ResourceClaim"


def test_state_tells_reservation_and_reason_when_there_is_one() -> None:
    """An allocated claim says whether it is reserved, a waiting one why."""
    assert state_of(ALLOCATED).plain == "allocated,reserved"
    assert state_of(_claim(conditions=[_condition("False", "DoesNotFit", "no")])).plain == "pending (DoesNotFit)"
    assert state_of(_claim(conditions=[_condition("False", "Malformed", "bad")])).plain == "Malformed"


def test_table_has_node_devices_and_users_when_claims_are_listed() -> None:
    """One line says all that matters of a claim."""
    shown = printed(object_listing("ResourceClaim", [ALLOCATED], now=NOW), 160)

    assert [word in shown for word in ("fast", "n1", "gpu: gpu-0", "trainer", "5m")] == [True] * 5
    assert age("not a time", NOW) == "-"


def test_description_has_health_numa_and_ledger_when_the_claim_is_allocated() -> None:
    """Each device is shown with its NUMA node and health, and what the ledger holds for it."""
    device = Device(name="gpu-0", device_class="gpu", numa_nodes=NodeSet(1), pcie_root="pci0000:16")
    owner = Owner(kind=OwnerKind.CLAIM, name="fast", uid="u-1")
    held = Allocation(owner=owner, holdings=(Holding(devices={"gpu": ("gpu-0",)}),), is_prepared=True)

    description = describe(
        ALLOCATED,
        {},
        [Inventory(node="n1", device_class="gpu", generation=1, devices=(device,))],
        [Ledger(node="n1", allocations={owner.key: held})],
        [],
    )
    shown = printed(view(ALLOCATED, description), 160)

    assert (description.devices[0].numa_nodes, description.devices[0].health, description.devices[0].below) == (
        "1",
        "healthy",
        "pci0000:16",
    )
    assert "held on n1: 1 gpu; prepared for a container" in shown
    assert "reserved for: trainer" in shown


def test_description_hangs_what_is_folded_below_its_line_when_the_terminal_is_narrow() -> None:
    """A long selector and a long condition stay below the request and the condition that they
    belong to.
    """
    expression = " && ".join(f"device.attributes['topobus.dev'].name{number} == 'x'" for number in range(9))
    exactly = {"deviceClassName": "gpu.topobus.dev", "selectors": [{"cel": {"expression": expression}}]}
    condition = _condition("True", "Allocated", "device allocated " * 20)
    claim = structs.replace(
        _claim(conditions=[condition]), spec={"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
    )

    lines = printed(view(claim, describe(claim, {}, [], [], [])), 80).splitlines()

    selector = [line for line in lines if "topobus.dev']" in line or "==" in line]
    message = [line for line in lines if "device allocated" in line]
    assert len(selector) > 3
    assert len(message) > 3
    assert [line for line in selector if not line.startswith("    ")] == []
    assert [line for line in message if not line.startswith("  ")] == []


def test_description_has_reasons_with_codes_when_an_event_tells_them() -> None:
    """The newest event that says what the condition says gives the reasons, advice included.

    Another claim's events do not count.
    """
    reasons = (
        Reason(code="too-few-devices", message="node n1: too few"),
        Reason(code="would-fit", message="would fit with 1"),
    )
    own_owner, other = (Owner(kind=OwnerKind.CLAIM, name="fast", uid=uid) for uid in ("u-1", "u-2"))
    events = [
        DecisionEvent(
            id=f"e-{owner.uid}",
            verb="allocate",
            node="_",
            op_id="o",
            time="",
            owner=owner,
            outcome=Refusal(reasons=reasons),
        )
        for owner in (own_owner, other)
    ]
    waiting = _claim(conditions=[_condition("False", "DoesNotFit", "node n1: too few")])

    description = describe(waiting, {}, [], [], events)

    assert [reason.code for reason in description.reasons] == ["too-few-devices", "would-fit"]
    assert [decision.id for decision in description.decisions] == ["e-u-1"]
    assert "would fit with 1" in printed(view(waiting, description), 160)


def test_description_has_the_conditions_words_when_no_event_is_left() -> None:
    """Events may be gone; what the object itself says stays."""
    description = describe(_claim(conditions=[_condition("False", "DoesNotFit", "node n1: too few")]), {}, [], [], [])

    assert [(reason.code, reason.facts["reason"], reason.message) for reason in description.reasons] == [
        ("condition", "DoesNotFit", "node n1: too few")
    ]


def test_description_says_conditions_and_decisions_in_plain_words() -> None:
    """A condition whose reason only says its type again is a yes.

    A decision among all nodes names none, one of a node names it.
    """
    owner = Owner(kind=OwnerKind.CLAIM, name="fast", uid="u-1")
    refusal = Refusal(reasons=(Reason(code="too-few-devices", message="too few"),))
    events = [
        DecisionEvent(id=f"e-{node}", verb=verb, node=node, op_id="o", time="", owner=owner, outcome=refusal)
        for verb, node in (("allocate", "_"), ("place", "n1"))
    ]
    allocated = _claim(conditions=[_condition("True", "Allocated", "1 device allocated")])

    shown = " ".join(printed(view(allocated, describe(allocated, {}, [], [], events)), 160).split())

    assert "Allocated: yes since" in shown
    assert "e-_ allocate refused" in shown
    assert "place on n1" in shown
