"""kubelet's word about devices against the ledger's."""

from __future__ import annotations

import pytest

from topobus.gateway.reconcile.rules.pods import PodUse, PreparedHere, compare
from topobus.values.request import Owner, OwnerKind

GPU = "topobus.dev/gpu"
CLAIM = Owner(kind=OwnerKind.CLAIM, namespace="default", name="training", uid="u-1")
OTHER = Owner(kind=OwnerKind.CLAIM, namespace="default", name="other", uid="u-2")
KUBELETS = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name=GPU, uid="h")
ELSEWHERE = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu-h100", uid="h")
PREPARED = {("default", "training"): PreparedHere(owner=CLAIM, held={"gpu": ("gpu-0",), "nic": ("nic-0",)})}
BY_RESOURCE = PodUse(namespace="default", pod="p", container="c", resource=GPU, device_class="gpu", devices=("gpu-0",))
BY_CLAIM = PodUse(
    namespace="default",
    pod="p",
    container="c",
    claim_namespace="default",
    claim="training",
    device_class="gpu",
    devices=("gpu-0",),
)


@pytest.mark.parametrize(("use", "holder"), [(BY_RESOURCE, KUBELETS), (BY_CLAIM, CLAIM)], ids=["resource", "claim"])
def test_compare_finds_nothing_when_both_say_the_same(use: PodUse, holder: Owner) -> None:
    """A device held through the door that kubelet names is in order."""
    comparison = compare([use], {"gpu": {"gpu-0": holder}}, PREPARED)

    assert (comparison.lacking, comparison.disagreements) == ((), ())


@pytest.mark.parametrize(
    ("use", "holder"),
    [(BY_RESOURCE, CLAIM), (BY_RESOURCE, ELSEWHERE), (BY_CLAIM, OTHER), (BY_CLAIM, KUBELETS)],
    ids=["a-claim-has-it", "another-resource-has-it", "another-claim-has-it", "a-resource-has-it"],
)
def test_compare_names_both_sides_when_somebody_else_holds_the_device(use: PodUse, holder: Owner) -> None:
    """Nothing is adopted over a living holder: the disagreement says who has it on either side."""
    comparison = compare([use], {"gpu": {"gpu-0": holder}}, PREPARED)

    assert comparison.lacking == ()
    (disagreement,) = comparison.disagreements
    assert (disagreement.device, disagreement.kubelet, disagreement.ledger) == (
        "gpu-0",
        use.where,
        f"{holder} holds it",
    )


def test_compare_adopts_all_of_a_claim_when_one_of_its_devices_is_free() -> None:
    """The ledger's entry of a claim is one whole, so what it holds of other classes is adopted
    again with it.
    """
    comparison = compare([BY_CLAIM], {"nic": {"nic-0": CLAIM}}, PREPARED)

    (holding,) = comparison.lacking
    assert (holding.claim, holding.devices) == (PREPARED["default", "training"], ("gpu-0",))


def test_compare_adopts_only_what_is_free_when_a_container_has_more() -> None:
    """What somebody else holds is no part of the adoption."""
    use = PodUse(
        namespace="default", pod="p", container="c", resource=GPU, device_class="gpu", devices=("gpu-0", "gpu-1")
    )

    comparison = compare([use], {"gpu": {"gpu-0": OTHER}}, {})

    assert [(holding.claim, holding.devices) for holding in comparison.lacking] == [(None, ("gpu-1",))]
    assert [disagreement.device for disagreement in comparison.disagreements] == ["gpu-0"]


def test_compare_disagrees_when_a_running_claim_is_not_prepared_here() -> None:
    """Without its uid a claim cannot be adopted.

    Its device could be given away, so somebody must know.
    """
    (disagreement,) = compare([BY_CLAIM], {}, {}).disagreements

    assert disagreement.ledger == "no owner holds it, and the claim is not prepared here"


def test_compare_is_silent_when_a_claim_only_looks_at_the_device() -> None:
    """Admin access holds nothing: whoever holds the device is right."""
    watching = {("default", "training"): PreparedHere(owner=CLAIM, held={}, looked_at=frozenset({("gpu", "gpu-0")}))}

    comparison = compare([BY_CLAIM], {"gpu": {"gpu-0": OTHER}}, watching)

    assert (comparison.lacking, comparison.disagreements) == ((), ())


SHARING = {("default", "training"): PreparedHere(owner=CLAIM, held={"gpu": ("gpu-0",)}, by_share={"gpu": ("gpu-0",)})}


@pytest.mark.parametrize(
    ("holder", "sharers", "lacks"),
    [
        pytest.param(OTHER, {CLAIM, OTHER}, False, id="both have a share"),
        pytest.param(OTHER, {OTHER}, True, id="its own share is lost"),
        pytest.param(None, set(), True, id="nobody has any"),
    ],
)
def test_compare_takes_shares_of_others_for_no_disagreement(
    holder: Owner | None, sharers: set[Owner], *, lacks: bool
) -> None:
    """Several claims have one device.

    Only a share that the ledger has lost is adopted, as a share.
    """
    holders = {"gpu": {"gpu-0": holder}} if holder is not None else {}

    comparison = compare([BY_CLAIM], holders, SHARING, {("gpu", "gpu-0"): frozenset(sharers)})

    assert comparison.disagreements == ()
    assert [lack.claim for lack in comparison.lacking] == ([SHARING["default", "training"]] if lacks else [])


def test_compare_names_both_sides_when_a_share_meets_a_whole() -> None:
    """A share beside somebody's whole is a disagreement like any other."""
    comparison = compare([BY_CLAIM], {"gpu": {"gpu-0": OTHER}}, SHARING)

    assert [disagreement.ledger for disagreement in comparison.disagreements] == [f"{OTHER} holds it"]
