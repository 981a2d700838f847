"""Placements and refusals, for people."""

from __future__ import annotations

from support.printed import printed
from topobus.cli.commands.decisions import decision_listing
from topobus.cli.commands.explain import explanation
from topobus.cli.render.answers import answer_view, facts_text, hint_table
from topobus.formats.messages.messages import DecisionEvent
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.maintenance import DeviceOperation, DeviceVerb
from topobus.values.outcome import ContainerPlacement, HintList, Placement, Reason, Refusal, summary
from topobus.values.request import Owner, OwnerKind

PLACEMENT = Placement(
    containers=(
        ContainerPlacement(
            name="main",
            alignment=Hint(NodeSet(0), preferred=True),
            cpus=CpuSet.parse("0-3"),
            numa_nodes=NodeSet(0),
            devices={"gpu": ("gpu-0",)},
            reasons=(Reason(code="aligned", message="node 0 it is", facts={"nodes": "0"}),),
        ),
    )
)
REFUSAL = Refusal(
    reasons=(Reason(code="numa-capacity", message="too many gpus", facts={"wanted": 4, "free": 2}),) * 2,
    to_free=(Reason(code="free-owner", message="pod default/a holds two"),),
)


def test_answer_view_tells_where_and_why_when_placed() -> None:
    """Node, CPUs, devices and the reason are there; facts only when wanted."""
    text = printed(answer_view(PLACEMENT))

    for part in ("NUMA 0", "4: 0-3", "gpu-0", "node 0 it is", "[aligned]"):
        assert part in text
    assert "[aligned: nodes 0]" in printed(answer_view(PLACEMENT, has_facts=True))


def test_facts_are_words_when_they_are_wanted() -> None:
    """Yes and no, units, and nothing of what is empty or not told: no reader has to know how a
    program writes values.
    """
    reason = Reason(
        code="devices-chosen",
        message="gpu-0",
        facts={
            "bandwidth_gbps": 0.0,
            "bottleneck": "",
            "devices": ("gpu-0", "gpu-1"),
            "is_exact": True,
            "preferred": False,
            "size_bytes": 4096,
            "tied": (),
        },
    )
    with_speed = Reason(code="devices-chosen", message="gpu-0", facts={"bandwidth_gbps": 450.0})

    assert facts_text(reason) == "devices gpu-0, gpu-1; exact: yes; preferred: no; size 4096 bytes"
    assert facts_text(with_speed) == "bandwidth 450 Gbit/s"
    assert "[devices-chosen]" in printed(
        answer_view(Refusal(reasons=(Reason(code="devices-chosen", message="m", facts={"tied": ()}),)), has_facts=True)
    )


def test_answer_of_a_claim_says_nothing_of_hints_when_none_were_merged() -> None:
    """Its devices were chosen before its node was asked, so neither an empty table, nor a hint, nor
    that nothing is aligned stands beside how near they are.
    """
    reasons = (
        Reason(code="no-alignment", message="policy none: nothing is aligned"),
        Reason(code="devices-chosen", message="gpu gpu-0: widest bottleneck link switch"),
    )
    container = ContainerPlacement(
        name="",
        alignment=Hint(None, preferred=True),
        numa_nodes=NodeSet(0),
        devices={"gpu": ("gpu-0",)},
        reasons=reasons,
    )
    owner = Owner(kind=OwnerKind.CLAIM, name="pair", uid="c-1")
    event = DecisionEvent(
        id="d-1",
        verb="hold",
        node="n1",
        op_id="o",
        time="t",
        owner=owner,
        outcome=Placement(containers=(container,)),
        ledger_sequence=1,
    )

    text = "".join(map(printed, explanation(event, None)))

    assert "widest bottleneck link switch" in text
    assert [word for word in ("hint", "nothing is aligned", "{any}") if word in text] == []


def test_answer_view_tells_why_not_and_what_to_free_when_refused() -> None:
    """Both lists are there, under their titles."""
    text = printed(answer_view(REFUSAL))

    assert (
        text.index("why not")
        < text.index("too many gpus")
        < text.index("what would have to be freed")
        < text.index("default/a")
    )


def test_answer_view_says_that_freeing_is_no_way_when_nobody_stands_in_it() -> None:
    """A refusal without anybody to free says so instead of an empty list."""
    assert "releasing what other pods and claims hold would not help" in printed(
        answer_view(Refusal(reasons=REFUSAL.reasons))
    )


def test_answer_view_says_what_lets_go_when_the_pod_itself_holds_it() -> None:
    """That letting go would not help would contradict the reason above it, which says to release
    the pod.
    """
    message = "pod default/a is placed already; release it before placing it again"
    text = printed(answer_view(Refusal(reasons=(Reason(code="already-placed", message=message),))))

    assert "would not help" not in text
    assert "`topobus release`" in text


def test_answer_view_keeps_brackets_when_a_message_has_them() -> None:
    """Text from the bus is never taken for markup."""
    assert "[red]x[/red]" in printed(answer_view(Refusal(reasons=(Reason(code="c", message="[red]x[/red]"),))))


def test_summary_names_each_code_once_when_refused() -> None:
    """One line: codes without repetition, or what each container got."""
    assert summary(REFUSAL) == "refused: numa-capacity"
    assert summary(PLACEMENT) == "placed: main: 1 gpu, 4 cpus on NUMA 0"


def test_hint_table_tells_no_opinion_from_no_way_when_both_occur() -> None:
    """None is "no opinion", an empty list "cannot be satisfied".

    A star marks preferred hints, which come first.
    """
    text = printed(
        hint_table(
            (
                HintList(
                    resource="gpu", hints=(Hint(NodeSet(0, 1), preferred=False), Hint(NodeSet(1), preferred=True))
                ),
                HintList(resource="nic", hints=None),
                HintList(resource="fpga", hints=()),
            )
        )
    )

    assert "{1}* {0-1}" in text
    assert "no opinion" in text
    assert "cannot be satisfied" in text


def _reset(op_id: str, outcome: Refusal | None) -> DecisionEvent:
    operation = DeviceOperation(device_class="nic", device="nic-0", verb=DeviceVerb.RESET, who="ada")
    owner = Owner(kind=OwnerKind.OPERATOR, namespace="", name="ada", uid="nic:nic-0")
    return DecisionEvent(
        id=f"d-{op_id}",
        verb="reset",
        node="n1",
        op_id=op_id,
        time="2026-01-01T00:00:00Z",
        owner=owner,
        operation=operation,
        outcome=outcome,
    )


def test_decisions_call_a_reset_begun_until_its_outcome_is_decided() -> None:
    """What was only allowed is never told as done, and once it is refused that is its one row."""
    begun, refused, done = _reset("op", None), _reset("op:outcome", REFUSAL), _reset("op:outcome", None)

    answers = [
        [str(row.cells[3]) for row in decision_listing(events, {}).rows]
        for events in ([begun], [begun, refused], [begun, done], [refused], [done])
    ]

    assert answers == [["begun"], ["refused: numa-capacity"], ["done"], ["refused: numa-capacity"], ["done"]]


def test_explain_says_nothing_of_freeing_when_a_reset_was_refused() -> None:
    """No pod or claim stood in its way, so none that lets go could
    help, and none that could not.
    """
    text = "".join(map(printed, explanation(_reset("op:outcome", REFUSAL), None)))

    assert "numa-capacity" in text
    assert "would not help" not in text
