"""A physical function with virtual ones, as a tree of files."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ADDRESS", "Function"]

ADDRESS = "0000:3b:00.0"


class Function:
    """A physical function in a tree: what was written to its sriov_numvfs, in order."""

    def __init__(self, root: Path, present: int, total: int = 8) -> None:
        self.sys = root / "sys"
        self.folder = self.sys / "bus" / "pci" / "devices" / ADDRESS
        self.folder.mkdir(parents=True)
        (self.folder / "sriov_totalvfs").write_text(f"{total}\n")
        (self.folder / "sriov_numvfs").write_text(f"{present}\n")
        for index in range(present):
            virtual = self.folder.parent / f"0000:3b:02.{index}"
            (virtual / "net" / f"ens1v{index}").mkdir(parents=True)
            (virtual / "net" / f"ens1v{index}" / "flags").write_text("0x1002\n")
            (self.sys / "drivers" / "iavf").mkdir(parents=True, exist_ok=True)
            (virtual / "driver").symlink_to(self.sys / "drivers" / "iavf")
            (self.folder / f"virtfn{index}").symlink_to(virtual)

    @property
    def number(self) -> int:
        """The content of the file."""
        return int((self.folder / "sriov_numvfs").read_text())

    def virtual(self, index: int) -> Path:
        """A virtual function's folder."""
        return self.folder.parent / f"0000:3b:02.{index}"
