"""A real nats-server with TLS and users out of the Secrets of a cluster: certificates are made
once, and completed after any death; our own services live by them.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import subprocess
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import nats
import nats.errors
import pytest
import pytest_asyncio

from support.gateway_rig import WatchedReadiness
from support.key_secrets import (
    NAMESPACE,
    Killed,
    PodFiles,
    mortal_client,
    objects_of,
    secret_data,
    server_with_rights,
    trusted_authorities,
)
from support.kustomize import built, named
from support.tls_front import Authority
from topobus.bus.bus import Bus
from topobus.bus.login.certificate_facts import day, read_certificates
from topobus.bus.server_config.inboxes import connection_name
from topobus.bus.server_config.nats_permissions import PRINCIPALS
from topobus.keys.cluster_certificates import make_certificate, server_names
from topobus.keys.cluster_secrets import make_users, rotate_users
from topobus.keys.namespace_objects import NamespaceObjects
from topobus.keys.secret_objects import AUTHORITY_MAP, AUTHORITY_SECRET, TLS_SECRET
from topobus.testing.apiserver import ApiServerSimulator
from topobus.values.errors import ConfigError

pytestmark = pytest.mark.integration

_LIMIT_S = 60.0
_JOB = "system:serviceaccount:topobus:topobus-keys"
_NAMES = server_names(NAMESPACE)
_REFUSED = r"(?i)authorization violation"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ApiServerSimulator]:
    """An API server with the rights of deploy/kubernetes, and nothing else."""
    async with server_with_rights() as simulator:
        yield simulator


def _now() -> datetime:
    return datetime.now(UTC)


def _is_good(server: ApiServerSimulator, folder: Path) -> bool:
    """Say whether a server with the Secret's key and certificate is one that clients with the
    ConfigMap trust, by any of its names; both by OpenSSL.
    """
    data = secret_data(server)[TLS_SECRET]
    folder.mkdir(exist_ok=True)
    for name in ("tls.crt", "tls.key"):
        (folder / name).write_text(data[name])
    (folder / "ca.crt").write_text(trusted_authorities(server))
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(folder / "tls.crt", folder / "tls.key")
    checked = subprocess.run(
        [
            "openssl",
            "verify",
            "-x509_strict",
            "-purpose",
            "sslserver",
            "-verify_hostname",
            "nats-0.nats.topobus.svc",
            "-CAfile",
            folder / "ca.crt",
            folder / "tls.crt",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return checked.returncode == 0 and {*read_certificates(folder / "tls.crt")[0].names} >= {*_NAMES}


async def test_certificate_is_completed_when_the_job_was_killed_at_any_step(
    server: ApiServerSimulator, tmp_path: Path
) -> None:
    """Killed before and after each of its requests, it leaves what the next run completes.

    Authority and key that were there stay.
    """
    kills = 0
    async with mortal_client(server, tmp_path, user=_JOB) as client:
        for step in range(1000):
            for kind in ("Secret", "ConfigMap"):
                for api_object in server.objects(kind):
                    server.remove(kind, api_object["metadata"]["name"], namespace=NAMESPACE)
            client.die_in(step)
            try:
                await make_certificate(NamespaceObjects(client, NAMESPACE), _NAMES, now=_now())
            except Killed:
                kills += 1
            else:
                break
            left = secret_data(server)
            client.die_in(-1)
            await make_certificate(NamespaceObjects(client, NAMESPACE), _NAMES, now=_now())

            assert secret_data(server).items() >= left.items()
            assert _is_good(server, tmp_path / "checked")
    # Two reads and two Secrets to write, and the same for what clients
    # trust, with two deaths at each.
    assert kills == 2 * (2 + 2 + 1 + 1)


async def test_nothing_is_written_when_the_certificate_is_good(server: ApiServerSimulator, tmp_path: Path) -> None:
    """A second run changes nothing.

    One in the last third of the certificate's year makes another one for the
    same key, by the same authority.
    """
    async with objects_of(server, tmp_path, user=_JOB) as objects:
        await make_certificate(objects, _NAMES, now=_now())
        first = secret_data(server)
        await make_certificate(objects, _NAMES, now=_now())
        assert objects.written == [AUTHORITY_SECRET, TLS_SECRET, AUTHORITY_MAP]
        made = await make_certificate(objects, _NAMES, now=_now() + timedelta(days=300))
    second = secret_data(server)

    assert objects.written[3:] == [TLS_SECRET]
    assert day(_now() + timedelta(days=665)) == day(made.facts.not_after)
    assert first[TLS_SECRET].pop("tls.crt") != second[TLS_SECRET].pop("tls.crt")
    assert first == second


async def test_two_runs_agree_when_they_make_certificates_at_once(server: ApiServerSimulator, tmp_path: Path) -> None:
    """One authority, one certificate by it."""
    async with objects_of(server, tmp_path, user=_JOB) as first, objects_of(server, tmp_path, user=_JOB) as second:
        await asyncio.gather(*(make_certificate(objects, _NAMES, now=_now()) for objects in (first, second)))

    assert sorted(first.written + second.written) == sorted([AUTHORITY_SECRET, TLS_SECRET, AUTHORITY_MAP])
    assert _is_good(server, tmp_path / "checked")


def _put_certificate(
    server: ApiServerSimulator, authority: Authority, name: str, *, with_authority: bool = True
) -> None:
    """Lay a certificate as cert-manager does."""
    made = authority.issue(name, addresses=",".join(f"DNS:{each}" for each in _NAMES if each[0] != "1"))
    files = {
        "tls.crt": made.certificate,
        "tls.key": made.key,
        **({"ca.crt": authority.own.certificate} if with_authority else {}),
    }
    data = {key: base64.b64encode(file.read_bytes()).decode() for key, file in files.items()}
    annotations = {"cert-manager.io/certificate-name": "topobus-nats"}
    metadata = {"name": TLS_SECRET, "namespace": NAMESPACE, "annotations": annotations}
    server.put({"kind": "Secret", "metadata": metadata, "type": "kubernetes.io/tls", "data": data})


async def test_certificate_of_cert_manager_is_taken_as_it_is(server: ApiServerSimulator, tmp_path: Path) -> None:
    """No authority is made, the Secret stays, and clients trust its authority.

    Also another one, when cert-manager has it renewed by that.
    """
    authorities = [Authority(tmp_path / name, name) for name in ("first", "second")]
    async with objects_of(server, tmp_path, user=_JOB) as objects:
        for authority in authorities:
            _put_certificate(server, authority, "nats")
            before = server.objects("Secret")
            made = await make_certificate(objects, _NAMES, now=_now())

            assert not made.is_ours
            assert server.objects("Secret") == before
            assert trusted_authorities(server) == authority.own.certificate.read_text()
    assert objects.written == [AUTHORITY_MAP] * 2


async def test_certificate_of_a_public_authority_wants_to_know_whom_to_trust(
    server: ApiServerSimulator, tmp_path: Path
) -> None:
    """Without `ca.crt` the run says where to put it, and goes on when it is there."""
    authority = Authority(tmp_path / "public")
    _put_certificate(server, authority, "nats", with_authority=False)
    async with objects_of(server, tmp_path, user=_JOB) as objects:
        with pytest.raises(ConfigError, match=r"topobus-nats-tls has no ca\.crt") as refusal:
            await make_certificate(objects, _NAMES, now=_now())
        server.put(
            {
                "kind": "ConfigMap",
                "metadata": {"name": AUTHORITY_MAP, "namespace": NAMESPACE},
                "data": {"ca.crt": "mine"},
            }
        )
        await make_certificate(objects, _NAMES, now=_now())

    assert AUTHORITY_MAP in refusal.value.next_step
    assert trusted_authorities(server) == "mine"
    assert objects.written == []


@pytest_asyncio.fixture
async def pods(server: ApiServerSimulator, tmp_path: Path) -> PodFiles:
    """The Secrets are made, and laid into pods."""
    async with objects_of(server, tmp_path) as objects:
        await make_users(objects)
        await make_certificate(objects, _NAMES, now=_now())
    made = PodFiles(server, tmp_path / "pods")
    made.sync()
    return made


async def test_each_user_is_let_in_with_its_own_secret(pods: PodFiles, nats_binary: Path) -> None:
    """The manifest's server with the files out of the Secrets knows all users, by TLS alone.

    Nobody comes in with another's password. The controller makes the streams.
    """
    nats_server, _ = pods.server_of_this_machine(nats_binary)
    url = f"tls://127.0.0.1:{nats_server.port}"
    async with (
        nats_server,
        asyncio.timeout(_LIMIT_S),
        Bus.session(pods.settings(url, "controller"), name="controller") as controller,
    ):
        await controller.provision()
        for number, principal in enumerate(PRINCIPALS):
            async with Bus.session(pods.settings(url, principal), name=connection_name(principal)) as bus:
                assert bus.is_connected
                assert bus.wants_login
            with pytest.raises(nats.errors.Error, match=_REFUSED):
                await pods.connect(url, principal, password=pods.password(PRINCIPALS[number - 1]))
        assert b'"tls_required":true' in await _greeting(nats_server.port)


async def _greeting(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await reader.readline()
    finally:
        writer.close()


async def _served_certificate(port: int, trusted: Path) -> bytes:
    """Read the server's certificate as a client that checks it."""
    context = ssl.create_default_context(cafile=str(trusted))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        await reader.readline()
        await writer.start_tls(context, server_hostname="nats-0.nats.topobus.svc")
        certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return certificate
    finally:
        writer.close()


async def test_new_password_and_certificate_count_without_a_restart(
    pods: PodFiles, server: ApiServerSimulator, nats_binary: Path, tmp_path: Path
) -> None:
    """The script of the manifest tells the server.

    The service comes back by itself with what stands in its file, its neighbours stay connected.
    """
    nats_server, environment = pods.server_of_this_machine(nats_binary)
    url = f"tls://127.0.0.1:{nats_server.port}"
    readiness = WatchedReadiness()
    async with nats_server, asyncio.timeout(_LIMIT_S):
        script = named(built("kubernetes"), "ConfigMap", "nats-scripts")["data"]["reload.sh"]
        reload = await asyncio.create_subprocess_exec("sh", "-c", script, env=environment, stderr=subprocess.DEVNULL)
        gpu = await Bus.connect(pods.settings(url, "gpu"), name="gpu", readiness=readiness)
        nic = await Bus.connect(pods.settings(url, "nic"), name="nic")
        try:
            before = pods.password("gpu"), await _served_certificate(nats_server.port, pods.trusted)
            async with objects_of(server, tmp_path) as objects:
                await make_certificate(objects, _NAMES, now=_now(), is_renewal=True)
                # First, so that a server which has the new users has it, too.
                pods.sync()
                await rotate_users(objects, ["gpu"], server_after_s=0.0)
            pods.sync()
            await readiness.until(
                lambda parts: gpu._connection.generation > 1 and parts["bus"] == "ready", timeout_s=_LIMIT_S
            )

            with pytest.raises(nats.errors.Error, match=_REFUSED):
                await pods.connect(url, "gpu", password=before[0])
            assert await _served_certificate(nats_server.port, pods.trusted) != before[1]
            assert nic._connection.generation == 1
        finally:
            await gpu.close()
            await nic.close()
            reload.terminate()
            await reload.wait()
