"""Processes in a recorded tree: the files in /proc of those that use a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["POD_UID", "add_process", "end_recorded"]

POD_UID = "8a1e9b7c-1111-2222-3333-444455556666"


def add_process(
    root: Path, pid: int, *, program: str = "python3", node: str = "", pod: str = "", started: int = 100
) -> None:
    """Put a process below a tree's /proc, with a node open; `pod` names the pod that it is in."""
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "comm").write_text(f"{program}\n", encoding="utf-8")
    fields = " ".join(["S", *["0"] * 18, str(started), "0"])
    (folder / "stat").write_text(f"{pid} ({program}) {fields}\n", encoding="utf-8")
    group = (
        f"/kubepods.slice/kubepods-pod{POD_UID.replace('-', '_')}.slice/cri-containerd-1.scope"
        if pod
        else "/system.slice/x.service"
    )
    (folder / "cgroup").write_text(f"0::{group}\n", encoding="utf-8")
    (folder / "environ").write_bytes(f"PATH=/bin\0HOSTNAME={pod}\0".encode())
    (folder / "fd" / "0").symlink_to("/dev/null")
    if node:
        (folder / "fd" / "7").symlink_to(f"/dev/{node}")


def end_recorded(root: Path, pid: int) -> None:
    """Take a process away."""
    shutil.rmtree(root / "proc" / str(pid))
