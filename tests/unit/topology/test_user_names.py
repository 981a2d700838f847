"""Which pod uses what kubelet's Allocate has given out: told afterwards, without touching the
holding.
"""

from topobus.engine.ledger import transitions
from topobus.engine.ledger.holdings import names_of
from topobus.engine.ledger.transitions import Step, unannounced
from topobus.values.idset import CpuSet
from topobus.values.ledger import Adoption, Allocation, Holding, Ledger
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

PLUGIN = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid="hash")
POD = Owner(kind=OwnerKind.POD, name="a", uid="")


def _allocated(ledger: Ledger, decision: str) -> Ledger:
    step = transitions.adopt(
        ledger, Adoption(owner=PLUGIN, devices={"gpu": ("gpu-0",)}), op_id=f"op-{decision}", decision_id=decision
    )
    assert isinstance(step, Step)
    return step.ledger


def _named(ledger: Ledger, decision: str) -> Step:
    return transitions.name_pods(
        ledger,
        op_id=f"name-{decision}-{ledger.sequence}",
        owner=PLUGIN,
        decision_id=decision,
        pods=(POD,),
        container="main",
    )


def test_name_pods_changes_nothing_but_the_name_when_the_holding_is_the_one_meant() -> None:
    """Devices, owner and decision stay, so that a release that means this decision still finds it.

    No event goes out.
    """
    before = transitions.announce(_allocated(Ledger(node="n"), "d-1"), ["op-d-1"])
    after = _named(before, "d-1").ledger
    (held,) = after.allocations.values()
    released = transitions.release(after, op_id="r", owner=PLUGIN, decision_id="d-2", only="d-1")

    assert held == Allocation(
        owner=PLUGIN,
        holdings=before.allocations[PLUGIN.key].holdings,
        decision_id="d-1",
        pods=(POD,),
        container="main",
    )
    assert (str(held.shown), names_of(held)) == ("pod default/a", {"gpu": ("gpu-0",)})
    assert unannounced(after) == ()
    assert isinstance(released, Step)
    assert released.ledger.allocations == {}


def test_name_pods_leaves_a_later_holding_alone_when_an_older_one_was_meant() -> None:
    """Kubelet gave the same device to another pod meanwhile: the name that was read before is not
    that pod's.
    """
    later = _allocated(_named(_allocated(Ledger(node="n"), "d-1"), "d-1").ledger, "d-2")
    step = _named(later, "d-1")

    assert step.is_repeat
    assert step.ledger is later
    assert later.allocations[PLUGIN.key].user is None


def test_name_pods_writes_nothing_when_the_name_is_known_or_nothing_is_held() -> None:
    """Said again, or of what was let go: no write, for every service of the node reads each."""
    named = _named(_allocated(Ledger(node="n"), "d-1"), "d-1").ledger

    assert _named(named, "d-1").is_repeat
    assert _named(Ledger(node="n"), "d-1").is_repeat


def test_old_owner_keeps_its_pod_when_a_part_of_its_devices_is_handed_out_again() -> None:
    """The rest is still that pod's."""
    both = transitions.adopt(
        Ledger(node="n"),
        Adoption(owner=PLUGIN, devices={"gpu": ("gpu-0", "gpu-1")}, pods=(POD,)),
        op_id="1",
        decision_id="d-1",
    )
    assert not isinstance(both, Refusal)
    other = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid="other")
    step = transitions.adopt(
        both.ledger, Adoption(owner=other, devices={"gpu": ("gpu-0",)}), op_id="2", decision_id="d-2"
    )

    assert isinstance(step, Step)
    assert (step.ledger.allocations[PLUGIN.key].user, step.ledger.allocations[other.key].user) == (POD, None)


def test_name_pods_gives_a_claim_its_pods_when_the_holding_is_the_one_meant() -> None:
    """All of them at once, in place of those before; a later decision keeps its own."""
    claim = Owner(kind=OwnerKind.CLAIM, name="training", uid="u")
    first, second = (Owner(kind=OwnerKind.POD, name=name, uid="") for name in ("a", "b"))
    step = transitions.adopt(
        Ledger(node="n"),
        Adoption(owner=claim, devices={"gpu": ("gpu-0",)}, pods=(first,), is_prepared=True),
        op_id="adopt",
        decision_id="d1",
    )
    assert isinstance(step, transitions.Step)

    named = transitions.name_pods(step.ledger, op_id="name", owner=claim, decision_id="d1", pods=(first, second)).ledger
    late = transitions.name_pods(named, op_id="late", owner=claim, decision_id="d0", pods=())

    assert step.ledger.allocations[claim.key].pods == (first,)
    assert named.allocations[claim.key].pods == (first, second)
    assert named.allocations[claim.key].is_prepared
    assert late.is_repeat


def test_names_of_a_holding_are_ordered_as_people_count() -> None:
    """CPU 10 comes after CPU 2 and CPU 0 first; other devices are ordered by name."""
    holding = Holding(devices={"nic": ("nic-1", "nic-0")}, cpus=CpuSet(10, 2, 0))

    names = names_of(Allocation(owner=PLUGIN, holdings=(holding,)))

    assert names == {"cpu": ("cpu-0", "cpu-2", "cpu-10"), "nic": ("nic-0", "nic-1")}
