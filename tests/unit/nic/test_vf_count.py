"""The number of virtual functions, on a tree of files: changed when the operator asks for it and
nobody uses them, else refused before anything is written.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.physical_functions import ADDRESS, Function
from topobus.nic.netlink.vf_count import set_vf_count
from topobus.values.outcome import Refusal


def code(refusal: Refusal | None) -> str:
    """The code of a refusal; empty without one."""
    return refusal.reasons[0].code if refusal is not None else ""


@pytest.mark.parametrize(("present", "wanted"), [(0, 4), (4, 2), (4, 0), (4, 4), (0, 8)])
def test_count_is_set_when_nobody_uses_the_function(tmp_path: Path, present: int, wanted: int) -> None:
    """Any number up to what the card can have."""
    function = Function(tmp_path, present)

    refusal = set_vf_count(str(function.sys), ADDRESS, wanted)

    assert (refusal, function.number) == (None, wanted)


def test_count_goes_by_way_of_none_when_there_are_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses a step from one number to another: EBUSY."""
    function = Function(tmp_path, 4)
    written: list[str] = []
    write_text = Path.write_text
    monkeypatch.setattr(
        Path, "write_text", lambda path, text, **options: written.append(text) or write_text(path, text, **options)
    )

    set_vf_count(str(function.sys), ADDRESS, 6)

    assert written == ["0", "6"]


@pytest.mark.parametrize("wanted", [-1, 9])
def test_count_is_refused_when_the_card_cannot_have_it(tmp_path: Path, wanted: int) -> None:
    """The message has the largest number."""
    function = Function(tmp_path, 0)

    refusal = set_vf_count(str(function.sys), ADDRESS, wanted)

    assert refusal is not None
    assert (code(refusal), refusal.reasons[0].facts["total"], function.number) == ("vf-count-impossible", 8, 0)


def test_count_is_refused_when_the_function_has_no_such_thing(tmp_path: Path) -> None:
    """A card without SR-IOV has no file for it."""
    assert code(set_vf_count(str(tmp_path), ADDRESS, 1)) == "vf-count-impossible"


def test_count_stays_when_a_function_is_held(tmp_path: Path) -> None:
    """A change would take the interface away under a pod."""
    function = Function(tmp_path, 4)

    refusal = set_vf_count(str(function.sys), ADDRESS, 8, held=["nic-0000-3b-02-1 by default/web"])

    assert (code(refusal), function.number) == ("vf-count-held", 4)


def test_count_stays_when_a_function_is_used_by_somebody_unknown(tmp_path: Path) -> None:
    """Passed through to a virtual machine, moved into a namespace, or switched on: each is a use
    that no ledger of ours knows.
    """
    passed, moved, on = (Function(tmp_path / name, 2) for name in ("passed", "moved", "on"))
    (passed.sys / "drivers" / "vfio-pci").mkdir()
    (passed.virtual(1) / "driver").unlink()
    (passed.virtual(1) / "driver").symlink_to(passed.sys / "drivers" / "vfio-pci")
    (moved.virtual(1) / "net" / "ens1v1" / "flags").unlink()
    (moved.virtual(1) / "net" / "ens1v1").rmdir()
    (on.virtual(1) / "net" / "ens1v1" / "flags").write_text("0x1003\n")

    refusals = [set_vf_count(str(function.sys), ADDRESS, 8) for function in (passed, moved, on)]

    assert [code(refusal) for refusal in refusals] == ["vf-count-in-use"] * 3
    users = [refusal.reasons[0].facts["users"] for refusal in refusals if refusal is not None]
    assert users == [
        ("0000:3b:02.1 is bound to vfio-pci",),
        ("0000:3b:02.1 has its interface in another namespace",),
        ("0000:3b:02.1 is ens1v1, which is on",),
    ]
    assert [function.number for function in (passed, moved, on)] == [2, 2, 2]


def test_count_is_put_back_when_the_driver_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that makes fewer than wanted leaves the card with what it had, not with none."""
    function = Function(tmp_path, 4)
    write_text = Path.write_text

    def refuse_eight(path: Path, text: str, **options: str) -> int:
        if text == "8":
            raise OSError(12, "Cannot allocate memory")
        return write_text(path, text, **options)

    monkeypatch.setattr(Path, "write_text", refuse_eight)

    refusal = set_vf_count(str(function.sys), ADDRESS, 8)

    assert (code(refusal), function.number) == ("vf-count-failed", 4)
