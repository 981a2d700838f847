"""Secrets of NATS' users in a cluster: made once, completed after any death, never written over.

A real server and our own services live by them.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
import pytest_asyncio

from support.key_secrets import NAMESPACE, Killed, mortal_client, objects_of, secret_data, server_with_rights
from support.kustomize import built, container_of, named
from topobus.bus.login.user_keys import split_login
from topobus.bus.server_config.nats_permissions import PRINCIPALS
from topobus.cli.application import run
from topobus.keys.cluster_secrets import forget_previous_passwords, make_users, rotate_users
from topobus.keys.namespace_objects import NamespaceObjects
from topobus.keys.secret_objects import AUTHORITY_MAP, SERVER_SECRET, TLS_SECRET, user_secret
from topobus.kubernetes.client import KubernetesClient
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator
from topobus.values.errors import ConfigError

pytestmark = pytest.mark.integration

_LIMIT_S = 60.0
_JOB = "system:serviceaccount:topobus:topobus-keys"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ApiServerSimulator]:
    """An API server with the rights of deploy/kubernetes, and nothing else."""
    async with server_with_rights() as simulator:
        yield simulator


def _foreign(name: str, password: str) -> dict[str, object]:
    data = {"password": base64.b64encode(password.encode()).decode()}
    return {"kind": "Secret", "metadata": {"name": name, "namespace": NAMESPACE}, "type": "Opaque", "data": data}


def _is_complete(data: dict[str, dict[str, str]]) -> bool:
    """Say whether each principal has a password that the server's file has, too."""
    users = data.get(SERVER_SECRET, {}).get("users.conf", "")
    return all(
        f'TOPOBUS_{principal.upper()}_PASSWORD: "{data[user_secret(principal)]["password"].strip()}"' in users
        for principal in PRINCIPALS
    )


async def test_secrets_are_completed_when_the_job_was_killed_at_any_step(
    server: ApiServerSimulator, tmp_path: Path
) -> None:
    """Each run goes on from what the one before left, and is killed one step later: before a
    request, or after it is done. No password that was there changes.
    """
    kills = 0
    left: dict[str, dict[str, str]] = {}
    async with mortal_client(server, tmp_path, user=_JOB) as client:
        for step in range(1000):
            client.die_in(step)
            try:
                await make_users(NamespaceObjects(client, NAMESPACE))
            except Killed:
                kills += 1
            else:
                break
            present = secret_data(server)
            assert present.items() >= left.items()
            left = present

    assert _is_complete(secret_data(server))
    assert secret_data(server) == left
    # Two at the write of each user, two at the last look at each, the same for the server, and two
    # at the first look at it: for which classes it has users.
    assert kills == 2 * (2 * len(PRINCIPALS) + 3)


async def test_nothing_is_written_when_all_is_there(server: ApiServerSimulator, tmp_path: Path) -> None:
    """A second run changes no Secret, not even its version."""
    async with objects_of(server, tmp_path, user=_JOB) as objects:
        await make_users(objects)
    before = server.objects("Secret")
    async with objects_of(server, tmp_path, user=_JOB) as objects:
        await make_users(objects)

    assert objects.written == []
    assert server.objects("Secret") == before
    assert len({data["password"] for name, data in secret_data(server).items() if name != SERVER_SECRET}) == len(
        PRINCIPALS
    )


async def test_class_of_ones_own_has_a_user_until_the_secrets_are_gone(
    server: ApiServerSimulator, tmp_path: Path
) -> None:
    """A later run that names no class keeps its user, and a rotation of everybody's password takes
    it along.
    """
    async with objects_of(server, tmp_path) as objects:
        await make_users(objects, classes=("npu",))
        first = secret_data(server)
        await make_users(objects)
        second = secret_data(server)
        rotated = await rotate_users(objects, (), server_after_s=0)
        last = secret_data(server)

    assert first == second
    assert f'TOPOBUS_NPU_PASSWORD: "{first[user_secret("npu")]["password"]}"' in first[SERVER_SECRET]["users.conf"]
    assert "npu" in rotated
    assert last[user_secret("npu")]["password"] != first[user_secret("npu")]["password"]
    assert f'TOPOBUS_NPU_PASSWORD: "{last[user_secret("npu")]["password"]}"' in last[SERVER_SECRET]["users.conf"]


async def test_two_jobs_agree_when_they_run_at_once(server: ApiServerSimulator, tmp_path: Path) -> None:
    """Whoever comes second takes what the first one made."""
    async with objects_of(server, tmp_path, user=_JOB) as first, objects_of(server, tmp_path, user=_JOB) as second:
        await asyncio.gather(make_users(first), make_users(second))

    assert _is_complete(secret_data(server))
    # Each Secret was made by one of the two; the server's may have been written by both.
    assert sorted(name for name in first.written + second.written if name != SERVER_SECRET) == sorted(
        map(user_secret, PRINCIPALS)
    )


async def test_secret_of_somebody_else_is_taken_as_it_is(server: ApiServerSimulator, tmp_path: Path) -> None:
    """A password that was there beforehand counts at the server, and is changed by nobody here, on
    demand either.

    A Secret of another name is not looked at.
    """
    for name in (user_secret("gpu"), "another"):
        server.put(_foreign(name, "pfromavault0123456789"))
    before = [
        secret for secret in server.objects("Secret") if secret["metadata"]["name"] in (user_secret("gpu"), "another")
    ]
    async with objects_of(server, tmp_path, user=_JOB) as objects:
        await make_users(objects)
    async with objects_of(server, tmp_path) as objects:
        with pytest.raises(ConfigError, match="topobus-nats-gpu was not made here"):
            await rotate_users(objects, ["nic", "gpu"], server_after_s=0.0)

    assert objects.written == []
    assert [
        secret for secret in server.objects("Secret") if secret["metadata"]["name"] in (user_secret("gpu"), "another")
    ] == before
    assert _is_complete(secret_data(server))
    assert not [request for request in server.requests if request.path.endswith("/another")]


async def test_secret_without_a_usable_password_is_named_when_the_server_would_misread_it(
    server: ApiServerSimulator, tmp_path: Path
) -> None:
    """A password that could end the server's file, or be read as a number, is refused with the
    Secret's name and without the password.
    """
    server.put(_foreign(user_secret("gpu"), 'short" }'))
    async with objects_of(server, tmp_path, user=_JOB) as objects:
        with pytest.raises(ConfigError, match="Secret topobus-nats-gpu: its password has 8 characters") as refusal:
            await make_users(objects)

    assert "short" not in str(refusal.value)
    assert SERVER_SECRET not in secret_data(server)


async def test_servers_file_has_the_newest_passwords_when_it_is_derived_at_the_same_time(
    server: ApiServerSimulator, tmp_path: Path
) -> None:
    """While passwords change, runs of the Job derive the server's file.

    None writes an older state over a newer one.
    """
    async with objects_of(server, tmp_path) as objects:
        await make_users(objects)
        for _ in range(2):
            async with objects_of(server, tmp_path) as other:
                await asyncio.gather(
                    rotate_users(objects, ["gpu", "nic", "cli"], server_after_s=0.0),
                    make_users(other),
                    rotate_users(other, ["gpu"], server_after_s=0.0),
                )

            assert _is_complete(secret_data(server))


async def test_both_passwords_count_when_they_are_changed_with_an_overlap_until_they_are_forgotten(
    server: ApiServerSimulator, tmp_path: Path, nats_binary: Path
) -> None:
    """A server that reads the file takes either; a second rotation keeps the one before it alone.

    After `forget` the newest alone. Others' clients keep what they have.
    """

    async def accepted() -> set[str]:
        """Give the passwords that a server with the Secret's file takes, of all that there ever
        were.
        """
        config = secret_data(server)[SERVER_SECRET]["users.conf"]
        texts.extend(text for text in (secret_data(server)[user_secret("nic")]["password"],) if text not in texts)
        taken = set()
        async with NatsServer(binary=nats_binary, config=config) as nats_server:
            for text in texts:
                user, password = split_login("nic", text)
                if await _is_taken(nats_server.url, user, password):
                    taken.add(text)
        return taken

    texts: list[str] = []
    async with objects_of(server, tmp_path) as objects:
        await make_users(objects)
        before = secret_data(server)
        counting = [await accepted()]
        for _ in range(2):
            changed = await rotate_users(objects, (), server_after_s=0.0, is_overlapping=True)
            counting.append(await accepted())
        # What a run of the Job derives at any moment has both, too.
        await make_users(objects)
        counting.append(await accepted())
        forgotten = await forget_previous_passwords(objects)
        counting.append(await accepted())
        again = await forget_previous_passwords(objects)

    first, second, third = texts
    assert second.startswith("nic__2:")
    assert counting == [{first}, {first, second}, {second, third}, {second, third}, {third}]
    assert changed == forgotten == tuple(user for user in sorted(PRINCIPALS) if user not in ("user", "verdicts"))
    assert again == ()
    assert secret_data(server)[user_secret("user")] == before[user_secret("user")]
    assert "previous" not in secret_data(server)[user_secret("nic")]


async def test_overlap_is_completed_when_the_command_was_killed_at_any_write(
    server: ApiServerSimulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever rotate or forget dies, before or after it wrote, the passwords that a pod has count
    at the server after the next `make`.
    """
    kills = 0
    async with objects_of(server, tmp_path) as objects:
        await make_users(objects)
    for act in ("rotate", "forget"):
        for step in range(1000):
            async with mortal_client(server, tmp_path) as client:
                client.die_in(step)
                monkeypatch.setattr(client, "ask", partial(_ask_or_die, client, client.ask))
                mortal = NamespaceObjects(client, NAMESPACE)
                try:
                    if act == "rotate":
                        await rotate_users(mortal, ["gpu"], server_after_s=0.0, is_overlapping=True)
                    else:
                        await forget_previous_passwords(mortal)
                except Killed:
                    kills += 1
                else:
                    break
            async with objects_of(server, tmp_path) as objects:
                await make_users(objects)
            data = secret_data(server)
            for text in (data[user_secret("gpu")]["password"], data[user_secret("gpu")].get("previous", "")):
                assert not text or f'"{split_login("gpu", text)[1]}"' in data[SERVER_SECRET]["users.conf"]

    # Two at each of the two writes of a rotation; what a `make` completed,
    # `forget` need not write again.
    assert kills == 4 + 2
    assert list(secret_data(server)[user_secret("gpu")]) == ["password", "username"]


async def _ask_or_die(client: KubernetesClient, mortal_ask: Any, method: str, path: str, **more: Any) -> Any:
    """Let a client die at what it writes alone: reads change nothing, and there are hundreds of
    them.
    """
    return await (
        KubernetesClient.ask(client, method, path, **more) if method == "GET" else mortal_ask(method, path, **more)
    )


async def _is_taken(url: str, user: str, password: str) -> bool:
    try:
        client = await nats.connect(url, user=user, password=password, allow_reconnect=False, max_reconnect_attempts=1)
    except nats.errors.Error:
        return False
    await client.close()
    return True


async def test_job_needs_every_right_that_it_has_and_no_other(server: ApiServerSimulator, tmp_path: Path) -> None:
    """The Job's command, with its account's token: at the first apply, and at a second one when
    everything that it may write anew is to be.
    """
    kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig", user=_JOB)
    job = named(built("kubernetes"), "Job", "topobus-keys")["spec"]["template"]["spec"]
    arguments = [*container_of(job, "keys")["args"], "--kubeconfig", str(kubeconfig), "--json"]
    assert await asyncio.to_thread(run, arguments) == 0
    made = secret_data(server)
    certificate = made[TLS_SECRET]["tls.crt"]
    for kind, name, data in (
        ("Secret", SERVER_SECRET, {"users.conf": base64.b64encode(b"# of other rights\n").decode()}),
        (
            "Secret",
            TLS_SECRET,
            {"tls.crt": "", "tls.key": base64.b64encode(made[TLS_SECRET]["tls.key"].encode()).decode()},
        ),
        ("ConfigMap", AUTHORITY_MAP, {"ca.crt": "of another authority"}),
    ):
        server.put(named(server.objects(kind), kind, name) | {"data": data})
    assert await asyncio.to_thread(run, arguments) == 0

    present = secret_data(server)
    assert present[TLS_SECRET].pop("tls.crt") != made[TLS_SECRET].pop("tls.crt") == certificate
    assert present == made
    assert named(server.objects("ConfigMap"), "ConfigMap", AUTHORITY_MAP)["data"] == {
        "ca.crt": made[TLS_SECRET]["ca.crt"]
    }
    assert [(request.method, request.path) for request in server.requests if request.code in (401, 403)] == []
    assert {str(right) for right in server.rights_unused(_JOB)} == set()
    assert job["serviceAccountName"] == _JOB.rpartition(":")[2]


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
