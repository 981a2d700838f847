"""The journal on the disk: what survives, what is set aside, and who may write."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from topobus.devicekit.journal.journal import Journal, JournalTaken, journal_folder
from topobus.devicekit.journal.journal_values import DeviceEntry, OwnerEntry
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.errors import HardwareError
from topobus.values.idset import NodeSet
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind

OWNER = Owner(kind=OwnerKind.CLAIM, name="claim", uid="u1")
OTHER = Owner(kind=OwnerKind.CLAIM, name="other", uid="u2")
DEVICE = Device(
    name="nic-0", device_class="nic", driver="acme", numa_nodes=NodeSet(0), pci=PciAddress.parse("0000:3b:00.0")
)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """A journal of a folder that is not there yet."""
    return Journal(tmp_path / "journal")


def again(journal: Journal) -> Journal:
    """Give what the next life reads."""
    journal.close()
    after = Journal(journal.folder)
    after.load()
    return after


def test_journal_says_the_same_in_the_next_life_when_steps_were_written(journal: Journal) -> None:
    """Device, owner, steps and what was before come back as they were."""
    record = journal.prepare_record(DEVICE, OWNER)
    record.intend("mtu", {"mtu": 1500, "addresses": ["10.0.0.1/24"]})
    record.done("mtu", {"mtu": 9000})

    after = again(journal)

    assert after.entries == journal.entries
    assert after.entries["nic-0"].device == DEVICE
    assert after.prepare_record(DEVICE, OWNER).steps == record.steps


def test_journal_has_no_file_when_all_is_undone(journal: Journal) -> None:
    """What is undone is forgotten, so the folder tells at a glance what is not."""
    record = journal.prepare_record(DEVICE, OWNER)
    record.intend("mtu")
    files = sorted(path.name for path in journal.folder.iterdir())
    record.undone("mtu")

    assert files == ["lock", "nic-0.json"]
    assert [path.name for path in journal.folder.iterdir()] == ["lock"]
    assert journal.entries == {}


def test_journal_keeps_owners_apart_when_a_device_is_shared(journal: Journal) -> None:
    """Each owner's steps are undone by that owner's going alone."""
    for owner in (OWNER, OTHER):
        journal.attach_record(DEVICE, owner).intend(f"child-{owner.name}")
    journal.attach_record(DEVICE, OWNER).undone("child-claim")

    (left,) = again(journal).entries["nic-0"].owners

    assert (left.owner, [step.name for step in left.attach.steps]) == (OTHER, ["child-other"])


def test_whole_preparation_is_half_done_when_a_step_comes_on_top(journal: Journal) -> None:
    """The closing mark stands for all steps: a further one takes it back, the same one again does
    not.
    """
    record = journal.prepare_record(DEVICE, OWNER)
    record.intend("image")
    record.done("image")
    journal.change_owner(DEVICE, OWNER, lambda entry: msgspec.structs.replace(entry, is_prepared=True))
    record = journal.prepare_record(DEVICE, OWNER)
    record.intend("image")
    record.done("image")
    same = journal.entries["nic-0"].half_done
    record.intend("clock")

    assert same == ()
    assert [entry.owner for entry in journal.entries["nic-0"].half_done] == [OWNER]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"device": 7}', b"\xff\xfe"], ids=["empty", "cut", "list", "type", "binary"]
)
def test_device_is_set_aside_alone_when_its_file_is_unreadable(journal: Journal, content: bytes) -> None:
    """The others are read, nothing is written over the bad file, and mended it is read without a
    restart.
    """
    for name in ("nic-0", "nic-1"):
        journal.prepare_record(msgspec.structs.replace(DEVICE, name=name), OWNER).intend("mtu")
    file = journal.folder / "nic-0.json"
    good = file.read_bytes()
    file.write_bytes(content)

    after = again(journal)
    with pytest.raises(HardwareError, match=r"nic-0\.json"):
        after.prepare_record(DEVICE, OTHER).intend("mtu")

    assert sorted(after.entries) == ["nic-1"]
    assert sorted(after.unreadable) == ["nic-0"]
    assert file.read_bytes() == content
    assert after.reread() == []
    file.write_bytes(good)
    assert after.reread() == ["nic-0"]
    assert sorted(after.entries) == ["nic-0", "nic-1"]


def test_device_is_set_aside_when_its_file_has_a_form_of_a_later_release(journal: Journal) -> None:
    """What this release does not know is not lost by its next write."""
    journal.prepare_record(DEVICE, OWNER).intend("mtu")
    file = journal.folder / "nic-0.json"
    later = file.read_bytes().replace(b'"format":1', b'"format":2')
    file.write_bytes(later)

    after = again(journal)
    with pytest.raises(HardwareError, match=r"nic-0\.json.*\$\.format"):
        after.prepare_record(DEVICE, OTHER).intend("mtu")

    assert file.read_bytes() == later


def test_device_is_set_aside_when_its_file_is_of_another_one(journal: Journal) -> None:
    """A file that was copied or renamed would have the wrong device undone."""
    journal.prepare_record(DEVICE, OWNER).intend("mtu")
    (journal.folder / "nic-0.json").rename(journal.folder / "nic-7.json")

    assert "nic-0" in again(journal).unreadable["nic-7"]


def test_journal_is_not_shared_when_another_process_has_it(journal: Journal) -> None:
    """Two services of one class would undo each other's work."""
    journal.prepare_record(DEVICE, OWNER).intend("mtu")
    rival = Journal(journal.folder)

    with pytest.raises(JournalTaken):
        rival.load()
    journal.close()
    rival.load()

    assert sorted(rival.entries) == ["nic-0"]


def test_journal_stays_given_up_when_a_thread_writes_after_its_close(journal: Journal) -> None:
    """What a driver's thread does when its service has ended is refused, and keeps no other process
    from the folder.
    """
    record = journal.prepare_record(DEVICE, OWNER)
    record.intend("mtu")
    journal.close()

    with pytest.raises(HardwareError, match="this service has ended"):
        record.done("mtu")
    with pytest.raises(HardwareError, match="this service has ended"):
        journal.load()
    rival = Journal(journal.folder)
    rival.load()

    assert [step.is_done for step in rival.steps_of("nic-0")] == [False]


def test_journal_reads_what_another_wrote_meanwhile_when_it_first_writes(journal: Journal) -> None:
    """A service that started without a folder takes over what the one before it left in the
    meantime.
    """
    late = Journal(journal.folder)
    late.load()
    journal.prepare_record(DEVICE, OWNER).intend("mtu")
    journal.close()

    late.prepare_record(DEVICE, OTHER).intend("mtu")

    assert [entry.owner for entry in late.entries["nic-0"].owners] == [OWNER, OTHER]


def test_half_written_files_are_gone_when_the_journal_is_read(journal: Journal) -> None:
    """A crash in the middle of a write leaves a file of another name, and what stood before it."""
    journal.prepare_record(DEVICE, OWNER).intend("mtu")
    (journal.folder / ".nic-0.json.abc.tmp").write_text("{", encoding="utf-8")

    after = again(journal)

    assert sorted(after.entries) == ["nic-0"]
    assert sorted(path.name for path in journal.folder.iterdir()) == ["lock", "nic-0.json"]


def test_owner_entry_is_empty_when_nothing_is_left_in_it() -> None:
    """Only what must be undone, cleaned after or answered again keeps a file."""
    entry = OwnerEntry(owner=OWNER)

    assert entry.is_empty
    assert not msgspec.structs.replace(entry, is_kept=True).is_empty
    assert not msgspec.structs.replace(entry, is_attached=True).is_empty
    assert not DeviceEntry(device=DEVICE, to_clean=OWNER).is_empty
    assert DeviceEntry(device=DEVICE).with_owner(entry).is_empty


def test_owner_entry_is_an_empty_one_when_the_owner_has_none(journal: Journal) -> None:
    """Nobody has to ask first whether there is an entry: an empty one says that nothing was done."""
    journal.change_owner(DEVICE, OWNER, lambda entry: msgspec.structs.replace(entry, is_kept=True))
    other = msgspec.structs.replace(OWNER, name="other")

    assert journal.owner_entry(DEVICE.name, OWNER) == OwnerEntry(owner=OWNER, is_kept=True)
    assert journal.owner_entry(DEVICE.name, other) == OwnerEntry(owner=other)
    assert journal.owner_entry("nic-9", OWNER) == OwnerEntry(owner=OWNER)


def test_folder_is_the_usual_one_when_none_is_set(tmp_path: Path) -> None:
    """Each class has a folder of its own.

    That of a recorded machine is within it, so that it meets no service of this machine.
    """
    live, recorded = Tree(), Tree(HardwareSettings(root=str(tmp_path)))

    assert journal_folder("", "nic", live) == Path("/var/lib/topobus/nic")
    assert journal_folder("", "nic", recorded) == tmp_path / "var/lib/topobus/nic"
    assert journal_folder("/run/journal", "nic", recorded) == Path("/run/journal")
