"""The whole system on this machine: a NATS server and the eight services as separate processes, in
one state folder.

Everything that a run creates (sockets, logs, streams, the recorded machine) is in its state folder,
so two systems do not conflict.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sysconfig
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from topobus.bus.bus import Bus
from topobus.bus.login.user_keys import password_file
from topobus.bus.server_config.nats_accounts import DEFAULT_ACCOUNT, STREAMS_ACCOUNT, is_outside
from topobus.formats.messages.catalogue import PROVISIONER
from topobus.formats.messages.device_classes import has_own_service
from topobus.local_system.account_store import bring_store
from topobus.local_system.nats_listening import Listening, NatsCertificate
from topobus.local_system.nats_port import reserved_port
from topobus.local_system.nats_store import (
    StoreSize,
    has_room,
    probe_jetstream,
    size_store,
)
from topobus.local_system.nats_users import NatsUsers
from topobus.local_system.supervision import Program, Supervisor, probe_http
from topobus.process.config import NatsSettings, ServiceSettings, load_settings
from topobus.simulation.nats_provider import provide_nats_server
from topobus.simulation.nats_server import free_port
from topobus.values.errors import ConfigError, TopobusError

__all__ = ["DEMO_NODE", "SERVICES", "Layout", "System", "start_system"]

SERVICES = ("discovery", "gpu", "nic", "fpga", "cpu", "topology", "gateway", "controller")
DEMO_NODE = "demo-node"

_NATS_READY_S = 15.0
_STREAMS_S = 10.0
# Before this release, a server does not report a missing listener to a request from another
# account.
_ANSWERS_FOR_NOBODY = (2, 10, 0)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The paths in a state folder."""

    state: Path

    @property
    def logs(self) -> Path:
        """One file per process."""
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
        """In place of /var/lib/kubelet on a node."""
        return self.state / "kubelet"

    @property
    def cdi(self) -> Path:
        """In place of /var/run/cdi on a node."""
        return self.state / "cdi"

    @property
    def gateway(self) -> Path:
        """The gateway's own files: its checkpoint."""
        return self.state / "gateway"

    @property
    def nats_users(self) -> Path:
        """Passwords of NATS' users, each in a folder of its own."""
        return self.state / "nats-users"

    @property
    def nats_tls(self) -> Path:
        """Certificate of a NATS server that is reached from other machines, as of `topobus keys
        certify`.
        """
        return self.state / "nats-tls"

    @property
    def authority(self) -> Path:
        """The authority that signs this certificate."""
        return self.state / "authority"


@dataclass(kw_only=True)
class System:
    """A running system."""

    layout: Layout
    node: str
    nats_url: str
    supervisor: Supervisor
    services: tuple[str, ...] = SERVICES
    """Those that run here besides NATS."""
    has_users: bool = False
    """Whether this NATS wants a login: one that we started ourselves, and not open."""
    tls_ca_file: str = ""
    """Whom to trust; empty: no TLS, or whom the system trusts."""
    hosts: tuple[str, ...] = ()
    """Names and addresses of our NATS' certificate."""
    url_elsewhere: str = ""
    """Where other machines connect; empty: they cannot."""

    def settings_of(self, principal: str) -> NatsSettings:
        """Give the settings of a connection as one of NATS' users."""
        if not self.has_users:
            return NatsSettings(url=self.nats_url)
        password = str(self.password_file(principal))
        return NatsSettings(
            url=self.nats_url,
            user=principal,
            password_file=password,
            zone=_zone(principal),
            tls_ca_file=self.tls_ca_file,
        )

    def password_file(self, principal: str) -> Path:
        """Name the file of a user's password."""
        return password_file(self.layout.nats_users, principal)

    async def until_ready(self, *, timeout_s: float) -> None:
        """Wait until all services report that they are ready."""
        await self.supervisor.until_ready(self.services, timeout_s=timeout_s)


@asynccontextmanager
async def start_system(
    state: Path,
    *,
    hardware_root: Path,
    node: str,
    nats_url: str | None = None,
    listening: Listening = Listening(),  # noqa: B008 - frozen
    environment: Mapping[str, str] | None = None,
    classes: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[System]:
    """Start NATS (unless one is given) and all services, and stop everything at the end.

    Shapes: environment — settings of services as their variables; they override this process's
    environment. listening — where NATS listens, and whether without users. For a server that is
    given, these come from the environment. classes — device classes besides Topobus's own, each
    with a `topobus-device`.
    """
    layout = Layout(state=state)
    for folder in (layout.logs, layout.nats, layout.kubelet, layout.cdi, layout.gateway):
        folder.mkdir(parents=True, exist_ok=True)
    services = (*SERVICES, *classes)
    has_users = nats_url is None and not listening.is_open
    async with AsyncExitStack() as run:
        # Before the supervisor: a port is kept from other runs until the server has ended.
        port = run.enter_context(reserved_port(state, listening.address)) if nats_url is None else 0
        supervisor = await run.enter_async_context(Supervisor(layout.logs))
        # For a server of ours the environment overrides these. Of another's server we know nothing.
        store: dict[str, str] = {}
        certificate = await asyncio.to_thread(NatsCertificate, listening, layout.nats_tls, layout.authority)
        if nats_url is None:
            size = size_store(layout.nats)
            store = {"TOPOBUS_ALL__NATS__STORE_MIB": str(size.store_mib)} if size.store_mib else {}
            if size.store_mib:
                say(f"the disk is small: NATS' store may take {size.store_mib} MiB")
            nats_url = await start_nats(
                supervisor,
                layout,
                size,
                say,
                is_open=listening.is_open,
                certificate=certificate,
                port=port,
                classes=classes,
            )
        ports = {name: free_port() for name in services}
        environments = {
            name: {
                **store,
                **_environment(
                    layout, name, node=node, hardware_root=hardware_root, nats_url=nats_url, port=ports[name]
                ),
                **(_login(layout, name, certificate.authority_file) if has_users else {}),
                **(environment or {}),
            }
            for name in services
        }
        if has_users:
            await _make_streams(environments[PROVISIONER], say)
        for name in services:
            probe = partial(probe_http, ports[name])
            supervisor.start(Program(name=name, command=_command(name), environment=environments[name], probe=probe))
        yield System(
            layout=layout,
            node=node,
            nats_url=nats_url,
            supervisor=supervisor,
            services=services,
            has_users=has_users,
            tls_ca_file=certificate.authority_file,
            hosts=certificate.hosts,
            url_elsewhere=certificate.url_elsewhere(_port_of(nats_url)),
        )


async def start_nats(
    supervisor: Supervisor,
    layout: Layout,
    size: StoreSize,
    say: Callable[[str], None],
    *,
    is_open: bool,
    certificate: NatsCertificate | None = None,
    port: int = 0,
    classes: Sequence[str] = (),
) -> str:
    """Start a NATS server with its store in the state folder, and keep it storing.

    Return its URL when it is ready.

    Shapes: is_open — without users. With them their passwords are made at the first start.
    certificate — where the server listens; None: on loopback, without TLS. port — 0: any that is
    free. classes — as for `start_system`: each is a user.
    """
    certificate = certificate or NatsCertificate(Listening(), layout.nats_tls, layout.authority)
    server = await asyncio.to_thread(provide_nats_server, say)
    account = DEFAULT_ACCOUNT if is_open else STREAMS_ACCOUNT
    if await asyncio.to_thread(bring_store, layout.nats, account):
        say(f"NATS' store {layout.nats} was of another form of users: its streams are now those of account {account}")
    port = port or free_port()
    monitor_port = free_port()
    tls = certificate.folder
    more = (
        certificate.configuration(server.tls_path(tls), 0 if server.image else monitor_port) if tls is not None else ""
    )
    users = await asyncio.to_thread(
        NatsUsers,
        None if is_open else layout.nats_users,
        layout.nats,
        size,
        server.store_path(layout.nats),
        more,
        classes=classes,
    )

    async def probe() -> bool:
        user, password = users.login
        ca_file = certificate.authority_file if tls is not None else None
        return await probe_jetstream(
            certificate.host_here, port, monitor_port, user=user, password=password, ca_file=ca_file
        )

    async def is_stuck() -> bool:
        return has_room(layout.nats) and not await probe()

    def reload() -> None:
        pid = supervisor.status("nats").pid
        if pid is not None:
            # Docker's client passes the signal on. A server that is not running reads the file when
            # it starts.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGHUP)

    supervisor.start(
        Program(
            name="nats",
            command=server.command(
                port=port,
                store=layout.nats,
                monitor_port=monitor_port,
                config=users.config,
                address=certificate.address,
                tls=tls,
            ),
            environment=os.environ,
            probe=probe,
            is_stuck=is_stuck,
            cleanup=server.cleanup(port=port),
        )
    )
    await supervisor.until_ready(["nats"], timeout_s=_NATS_READY_S)
    supervisor.attend(users.follow(reload, say))
    supervisor.attend(certificate.follow(reload, say))
    return certificate.url_here(port)


async def _make_streams(environment: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Make the streams as their provisioner does, before other services wait for them. With users
    only the provisioner may make them, and a service that misses one looks again after a pause.

    Warns about a server that is too old. Ignores other errors: the provisioner meets them again,
    and reports them.
    """
    own = {
        name: value
        for name, value in environment.items()
        if name.startswith(("TOPOBUS_ALL__NATS__", f"TOPOBUS_{PROVISIONER.upper()}__NATS__"))
    }
    settings = load_settings(ServiceSettings, PROVISIONER, file=None, environ=own)
    version = (0, 0, 0)
    with suppress(TopobusError, TimeoutError):
        async with asyncio.timeout(_STREAMS_S), Bus.session(settings.nats, name=PROVISIONER) as bus:
            version = bus.server_version
            await bus.provision()
    if (0, 0, 0) < version < _ANSWERS_FOR_NOBODY:
        # Accounts are kept all the same: what they stop is worse.
        say(
            f"nats-server {'.'.join(map(str, version))}: commands that ask a device service which does not run wait "
            "for their full time instead of ending at once; use 2.10 or later"
        )


def _command(service: str) -> tuple[str, ...]:
    """Return the command of a service: its own program, or `topobus-device` for a class that has
    none.
    """
    if service in SERVICES:
        return (str(_program(f"topobus-{service}")),)
    return (str(_program("topobus-device")), "--class", service)


def _program(name: str) -> Path:
    """Find a console script of this installation.

    Errors: raises ConfigError when the extra that brings it is not installed.
    """
    beside = Path(sysconfig.get_path("scripts")) / name
    program = beside if beside.exists() else shutil.which(name)
    if program is None:
        raise ConfigError(
            f"the program {name} is not installed",
            next_step="install all of Topobus: pip install '.[all]' from the checkout",
        )
    return Path(program)


def _environment(
    layout: Layout, service: str, *, node: str, hardware_root: Path, nats_url: str, port: int
) -> dict[str, str]:
    """Build the environment of one service. The caller's variables for this service override the
    rest.

    The settings that all services must share cannot be overridden.
    """
    defaults = {
        "TOPOBUS_ALL__LOG__FORMAT": "json",
    } | {
        f"TOPOBUS_{name}__{key}": value
        for (name, key), value in _folders(layout, service).items()
        if name == service.upper()
    }
    return {
        **defaults,
        **os.environ,
        "TOPOBUS_ALL__NODE": node,
        "TOPOBUS_ALL__NATS__URL": nats_url,
        "TOPOBUS_ALL__HARDWARE__ROOT": str(hardware_root),
        f"TOPOBUS_{service.upper()}__HTTP__PORT": str(port),
        "PYTHONUNBUFFERED": "1",
    }


def _login(layout: Layout, service: str, ca_file: str) -> dict[str, str]:
    """Settings by which a service is its own user.

    They override the caller's environment, which may be for another server's users: this server
    knows only ours.
    """
    own = f"TOPOBUS_{service.upper()}__NATS"
    return {
        f"{own}__USER": service,
        f"{own}__PASSWORD_FILE": str(password_file(layout.nats_users, service)),
        f"{own}__TLS_CA_FILE": ca_file,
        f"{own}__ZONE": _zone(service),
    }


def _zone(principal: str) -> Literal["core", "vendor"]:
    """Return the side of the accounts on which a user is."""
    return "vendor" if is_outside(principal) else "core"


def _port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def _folders(layout: Layout, service: str) -> dict[tuple[str, str], str]:
    """Folders of the gateway and of device services, by the names of their settings."""
    return {
        ("GATEWAY", "KUBELET__DEVICE_PLUGIN_DIR"): str(layout.kubelet / "device-plugins"),
        ("GATEWAY", "KUBELET__PLUGINS_REGISTRY_DIR"): str(layout.kubelet / "plugins_registry"),
        ("GATEWAY", "KUBELET__PLUGINS_DIR"): str(layout.kubelet / "plugins"),
        ("GATEWAY", "POD_RESOURCES_SOCKET"): str(layout.kubelet / "pod-resources" / "kubelet.sock"),
        # Not the machine's own: a client of that socket may change every container of the machine.
        ("GATEWAY", "RUNTIME__SOCKET"): "",
        ("GATEWAY", "CDI_DIR"): str(layout.cdi),
        ("GATEWAY", "CHECKPOINT_PATH"): str(layout.gateway / "checkpoint.json"),
        **(
            {(service.upper(), "JOURNAL__DIR"): str(layout.state / "journal" / service)}
            if has_own_service(service)
            else {}
        ),
        ("NIC", "INTERFACES__KEPT_NAMESPACES_DIR"): str(layout.state / "netns"),
        ("NIC", "CNI__STATE_DIR"): str(layout.state / "cni"),
    }
