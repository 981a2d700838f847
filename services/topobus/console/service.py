"""Runs the console: follows the bus, and answers browsers until cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Iterator

import uvicorn

from topobus.console.config import ConsoleSettings
from topobus.console.connections import BoundedProtocol
from topobus.console.followers import Followers
from topobus.console.web import console_app, read_password
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.values.errors import ConfigError

__all__ = ["serve"]


async def serve(settings: ConsoleSettings, runtime: Runtime) -> None:
    """Show the fleet until cancelled."""
    page = settings.page
    if page.password_file:
        await asyncio.to_thread(read_password, page.password_file)
    followers = Followers(runtime.bus, settings, runtime.clock)
    with _listening(page.host, page.port) as listener:
        scheme, (host, port, *_) = "https" if page.certificate_file else "http", listener.getsockname()
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/"
        link_token = secrets.token_urlsafe(24) if page.has_link else ""
        config = uvicorn.Config(
            console_app(followers, page, is_tls=bool(page.certificate_file), link_token=link_token),
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            http=BoundedProtocol,
            loop="none",
            limit_concurrency=4 * page.streams + 64,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=1,
            ssl_certfile=page.certificate_file or None,
            ssl_keyfile=page.key_file or None,
        )
        server = _Server(config)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(followers.run(), name="followers")
            if settings.cluster.mode != "off":
                tasks.create_task(_follow_cluster(settings, runtime, followers), name="cluster")
            serving = tasks.create_task(server.serve(sockets=[listener]), name="browsers")
            get_logger().info("console.listening", url=url)
            if link_token:
                print(f"open {url}open?token={link_token}   Ctrl-C ends it", flush=True)  # noqa: T201 - for the user who started it, not for a log
            runtime.readiness.set("page", is_ready=True)
            try:
                await asyncio.Event().wait()
            finally:
                server.should_exit = True
                serving.cancel()


async def _follow_cluster(settings: ConsoleSettings, runtime: Runtime, followers: Followers) -> None:
    # Imported here: without a cluster its client must take no memory.
    from topobus.console.cluster_objects import ClusterObjects, open_reader

    reader, changed = open_reader(settings.cluster), asyncio.Event()
    objects = ClusterObjects(reader, settings.cluster, runtime.clock, followers.take_object, changed.set)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(objects.run())
            while True:
                await changed.wait()
                changed.clear()
                await followers.note_trouble(objects.trouble)
    finally:
        await reader.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `runtime.run`."""
        yield


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
        )
    except (OSError, OverflowError) as err:
        raise ConfigError(
            f"page.port: cannot listen at {host}:{port}: {err}",
            next_step="choose another port, or 0 for a free one",
            key="page.port",
        ) from err
    with listener:
        yield listener
