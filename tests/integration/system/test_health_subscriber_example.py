"""The documented examples, in Python and in Go, run as they stand: the present first, then changes,
across a restart of the server.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import nats
import pytest

from integration.values import health
from support.launched_layout import launched_layout
from topobus.bus.bus import Bus
from topobus.bus.server_config.nats_permissions import PRINCIPALS, render_permissions
from topobus.cli.application import run
from topobus.formats.messages.catalogue import HEALTH
from topobus.local_system.nats_listening import Listening, NatsCertificate
from topobus.local_system.nats_store import size_store
from topobus.local_system.supervision import Supervisor
from topobus.local_system.system import System, start_nats
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.values.errors import PeerUnavailable

pytestmark = pytest.mark.integration

_LIMIT_S = 60.0
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
EXAMPLE = EXAMPLES / "health_subscriber.py"
GO_EXAMPLE = EXAMPLES / "go-health-subscriber"
NATS_GO_EXAMPLE = EXAMPLES / "go-nats-health-subscriber"
# Where Debian's golang-github-nats-io-go-nats-dev puts NATS' client, so
# that it is built without network.
GO_SOURCES = Path("/usr/share/gocode")
# The first build compiles what it uses of the standard library.
_BUILD_LIMIT_S = 600.0

Command = tuple[str, ...]


def _build(folder: Path, program: Path, **environment: str) -> Path:
    """Look through an example in Go and build it, without network."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("no go is on the PATH: the examples in Go are not built")
    variables = {**os.environ, "GOPROXY": "off", "GOTOOLCHAIN": "local", "CGO_ENABLED": "0", **environment}
    for arguments in (["vet", "."], ["build", "-o", str(program), "."]):
        done = subprocess.run(
            [go, *arguments],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=_BUILD_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module")
def go_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example in Go that has no dependencies."""
    return _build(GO_EXAMPLE, tmp_path_factory.mktemp("go") / "health-subscriber", GOFLAGS="-mod=mod")


@pytest.fixture(scope="module")
def nats_go_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example in Go with NATS' own client."""
    if not (GO_SOURCES / "src/github.com/nats-io/nats.go").is_dir():
        pytest.skip("golang-github-nats-io-go-nats-dev is not installed: the example with nats.go is not built")
    program = tmp_path_factory.mktemp("nats-go") / "health-subscriber"
    return _build(NATS_GO_EXAMPLE, program, GO111MODULE="off", GOPATH=str(GO_SOURCES))


@pytest.fixture(params=["python", "go_program", "nats_go_program"])
def example(request: pytest.FixtureRequest) -> Command:
    """The command line of each example."""
    return (
        (sys.executable, str(EXAMPLE)) if request.param == "python" else (str(request.getfixturevalue(request.param)),)
    )


@pytest.fixture(params=["go_program", "nats_go_program"])
def program(request: pytest.FixtureRequest) -> Path:
    """Each example in Go."""
    return Path(request.getfixturevalue(request.param))


async def _publish(bus: Bus, device: str, generation: int) -> None:
    while True:
        try:
            await bus.publish(
                HEALTH,
                health(generation, device),
                event_id=f"{device}-{generation}",
                node="n1",
                device_class="gpu",
                device=device,
            )
        except PeerUnavailable:
            await bus.wait_connected()
        else:
            return


async def _start(
    example: Command, url: str, stderr: int | None = None, /, **variables: str
) -> asyncio.subprocess.Process:
    """Run the example, at a server without accounts unless the variables say another thing."""
    environment = {**os.environ, "NATS_URL": url, "NATS_API": "$JS.API", **variables}
    return await asyncio.create_subprocess_exec(
        *example, env=environment, stdout=asyncio.subprocess.PIPE, stderr=stderr
    )


async def _connected_as_user(system: System) -> asyncio.Event:
    """Connect as the user with its present password.

    Gives what is set when the server ends that connection.
    """
    ended = asyncio.Event()

    async def note() -> None:
        ended.set()

    password = system.password_file("user").read_text(encoding="utf-8").strip()
    await nats.connect(
        system.nats_url.replace("nats://", "tls://"),
        user="user",
        password=password,
        tls=ssl.create_default_context(cafile=system.tls_ca_file),
        allow_reconnect=False,
        closed_cb=note,
        inbox_prefix=b"_INBOX.user",
    )
    return ended


async def _read(process: asyncio.subprocess.Process, count: int, *, limit_s: float = 15.0) -> list[tuple[str, int]]:
    """Read so many events.

    A restart must not blind the example for as long as nats-py's defaults would (19 s).
    """
    assert process.stdout is not None
    printed = []
    async with asyncio.timeout(limit_s):
        while len(printed) < count:
            event = json.loads(await process.stdout.readline())
            printed.append((event["device"], event["generation"]))
    return printed


async def test_example_shows_present_then_changes_once_each_when_it_starts_late(
    example: Command, own_nats_server: NatsServer, own_bus: Bus
) -> None:
    """Events before its start: the newest of each device.

    Later ones, and those after a restart of the server: every one, once, in order.
    """
    for generation in (1, 2, 3):
        await _publish(own_bus, "gpu-0", generation)
    await _publish(own_bus, "gpu-1", 1)
    process = await _start(example, own_nats_server.url)
    try:
        present = await _read(process, 2)
        for generation in (4, 5):
            await _publish(own_bus, "gpu-0", generation)
        changes = await _read(process, 2)
        await own_nats_server.stop()
        await own_nats_server.start()
        for generation in (6, 7):
            await _publish(own_bus, "gpu-0", generation)
        await _publish(own_bus, "gpu-1", 2)
        after = await _read(process, 3)
        await _publish(own_bus, "gpu-2", 1)
        last = await _read(process, 1)
    finally:
        process.kill()
        await process.wait()

    assert present == [("gpu-0", 3), ("gpu-1", 1)]
    assert changes == [("gpu-0", 4), ("gpu-0", 5)]
    assert after == [("gpu-0", 6), ("gpu-0", 7), ("gpu-1", 2)]
    assert last == [("gpu-2", 1)]


async def test_example_works_with_a_users_rights_when_permissions_are_on(
    example: Command, nats_binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rendered permissions of `user` are enough to follow health."""
    for principal in PRINCIPALS:
        monkeypatch.setenv(f"TOPOBUS_{principal.upper()}_PASSWORD", principal)
    password, provisioner = tmp_path / "gpu", tmp_path / "controller"
    password.write_text("gpu")
    provisioner.write_text("controller")
    async with (
        NatsServer(binary=nats_binary, config=render_permissions()) as server,
        Bus.session(
            NatsSettings(url=server.url, user="controller", password_file=str(provisioner)), name="controller"
        ) as controller,
        Bus.session(NatsSettings(url=server.url, user="gpu", password_file=str(password)), name="gpu") as bus,
    ):
        await controller.provision()
        await bus.provision()
        await _publish(bus, "gpu-0", 1)
        process = await _start(example, server.url.replace("nats://", "nats://user:user@"))
        try:
            assert await _read(process, 1) == [("gpu-0", 1)]
        finally:
            process.kill()
            await process.wait()


async def test_example_comes_by_tls_with_a_password_file_when_the_server_listens_for_others(
    example: Command, nats_binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the server of `topobus up --listen`, with its accounts and its own authority: present,
    changes, and those after the user's password was made anew.
    """
    layout = launched_layout(tmp_path, nats_binary, monkeypatch)
    async with Supervisor(tmp_path / "logs") as supervisor, asyncio.timeout(120):
        certificate = await asyncio.to_thread(
            NatsCertificate, Listening(address="0.0.0.0"), layout.nats_tls, layout.authority
        )
        assert certificate.authority_file, "on loopback alone the server would have no TLS"
        url = await start_nats(
            supervisor, layout, size_store(layout.nats), lambda _: None, is_open=False, certificate=certificate
        )
        system = System(
            layout=layout,
            node="n1",
            nats_url=url,
            supervisor=supervisor,
            has_users=True,
            tls_ca_file=certificate.authority_file,
        )
        async with (
            Bus.session(system.settings_of("controller"), name="controller") as controller,
            Bus.session(system.settings_of("gpu"), name="gpu") as bus,
        ):
            await controller.provision()
            await _publish(bus, "gpu-0", 1)
            files = {"NATS_CA": system.tls_ca_file, "NATS_PASSWORD_FILE": str(system.password_file("user"))}
            process = await _start(example, url.replace("nats://", "tls://"), NATS_API="$JS.topobus.API", **files)
            try:
                present = await _read(process, 1, limit_s=_LIMIT_S)
                await _publish(bus, "gpu-0", 2)
                changes = await _read(process, 1, limit_s=_LIMIT_S)
                old = await _connected_as_user(system)
                assert await asyncio.to_thread(run, ["keys", "rotate", str(layout.nats_users), "user"]) == 0
                # The server ends this user's connections when it has read the new
                # password, the example's among them.
                await old.wait()
                await _publish(bus, "gpu-0", 3)
                after = await _read(process, 1, limit_s=_LIMIT_S)
            finally:
                process.kill()
                await process.wait()

    assert (present, changes, after) == ([("gpu-0", 1)], [("gpu-0", 2)], [("gpu-0", 3)])


async def test_example_says_no_password_when_the_server_offers_no_tls(program: Path, tmp_path: Path) -> None:
    """Somebody in the server's place who leaves TLS out is told nothing: the examples in Go end the
    connection before their login.
    """
    (tmp_path / "password").write_text("secret")
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"n","tls_required":false}\r\n')
        heard.put_nowait(await reader.read())
        writer.close()

    async with asyncio.timeout(_LIMIT_S), await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        process = await _start(
            (str(program),), f"tls://127.0.0.1:{port}", NATS_PASSWORD_FILE=str(tmp_path / "password")
        )
        try:
            first = await heard.get()
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    assert first == b""


async def test_python_example_says_in_one_line_what_is_wrong_and_goes_on_when_it_is_mended(
    tmp_path: Path, own_nats_server: NatsServer
) -> None:
    """A server that is away: what, where and what to look at, once, without a traceback and without
    the password.

    Then as if it had been there.
    """
    await own_nats_server.stop()
    process = await _start(
        (sys.executable, str(EXAMPLE)), own_nats_server.url.replace("//", "//user:secret@"), asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(_LIMIT_S):
            first = (await process.stderr.readline()).decode()
            await own_nats_server.start()
            async with Bus.session(NatsSettings(url=own_nats_server.url), name="gpu") as bus:
                await bus.provision()
                await _publish(bus, "gpu-0", 1)
                present = await _read(process, 1, limit_s=_LIMIT_S)
    finally:
        process.kill()
        _, rest = await process.communicate()

    server = own_nats_server.url.removeprefix("nats://")
    assert (
        first.startswith(f"NATS at {server}: "),
        "Connect call failed" in first,
        "the login that of `user`" in first,
    ) == (True,) * 3
    assert (present, rest.decode()) == ([("gpu-0", 1)], "")


async def test_python_example_says_each_trouble_once_when_its_login_is_refused(nats_binary: Path) -> None:
    """nats-py tries again each two seconds, and hears now and then the end of the connection before
    the reason.
    """
    async with NatsServer(binary=nats_binary, config="authorization { user: user, password: right }") as server:
        process = await _start(
            (sys.executable, str(EXAMPLE)), server.url.replace("//", "//user:wrong@"), asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        said = []
        async with asyncio.timeout(_LIMIT_S):
            while not said or "Authorization Violation" not in said[-1]:
                said.append((await process.stderr.readline()).decode())
        process.kill()
        _, rest = await process.communicate()

    said += rest.decode().splitlines(keepends=True)
    start = f"NATS at {server.url.removeprefix('nats://')}: "
    assert [line for line in said if not line.startswith(start) or "wrong" in line] == []
    assert len(said) == len(set(said))


async def test_nats_go_example_ends_with_one_line_when_its_login_is_refused(
    nats_go_program: Path, nats_binary: Path
) -> None:
    """Whoever typed a wrong password is told so, and by whom, without the password and without an
    end of tries.
    """
    async with NatsServer(binary=nats_binary, config="authorization { user: user, password: right }") as server:
        process = await _start(
            (str(nats_go_program),), server.url.replace("//", "//user:wrong@"), asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(_LIMIT_S):
            printed, said = await process.communicate()

    assert (process.returncode, printed, said.decode().count("\n")) == (1, b"", 1)
    assert (
        f"{server.url.replace('//', '//user:xxxxx@')} refuses this login: wanted NATS' user `user` with its password"
        in said.decode()
    )


async def test_nats_go_example_tells_a_gap_and_a_reconnect_when_they_happen(
    nats_go_program: Path, own_nats_server: NatsServer, own_bus: Bus
) -> None:
    """What a reader of the events cannot see in them is said on standard error: when the server was
    away, and what was not to be had any more.
    """
    await _publish(own_bus, "gpu-0", 1)
    process = await _start((str(nats_go_program),), own_nats_server.url, asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        present = await _read(process, 1)
        await own_nats_server.stop()
        async with asyncio.timeout(_LIMIT_S):
            away = (await process.stderr.readline()).decode()
            await own_nats_server.start()
            while "again; going on" not in (back := (await process.stderr.readline()).decode()):
                pass
        await _publish(own_bus, "gpu-0", 4)
        changes = await _read(process, 1)
        async with asyncio.timeout(_LIMIT_S):
            gap = (await process.stderr.readline()).decode()
    finally:
        process.kill()
        await process.wait()

    assert (present, changes) == ([("gpu-0", 1)], [("gpu-0", 4)])
    assert "connection closed; trying again each second" in away
    assert back == (
        f"go-nats-health-subscriber: connected to {own_nats_server.url} again; going on after place 1 of the stream\n"
    )
    assert gap.endswith(": 2 events between generations 1 and 4 were not to be had any more\n")


def test_example_has_at_most_fifty_statements_when_it_is_counted() -> None:
    """It is read in a minute: that is what it promises to a reader."""
    tree = ast.parse(EXAMPLE.read_text(encoding="utf-8"))

    assert sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) <= 50
