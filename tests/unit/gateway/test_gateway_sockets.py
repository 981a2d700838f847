"""Promises of sockets: only the dead ones of ours are cleared away, and one of the same name is
told from another.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from topobus.gateway.device_plugins.sockets import FolderWatch, identity, remove_stale


def listen(path: Path) -> socket.socket:
    """Listen on a socket."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server


def test_remove_stale_keeps_living_and_foreign_sockets_when_clearing(short_folder: Path) -> None:
    """Only a socket of ours on which nobody listens goes.

    Another gateway's, another plugin's and plain files stay.
    """
    listen(short_folder / "topobus-gpu-dead-01.sock").close()
    listen(short_folder / "nvidia-gpu.sock").close()
    (short_folder / "topobus-gpu-file-01.sock").write_text("")
    with listen(short_folder / "topobus-gpu-alive-01.sock"):
        remove_stale(short_folder, "topobus-*-*.sock")

    assert sorted(path.name for path in short_folder.iterdir()) == [
        "nvidia-gpu.sock",
        "topobus-gpu-alive-01.sock",
        "topobus-gpu-file-01.sock",
    ]


def test_remove_stale_does_nothing_when_the_folder_is_missing(short_folder: Path) -> None:
    """A node without kubelet is an ordinary one, and no folder is made for it."""
    remove_stale(short_folder / "absent", "*")

    assert not (short_folder / "absent").exists()


def test_identity_differs_when_a_socket_is_made_anew_under_its_name(short_folder: Path) -> None:
    """A restarted kubelet is noticed although name, and often inode, are the same.

    No socket is None.
    """
    path = short_folder / "kubelet.sock"
    listen(path).close()
    first = identity(path)
    path.unlink()
    gone = identity(path)
    listen(path).close()
    second = identity(path)
    (short_folder / "plain").write_text("")

    assert first is not None
    assert second is not None
    assert first != second
    assert gone is None
    assert identity(short_folder / "plain") is None


async def test_folder_watch_wakes_its_waiters_when_a_file_appears_in_a_late_folder(short_folder: Path) -> None:
    """The folder may come after the watch, and a change in it is noticed."""
    watched = short_folder / "later"
    watch = FolderWatch(watched, watchdog_s=0.05)
    task = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(60):
            watched.mkdir()
            await watch.until(watched.is_dir)
            (watched / "kubelet.sock").write_text("")
            await watch.until(lambda: (watched / "kubelet.sock").exists())
    finally:
        task.cancel()
        await asyncio.wait({task})

    assert task.cancelled()
