"""Promises of `prefer`: the exact choice among devices that kubelet offers, whatever it offers."""

from __future__ import annotations

import pytest

from support.alignment_nodes import dgx, holding
from topobus.engine.alignment.planning.placement import prefer


@pytest.mark.parametrize(
    ("available", "must", "size", "wanted"),
    [
        pytest.param(("gpu-0", "gpu-2", "gpu-3"), (), 2, {"gpu-2", "gpu-3"}, id="whole-switch"),
        pytest.param(("gpu-0", "gpu-2", "gpu-3"), ("gpu-0",), 1, {"gpu-0"}, id="must-alone"),
        pytest.param(("gpu-0", "gpu-2", "gpu-3"), ("gpu-0",), 2, {"gpu-0", "gpu-2"}, id="must-and-nearest"),
        pytest.param(("gpu-0",), (), 3, {"gpu-0"}, id="too-few"),
        pytest.param(("stranger", "gpu-4"), (), 1, {"gpu-4"}, id="strangers-last"),
        pytest.param(("stranger", "gpu-4"), ("other",), 3, {"other", "gpu-4", "stranger"}, id="strangers-count"),
        pytest.param((), (), 2, set(), id="nothing"),
        pytest.param(("gpu-6", "gpu-7", "gpu-4"), (), 2, {"gpu-4", "gpu-6"}, id="live-pods-last"),
    ],
)
def test_prefer_keeps_must_and_size_whatever_it_is_offered(
    available: tuple[str, ...], must: tuple[str, ...], size: int, wanted: set[str]
) -> None:
    """The preference is total: what must be in is in, the size is kept, what a live pod holds comes
    last.
    """
    chosen, reason = prefer(holding(dgx(), "live", gpu=("gpu-7",)), "gpu", available, must, size)

    assert set(chosen) == wanted
    assert len(chosen) == len(wanted)
    assert reason


def test_prefer_packs_cores_when_cpus_are_devices() -> None:
    """CPU devices are preferred as whole cores."""
    chosen, _ = prefer(dgx(), "cpu", ("cpu-0", "cpu-1", "cpu-113", "cpu-2"), (), 2)

    assert set(chosen) == {"cpu-1", "cpu-113"}


def test_prefer_takes_the_last_device_when_it_chooses_from_the_end() -> None:
    """Claims are given the first devices by name: one device at the plugin's door comes from the
    other end, also when it breaks a pair.
    """
    view = holding(dgx(), "claim", gpu=("gpu-0",))
    names = tuple(f"gpu-{place}" for place in range(8))

    beside_the_claim, _ = prefer(view, "gpu", names, (), 1)
    from_the_end, why = prefer(view, "gpu", names, (), 1, is_from_end=True)

    assert (beside_the_claim, from_the_end) == (("gpu-1",), ("gpu-7",))
    assert why == "the last by name, since claims are given the first"


@pytest.mark.parametrize(
    ("held", "size", "wanted"),
    [
        ((), 2, ("gpu-6", "gpu-7")),
        (("gpu-7",), 2, ("gpu-4", "gpu-5")),
        (("gpu-5", "gpu-7"), 4, ("gpu-0", "gpu-1", "gpu-2", "gpu-3")),
        ((), 4, ("gpu-4", "gpu-5", "gpu-6", "gpu-7")),
    ],
    ids=["last-pair", "last-whole-pair", "last-whole-node", "last-node"],
)
def test_prefer_aligns_first_when_it_chooses_several_from_the_end(
    held: tuple[str, ...], size: int, wanted: tuple[str, ...]
) -> None:
    """The order decides only among sets that are equally close to each other."""
    names = tuple(f"gpu-{place}" for place in range(8))

    chosen, _ = prefer(holding(dgx(), "live", gpu=held), "gpu", names, (), size, is_from_end=True)

    assert chosen == wanted


def test_prefer_takes_what_is_withheld_when_nothing_else_is_left() -> None:
    """A device of a claim that is not prepared yet comes after every other free one, and before
    what a live pod holds.
    """
    view = holding(dgx(), "live", gpu=("gpu-5",))
    names = ("gpu-5", "gpu-6", "gpu-7")

    beside, _ = prefer(view, "gpu", names, (), 1, withheld=("gpu-7",), is_from_end=True)
    with_it, _ = prefer(view, "gpu", names, (), 2, withheld=("gpu-7",), is_from_end=True)

    assert (beside, set(with_it)) == (("gpu-6",), {"gpu-6", "gpu-7"})


def test_prefer_packs_the_last_cores_when_it_chooses_cpus_from_the_end() -> None:
    """Whole cores as ever, of the other end, and withheld ones last."""
    names = tuple(f"cpu-{cpu}" for cpu in range(224))

    first, _ = prefer(dgx(), "cpu", names, (), 2)
    last, _ = prefer(dgx(), "cpu", names, (), 2, is_from_end=True)
    beside, _ = prefer(dgx(), "cpu", names, (), 2, is_from_end=True, withheld=("cpu-223",))
    all_of_it, _ = prefer(dgx(), "cpu", ("cpu-111", "cpu-223"), (), 2, is_from_end=True, withheld=("cpu-223",))

    assert (first, set(last), set(beside)) == (("cpu-0", "cpu-112"), {"cpu-111", "cpu-223"}, {"cpu-110", "cpu-222"})
    assert set(all_of_it) == {"cpu-111", "cpu-223"}
