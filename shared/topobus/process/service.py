"""Runs a process from start to end: read settings, log, serve probes, connect, provision, serve,
and stop within five seconds of a signal.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

from topobus.bus.bus import Bus
from topobus.bus.connection.endpoint import strange_urls
from topobus.bus.login.login import read_login
from topobus.process.clock import Clock, SystemClock
from topobus.process.config import LogSettings, ServiceSettings, find_mistakes, origin_of
from topobus.process.environment import strange_variables
from topobus.process.heartbeat import Heartbeats
from topobus.process.http import Endpoint
from topobus.process.logging import get_logger, setup_logging
from topobus.process.metrics import register_build_info
from topobus.process.probe import ask_ready
from topobus.process.readiness import Readiness
from topobus.process.tracing import check_tracing, start_tracing, stop_tracing
from topobus.values.errors import (
    ConfigError,
    ContractError,
    HardwareError,
    InvariantError,
    PeerUnavailable,
    TopobusError,
)

__all__ = ["Clock", "Readiness", "Runtime", "SystemClock", "run"]

S = TypeVar("S", bound=ServiceSettings)

EX_OK = 0
# sysexits(3), so that a supervisor can distinguish "correct the configuration" from "start it
# again".
EX_SOFTWARE = 70
EX_CONFIG = 78
_EXITS: tuple[tuple[type[TopobusError], int], ...] = (
    (ConfigError, EX_CONFIG),
    (ContractError, 65),  # EX_DATAERR
    (PeerUnavailable, 69),  # EX_UNAVAILABLE
    (HardwareError, 74),  # EX_IOERR
    (InvariantError, EX_SOFTWARE),
)
# A stop must end within 5 s even when a vendor's library never returns from a thread.
_STOP_LIMIT_S = 4.5


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What a service gets besides its settings."""

    name: str
    node: str
    bus: Bus
    clock: Clock
    readiness: Readiness
    registry: CollectorRegistry
    beats: Heartbeats = field(default_factory=Heartbeats)
    """The loops of the process report here that they run; /healthz fails when one does not."""


def run(
    name: str,
    settings_type: type[S],
    serve: Callable[[S, Runtime], Awaitable[None]],
    argv: Sequence[str] | None = None,
    *,
    check: Callable[[S], object] | None = None,
    parts: Sequence[str] = (),
) -> int:
    """Run a service until a signal stops it, and return the exit status.

    `parts` are what it is never ready without, besides NATS and its streams: it reports each by
    `Runtime.readiness`. `check` refuses (by ConfigError) settings that cannot work together, before
    anything is connected, and for --check-config. `serve` is cancelled by SIGTERM or SIGINT. Then
    the bus drains and the status is 0. ConfigError gives 78, our own bug 70.
    """
    arguments = _parse(name, argv)
    log = LogSettings()
    try:
        checks: list[Callable[[S], object]] = [lambda settings: check_tracing(settings.tracing)]
        if check is not None and not arguments.probe:
            checks.append(check)
        if arguments.check_config:
            checks.append(lambda settings: read_login(settings.nats))
        settings, mistakes = find_mistakes(
            settings_type, name, file=arguments.config, environ=os.environ, checks=checks
        )
        strange = [] if arguments.probe else strange_variables(settings_type, name, os.environ)
        if arguments.check_config and settings is not None:
            strange += strange_urls(settings.nats.url)
        if arguments.check_config or mistakes:
            _tell(name, *(f"warning: {text}" for text in strange), *map(str, mistakes))
        if mistakes or settings is None:
            return EX_CONFIG
        log = settings.log
        if arguments.check_config:
            print(f"{name}: the settings are good")  # noqa: T201 - the answer of a command
            return EX_OK
        if arguments.probe:
            is_ready, report = ask_ready(settings.http.host, settings.http.port)
            print(report.strip())  # noqa: T201 - the answer of a command
            return EX_OK if is_ready else 1
        setup_logging(settings.log, service=name, node=settings.node)
        for text in strange:
            get_logger().warning("settings.strange", why=text)
        start_tracing(settings.tracing, service=name, node=settings.node)
        try:
            return asyncio.run(_life(name, settings, serve, parts))
        finally:
            stop_tracing()
    except TopobusError as err:
        return _fail(name, _with_origin(err, name, settings_type, arguments.config))
    except KeyboardInterrupt:
        return EX_OK
    except Exception:  # noqa: BLE001
        # boundary: runtime.run. Whatever comes here is our own bug: log one line with all facts,
        # and return the status for it.
        setup_logging(log, service=name)
        get_logger().exception("service.crashed")
        return EX_SOFTWARE


def _with_origin(err: TopobusError, name: str, settings_type: type[ServiceSettings], file: Path | None) -> TopobusError:
    """Add to an error that has a setting's key as a fact where that setting was written."""
    key = err.facts.get("key")
    if not isinstance(err, ConfigError) or not isinstance(key, str):
        return err
    origin = origin_of(settings_type, name, key, file=file, environ=os.environ)
    message = err.message if err.message.startswith(f"{name}: ") else f"{name}: {err.message}"
    return ConfigError(f"{message} (from {origin})", next_step=err.next_step, **err.facts)


def _parse(name: str, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"topobus-{name}", description=f"The {name} service of Topobus. Settings: docs/reference/settings.md."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings, TOML; the environment overrides it")
    parser.add_argument(
        "--check-config", action="store_true", help="read the settings, report whether they are valid, and exit"
    )
    parser.add_argument("--probe", action="store_true", help="ask the running service whether it is ready: exit 0 or 1")
    parser.add_argument("--version", action="version", version=f"%(prog)s {importlib.metadata.version('topobus')}")
    return parser.parse_args(argv)


def _fail(name: str, err: TopobusError) -> int:
    status = next(code for kind, code in _EXITS if isinstance(err, kind))
    if status == EX_CONFIG:
        _tell(name, str(err))
    else:
        get_logger().error("service.failed", **{**err.facts, "kind": type(err).__name__, "error": str(err)})
    return status


def _tell(name: str, *lines: str) -> None:
    for line in lines:
        print(f"topobus-{name}: {line}", file=sys.stderr)  # noqa: T201 - for the operator, before logs are set up


async def _life(name: str, settings: S, serve: Callable[[S, Runtime], Awaitable[None]], parts: Sequence[str]) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    readiness = Readiness(("bus", "streams", *parts))
    # The time when each series began is of no use, and half of all lines.
    disable_created_metrics()  # type: ignore[no-untyped-call]  # of the library
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    register_build_info(registry, name)
    log = get_logger()
    beats = Heartbeats(SystemClock(), event_loop_limit_s=settings.http.stalled_s, work_limit_s=settings.http.stuck_s)
    with Endpoint(settings.http, readiness, registry, beats):
        log.info("service.started", version=importlib.metadata.version("topobus"))
        work = asyncio.create_task(_work(name, settings, serve, readiness, registry, beats), name=name)
        stopped = asyncio.create_task(stop.wait())
        beating = asyncio.create_task(beats.follow_event_loop(), name="heartbeat")
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            beating.cancel()
        if stop.is_set():
            log.info("service.stopping")
            readiness.set("service", is_ready=False, why="stopping")
            _arm_last_resort(name)
            work.cancel()
        await asyncio.wait({work})
        if work.cancelled() or stop.is_set():
            if not work.cancelled() and (err := work.exception()) is not None:
                log.warning("service.stop-failed", error=str(err), kind=type(err).__name__)
            log.info("service.stopped")
            return EX_OK
        _raise_plain(work.exception())
        log.info("service.finished")
        return EX_OK


async def _work(
    name: str,
    settings: S,
    serve: Callable[[S, Runtime], Awaitable[None]],
    readiness: Readiness,
    registry: CollectorRegistry,
    beats: Heartbeats,
) -> None:
    clock = SystemClock()
    bus = await Bus.connect(settings.nats, name=name, clock=clock, registry=registry, readiness=readiness)
    try:
        if bus.is_connected and not bus.wants_login:
            get_logger().warning(
                "bus.open",
                why="NATS has no users: any client that reaches it may write everything and answer in place of "
                "every service",
                next_step="give each process a user of its own: docs/how-to/secure-nats.md",
            )
        await bus.provision()
        runtime = Runtime(
            name=name, node=settings.node, bus=bus, clock=clock, readiness=readiness, registry=registry, beats=beats
        )
        async with asyncio.TaskGroup() as group:
            # A promise broken inside a handler ends the process as one broken in `serve` does.
            crash = group.create_task(bus.wait_crash())
            await serve(settings, runtime)
            crash.cancel()
    finally:
        await bus.close()


def _raise_plain(err: BaseException | None) -> None:
    """Raise what a task group wrapped: one TopobusError inside is the error.

    Anything else stays as it is.
    """
    while isinstance(err, BaseExceptionGroup) and len(err.exceptions) == 1:
        err = err.exceptions[0]
    if err is not None:
        raise err


def _arm_last_resort(name: str) -> None:
    def end() -> None:
        get_logger().error("service.forced", service=name, limit_s=_STOP_LIMIT_S)
        sys.stderr.flush()
        os._exit(EX_SOFTWARE)

    timer = threading.Timer(_STOP_LIMIT_S, end)
    timer.daemon = True
    timer.start()
