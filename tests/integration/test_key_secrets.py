"""Secrets of NATS' users in a cluster: made once, completed after any death, never written over; a real server and our own services live by them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import nats.errors
import pytest
import pytest_asyncio

from support.gateway_rig import WatchedReadiness
from support.key_secrets import NAMESPACE, Killed, mortal_client, mounted, secret_data, secrets_of
from support.kustomize import built, container_of, named, pod_of
from topobus.cli.application import run
from topobus.cli.secrets.cluster_secrets import ClusterSecrets
from topobus.cli.secrets.secret_objects import SERVER_SECRET, user_secret
from topobus.contracts.catalogue import DEVICE_SERVICES
from topobus.contracts.inboxes import connection_name
from topobus.contracts.nats_permissions import PRINCIPALS
from topobus.domain.errors import ConfigError
from topobus.runtime.bus import Bus
from topobus.runtime.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator

pytestmark = pytest.mark.integration

_LIMIT_S = 60.0
_JOB = "system:serviceaccount:topobus:topobus-keys"
_ROLES = ("Role", "RoleBinding")


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ApiServerSimulator]:
    """An API server with the rights of deploy/kubernetes, and nothing else."""
    simulator = ApiServerSimulator(token="admin")
    for manifest in built("kubernetes"):
        if manifest["kind"] in _ROLES:
            simulator.put(manifest)
    async with simulator:
        yield simulator


def _foreign(name: str, password: str) -> dict[str, object]:
    data = {"password": base64.b64encode(password.encode()).decode()}
    return {"kind": "Secret", "metadata": {"name": name, "namespace": NAMESPACE}, "type": "Opaque", "data": data}


def _is_complete(data: dict[str, dict[str, str]]) -> bool:
    """Say whether each principal has a password that the server's file has, too."""
    users = data.get(SERVER_SECRET, {}).get("users.conf", "")
    return all(
        f'TOPOBUS_{principal.upper()}_PASSWORD: "{data[user_secret(principal)]["password"].strip()}"' in users for principal in PRINCIPALS
    )


async def test_secrets_are_completed_when_the_job_was_killed_at_any_step(server: ApiServerSimulator, tmp_path: Path) -> None:
    """Killed before and after each of its requests, it leaves what the next run completes; no password that was there changes."""
    kills = 0
    async with mortal_client(server, tmp_path, user=_JOB) as client:
        for step in range(1000):
            for secret in server.objects("Secret"):
                server.remove("Secret", secret["metadata"]["name"], namespace=NAMESPACE)
            client.die_in(step)
            try:
                await ClusterSecrets(client, NAMESPACE).make()
            except Killed:
                kills += 1
            else:
                break
            left = secret_data(server)
            client.die_in(-1)
            await ClusterSecrets(client, NAMESPACE).make()
            completed = secret_data(server)

            assert {name: completed.get(name) for name in left if name != SERVER_SECRET} == {
                name: data for name, data in left.items() if name != SERVER_SECRET
            }
            assert _is_complete(completed)
    # Two at each request: a read and a write for each user and the server, and a look at all of them.
    assert kills == 2 * (3 * len(PRINCIPALS) + 2)


async def test_nothing_is_written_when_all_is_there(server: ApiServerSimulator, tmp_path: Path) -> None:
    """A second run changes no Secret, not even its version."""
    async with secrets_of(server, tmp_path, user=_JOB) as secrets:
        await secrets.make()
    before = server.objects("Secret")
    async with secrets_of(server, tmp_path, user=_JOB) as secrets:
        await secrets.make()

    assert secrets.written == []
    assert server.objects("Secret") == before
    assert len({data["password"] for name, data in secret_data(server).items() if name != SERVER_SECRET}) == len(PRINCIPALS)


async def test_two_jobs_agree_when_they_run_at_once(server: ApiServerSimulator, tmp_path: Path) -> None:
    """Whoever comes second takes what the first one made."""
    async with secrets_of(server, tmp_path, user=_JOB) as first, secrets_of(server, tmp_path, user=_JOB) as second:
        await asyncio.gather(first.make(), second.make())

    assert _is_complete(secret_data(server))
    # Each Secret was made by one of the two; the server's may have been written by both.
    assert sorted(name for name in first.written + second.written if name != SERVER_SECRET) == sorted(map(user_secret, PRINCIPALS))


async def test_secret_of_somebody_else_is_taken_as_it_is(server: ApiServerSimulator, tmp_path: Path) -> None:
    """A password that was there beforehand counts at the server, and is changed by nobody here, on demand either; a Secret of another name is not looked at."""
    for name in (user_secret("gpu"), "another"):
        server.put(_foreign(name, "pfromavault0123456789"))
    before = [secret for secret in server.objects("Secret") if secret["metadata"]["name"] in (user_secret("gpu"), "another")]
    async with secrets_of(server, tmp_path, user=_JOB) as secrets:
        await secrets.make()
    async with secrets_of(server, tmp_path) as secrets:
        with pytest.raises(ConfigError, match="topobus-nats-gpu was not made here"):
            await secrets.rotate(["nic", "gpu"], server_after_s=0.0)

    assert secrets.written == []
    assert [secret for secret in server.objects("Secret") if secret["metadata"]["name"] in (user_secret("gpu"), "another")] == before
    assert _is_complete(secret_data(server))
    assert not [request for request in server.requests if request.path.endswith("/another")]


async def test_secret_without_a_usable_password_is_named_when_the_server_would_misread_it(
    server: ApiServerSimulator, tmp_path: Path
) -> None:
    """A password that could end the server's file, or be read as a number, is refused with the Secret's name and without the password."""
    server.put(_foreign(user_secret("gpu"), 'short" }'))
    async with secrets_of(server, tmp_path, user=_JOB) as secrets:
        with pytest.raises(ConfigError, match="Secret topobus-nats-gpu: its password has 8 characters") as refusal:
            await secrets.make()

    assert "short" not in str(refusal.value)
    assert SERVER_SECRET not in secret_data(server)


async def test_servers_file_has_the_newest_passwords_when_it_is_derived_at_the_same_time(
    server: ApiServerSimulator, tmp_path: Path
) -> None:
    """While passwords change, runs of the Job derive the server's file; none writes an older state over a newer one."""
    async with secrets_of(server, tmp_path) as secrets:
        await secrets.make()
        for _ in range(5):
            async with secrets_of(server, tmp_path) as other:
                await asyncio.gather(
                    secrets.rotate(PRINCIPALS, server_after_s=0.0), other.make(), other.rotate(["gpu"], server_after_s=0.0)
                )

            assert _is_complete(secret_data(server))


async def test_job_needs_every_right_that_it_has_and_no_other(server: ApiServerSimulator, tmp_path: Path) -> None:
    """The Job's command, with its account's token: at the first apply, at a second one, and after a release that gives users other rights."""
    kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig", user=_JOB)
    job = named(built("kubernetes"), "Job", "topobus-keys")["spec"]["template"]["spec"]
    arguments = [*container_of(job, "keys")["args"], "--kubeconfig", str(kubeconfig), "--json"]
    assert await asyncio.to_thread(run, arguments) == 0
    made = secret_data(server)
    (server_secret,) = [secret for secret in server.objects("Secret") if secret["metadata"]["name"] == SERVER_SECRET]
    server.put(server_secret | {"data": {"users.conf": base64.b64encode(b"# of another release\n").decode()}})
    assert await asyncio.to_thread(run, arguments) == 0

    assert secret_data(server) == made
    assert [(request.method, request.path) for request in server.requests if request.code in (401, 403)] == []
    assert {str(right) for right in server.rights_unused(_JOB)} == set()
    assert job["serviceAccountName"] == _JOB.rpartition(":")[2]


class _Cluster:
    """The Secrets as files of pods: each user's folder, and the server's."""

    def __init__(self, server: ApiServerSimulator, folder: Path) -> None:
        self._server = server
        self._folder = folder

    def sync(self) -> None:
        """Do what kubelet does: lay the Secrets into the pods as they are now."""
        for name, data in secret_data(self._server).items():
            mounted(data, self._folder / name)

    @property
    def users_file(self) -> Path:
        """The server's users."""
        return self._folder / SERVER_SECRET / "users.conf"

    def settings(self, url: str, principal: str, *, password_of: str = "") -> NatsSettings:
        """Give the settings of a user's pod."""
        file = self._folder / user_secret(password_of or principal) / "password"
        zone = "vendor" if principal in DEVICE_SERVICES or principal == "user" else "core"
        return NatsSettings(url=url, user=principal, password_file=str(file), zone=zone, timeout_s=_LIMIT_S)

    async def is_refused(self, url: str, principal: str, *, password_of: str) -> bool:
        """Say whether a login is refused as one."""
        password = (self._folder / user_secret(password_of) / "password").read_text().strip()
        try:
            client = await nats.connect(url, user=principal, password=password, allow_reconnect=False, connect_timeout=int(_LIMIT_S))
        except nats.errors.Error as err:
            if "authorization violation" not in str(err).lower():
                raise
            return True
        await client.close()
        return False


@pytest_asyncio.fixture
async def cluster(server: ApiServerSimulator, tmp_path: Path) -> _Cluster:
    """The Secrets are made, and laid into pods."""
    async with secrets_of(server, tmp_path) as secrets:
        await secrets.make()
    made = _Cluster(server, tmp_path / "pods")
    made.sync()
    return made


async def test_each_user_is_let_in_with_its_own_secret(cluster: _Cluster, nats_binary: Path) -> None:
    """A server with the file out of its Secret knows all users; nobody comes in with another's password. The controller makes the streams, where others read."""
    async with (
        NatsServer(binary=nats_binary, config=cluster.users_file.read_text()) as nats_server,
        asyncio.timeout(_LIMIT_S),
        Bus.session(cluster.settings(nats_server.url, "controller"), name="controller") as controller,
    ):
        await controller.provision()
        for number, principal in enumerate(PRINCIPALS):
            async with Bus.session(cluster.settings(nats_server.url, principal), name=connection_name(principal)) as bus:
                assert bus.is_connected
                assert bus.wants_login
            assert await cluster.is_refused(nats_server.url, principal, password_of=PRINCIPALS[number - 1])


async def test_new_password_counts_without_a_restart(
    cluster: _Cluster, server: ApiServerSimulator, nats_binary: Path, tmp_path: Path
) -> None:
    """The script of the manifest tells the server; the service comes back by itself with what stands in its file, its neighbours stay connected."""
    script = tmp_path / "reload.sh"
    script.write_text(named(built("kubernetes"), "ConfigMap", "nats-scripts")["data"]["reload.sh"])
    command = container_of(pod_of(built("kubernetes"), "StatefulSet", "nats"), "reload")["command"]
    pid_file = tmp_path / "nats.pid"
    nats_server = NatsServer(binary=nats_binary, config=f'pid_file: "{pid_file}"\ninclude users/users.conf\n')
    (nats_server.folder / "users").symlink_to(cluster.users_file.parent)
    readiness = WatchedReadiness()
    async with nats_server, asyncio.timeout(_LIMIT_S):
        environment = {**os.environ, "FILES": str(cluster.users_file), "PID_FILE": str(pid_file), "PERIOD_S": "0.1"}
        reload = await asyncio.create_subprocess_exec(*command[:1], str(script), env=environment, stderr=subprocess.DEVNULL)
        gpu = await Bus.connect(cluster.settings(nats_server.url, "gpu"), name="gpu", readiness=readiness)
        nic = await Bus.connect(cluster.settings(nats_server.url, "nic"), name="nic")
        try:
            before = secret_data(server)[user_secret("gpu")]["password"].strip()
            async with secrets_of(server, tmp_path) as secrets:
                await secrets.rotate(["gpu"], server_after_s=0.0)
            cluster.sync()
            await readiness.until(lambda parts: gpu._connection.generation > 1 and parts["bus"] == "ready", timeout_s=_LIMIT_S)

            with pytest.raises(nats.errors.Error, match=r"(?i)authorization violation"):
                await nats.connect(nats_server.url, user="gpu", password=before, allow_reconnect=False)
            assert nic._connection.generation == 1
        finally:
            await gpu.close()
            await nic.close()
            reload.terminate()
            await reload.wait()
    assert command[1] == "/etc/nats-scripts/reload.sh"


def test_password_is_shown_to_its_owner(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`keys secrets show` prints what the Secret holds, and says what to do where there is none."""

    async def shown() -> tuple[int, int, str]:
        async with ApiServerSimulator() as server:
            kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig")
            more = ["--kubeconfig", str(kubeconfig), "--json"]
            missing = await asyncio.to_thread(run, ["keys", "secrets", "show", NAMESPACE, "cli", *more])
            await asyncio.to_thread(run, ["keys", "secrets", "make", NAMESPACE, *more])
            capsys.readouterr()
            code = await asyncio.to_thread(run, ["keys", "secrets", "show", NAMESPACE, "cli", *more])
            return missing, code, secret_data(server)[user_secret("cli")]["password"].strip()

    missing, code, password = asyncio.run(shown())

    assert (missing, code) == (78, 0)
    assert json.loads(capsys.readouterr().out) == {"password": password, "user": "cli"}
