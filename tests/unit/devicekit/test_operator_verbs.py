"""A reset: by the driver, else by the kernel's file.

Written down before it is done, and told when a crash cut it off.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from support.sysfs_trees import write
from support.toy_driver import ToyDriver
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.verbs.operator_verbs import report_interrupted, reset_device
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.outcome import Reason, Refusal
from topobus.values.pci import PciAddress

GPU = Device(name="gpu-0", device_class="gpu", driver="toy", pci=PciAddress.parse("0000:18:00.0"))


class _Resetting(ToyDriver):
    """Notes what the journal's folder says while it resets."""

    def __init__(self, folder: Path, answer: Refusal | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.answer = answer
        self.seen: list[str] = []

    def reset(self, tree: Tree, device: Device) -> Refusal | None:
        """Reset."""
        self.seen = [path.name for path in self.folder.glob("*.json") if '"op-1"' in path.read_text(encoding="utf-8")]
        return self.answer


@pytest.fixture
def function(tmp_path: Path) -> Path:
    """Make the folder of the GPU's PCI function, in a tree of its own."""
    folder = tmp_path / "root/sys/bus/pci/devices/0000:18:00.0"
    folder.mkdir(parents=True)
    return folder


def tree(tmp_path: Path) -> Tree:
    """Read that tree."""
    return Tree(HardwareSettings(root=str(tmp_path / "root")))


def test_kernel_resets_the_function_when_the_driver_has_no_way(tmp_path: Path, function: Path) -> None:
    """One write to the function's own file, below the root that is set.

    Nothing of it stays in the journal.
    """
    (function / "reset").write_text("", encoding="ascii")
    journal = Journal(tmp_path / "journal")

    refusal = reset_device(journal, ToyDriver(), tree(tmp_path), GPU, op_id="op-1")

    assert refusal is None
    assert (function / "reset").read_text(encoding="ascii") == "1\n"
    assert journal.entries == {}


@pytest.mark.usefixtures("function")
@pytest.mark.parametrize("device", [GPU, Device(name="gpu-0", device_class="gpu", driver="toy")])
def test_reset_is_refused_when_nobody_has_a_way(tmp_path: Path, device: Device) -> None:
    """The kernel gives no file, or there is no PCI function: refused before anything is written."""
    journal = Journal(tmp_path / "journal")

    refusal = reset_device(journal, ToyDriver(), tree(tmp_path), device, op_id="op-1")

    assert refusal is not None
    assert refusal.reasons[0].code == "reset-unsupported"
    assert not (tmp_path / "journal").exists()


def test_reset_is_refused_with_the_path_when_the_kernel_refuses(tmp_path: Path, function: Path) -> None:
    """Whoever reads it sees which file could not be written, and the journal is empty again."""
    (function / "reset").mkdir()
    journal = Journal(tmp_path / "journal")

    refusal = reset_device(journal, ToyDriver(), tree(tmp_path), GPU, op_id="op-1")

    assert refusal is not None
    assert (refusal.reasons[0].code, str(function / "reset") in refusal.reasons[0].message) == ("reset-failed", True)
    assert journal.entries == {}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"proc/net/route": "Iface\tDestination\neth0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\n"},
            "the node has an address or a route over eth0",
        ),
        ({"{net}/upper_eth0.7/ifindex": 9}, "eth0 carries eth0.7"),
    ],
    ids=["route", "vlan"],
)
def test_reset_is_refused_when_the_node_uses_an_interface_of_the_function(
    tmp_path: Path, function: Path, files: dict[str, object], words: str
) -> None:
    """The reason names the interface, and nothing is written."""
    root = tmp_path / "root"
    write(
        root,
        {
            f"{function.relative_to(root)}/reset": "",
            f"{function.relative_to(root)}/net/eth0/flags": "0x1003",
            **{path.format(net=f"{function.relative_to(root)}/net/eth0"): content for path, content in files.items()},
        },
    )

    refusal = reset_device(Journal(tmp_path / "journal"), ToyDriver(), tree(tmp_path), GPU, op_id="op-1")

    assert refusal is not None
    assert refusal.reasons[0].code == "reset-busy"
    assert words in refusal.reasons[0].message
    assert (function / "reset").read_text(encoding="ascii").strip() == ""
    assert not (tmp_path / "journal").exists()


@pytest.mark.parametrize("is_allowed", [True, False])
def test_interface_that_is_up_is_switched_off_and_on_after_a_reset(
    tmp_path: Path, function: Path, monkeypatch: pytest.MonkeyPatch, *, is_allowed: bool
) -> None:
    """So its driver sets the card up again; one that is down is left alone.

    Where the kernel refuses that, the reason has the interface, and says that the reset was done.
    """
    root = tmp_path / "root"
    files = {"reset": "", "net/eth0/flags": "0x1003", "net/eth1/flags": "0x1002"}
    write(root, {f"{function.relative_to(root)}/{name}": text for name, text in files.items()})
    written: list[tuple[str, str]] = []

    def write_text(path: Path, text: str, **_: str) -> int:
        if path.name == "flags" and not is_allowed:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        written.append((str(path.relative_to(function)), text))
        return len(text)

    monkeypatch.setattr(Path, "write_text", write_text)

    refusal = reset_device(Journal(tmp_path / "journal"), ToyDriver(), tree(tmp_path), GPU, op_id="op-1")

    on_again = [("net/eth0/flags", "0x1002\n"), ("net/eth0/flags", "0x1003\n")]
    assert written == [("reset", "1\n"), *(on_again if is_allowed else [])]
    assert [reason.code for reason in refusal.reasons] == ["reset-failed"] if refusal else is_allowed
    if refusal:
        assert "was reset, but its interface eth0" in refusal.reasons[0].message


@pytest.mark.parametrize("answer", [None, Refusal(reasons=(Reason(code="dirt", message="still busy"),))])
def test_driver_resets_with_the_intent_on_the_disk_when_it_has_a_way(tmp_path: Path, answer: Refusal | None) -> None:
    """The intent is there while it acts and gone afterwards, whatever the driver answers."""
    journal = Journal(tmp_path / "journal")
    driver = _Resetting(tmp_path / "journal", answer)

    refusal = reset_device(journal, driver, tree(tmp_path), GPU, op_id="op-1")

    assert refusal == answer
    assert driver.seen == ["gpu-0.json"]
    assert journal.entries == {}


@pytest.mark.parametrize("verb", ["reset", "burn-in"])
def test_operation_is_forgotten_and_told_when_a_crash_cut_it_off(tmp_path: Path, verb: str) -> None:
    """The next start names the device once; nothing is done again."""
    first = Journal(tmp_path / "journal")
    first.operation_record(GPU).intend(verb, {"op_id": "op-1"})
    first.close()
    second = Journal(tmp_path / "journal")
    second.load()

    with capture_logs() as logs:
        report_interrupted(second)
        report_interrupted(second)

    assert [(log["event"], log["device"], log["verb"]) for log in logs] == [("operation.interrupted", "gpu-0", verb)]
    assert list((tmp_path / "journal").glob("*.json")) == []
