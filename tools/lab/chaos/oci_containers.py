"""Containers that an OCI runtime alone runs: `topobus oci` writes the spec, and its hooks move interfaces.

Nothing runs in them. Of the runtime there is what Topobus sees: the hooks' calls, and a process in a
network namespace.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lab.chaos.interfaces import Interfaces, run_program
from lab.chaos.observer import named_devices
from topobus.nic.netlink.kept_namespaces import unmount_namespace
from topobus.nic.oci_hook import FOLDER

__all__ = ["OciContainers"]

# What a spec needs is there, or this machine lacks a device node of the recorded one.
_PRINTED = (0, 1)


class OciContainers:
    """The containers of a node, by their claims."""

    def __init__(self, url: str, cdi_dir: Path, interfaces: Interfaces | None) -> None:
        self._words = ("--nats", url, "--cdi-dir", str(cdi_dir), "--json")
        self._interfaces = interfaces
        self._hooks: dict[str, dict[str, Any]] = {}
        """Of each container that was begun in this boot."""

    def power_off(self) -> None:
        """Let all containers be gone, and what the runtime and the hooks knew of them."""
        self._hooks.clear()
        for name in self._interfaces.names if self._interfaces is not None else ():
            for record in FOLDER.glob(f"*@{name}.*"):
                unmount_namespace(record)
                record.unlink()

    async def begin(self, name: str) -> frozenset[str]:
        """Begin the container of a claim, and return the devices that its spec names.

        Errors: raises OSError when it cannot begin now.
        """
        printed = await self._oci(name, succeeds=_PRINTED)
        if not printed:
            # The power failed before the claim was allocated, and it is not yet.
            raise OSError(f"{name} has no devices yet")
        spec = json.loads(printed)["spec"]
        self._hooks[name] = spec.get("hooks", {})
        if self._interfaces is not None:
            await self._run_hooks(name, "createRuntime", await self._interfaces.begin_pod(name))
        return named_devices(spec["process"]["env"])

    async def end(self, name: str) -> None:
        """End a container, if it was begun in this boot, and undo what was prepared for it.

        Errors: raises OSError when it cannot be undone.
        """
        if self._interfaces is not None:
            await self._interfaces.end_pod(name)
            await self._run_hooks(name, "poststop", 0)
        self._hooks.pop(name, None)
        await self._oci(name, "--undo")

    async def _oci(self, name: str, *more: str, succeeds: tuple[int, ...] = (0,)) -> bytes:
        words = ("-m", "topobus.cli.main", "oci", "--claim", f"default/{name}", *self._words, *more)
        return await run_program(sys.executable, *words, succeeds=succeeds)

    async def _run_hooks(self, name: str, stage: str, pid: int) -> None:
        assert self._interfaces is not None
        state = json.dumps({"ociVersion": "1.0.2", "id": name, "pid": pid}).encode()
        for hook in self._hooks.get(name, {}).get(stage, ()):
            await run_program(hook["path"], *hook["args"][1:], given=state)
