"""Options of listings and folders of manifests, against stored objects without any controller."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest

from support.claim_manifests import claim
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import OBJECT
from topobus.simulation.nats_server import NatsServer

pytestmark = pytest.mark.integration

_LIMIT_S = 60.0


async def _start(server: NatsServer, *arguments: str) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "topobus.cli.main", *arguments, "--nats", server.url)
    return await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def _run(server: NatsServer, *arguments: str, code: int = 0) -> str:
    process = await _start(server, *arguments)
    out, err = await process.communicate()
    assert process.returncode == code, err.decode()
    return (out or err).decode()


def device_class(name: str, expression: str) -> str:
    """Write a class."""
    return (
        f"apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {{name: {name}}}\n"
        f"spec: {{selectors: [{{cel: {{expression: '{expression}'}}}}]}}\n"
    )


@pytest.fixture
def manifests(tmp_path: Path) -> Path:
    """A folder with two manifests, something else, and a folder within it with one more."""
    (tmp_path / "deeper").mkdir()
    (tmp_path / "a.yaml").write_text(claim("first", 1))
    (tmp_path / "b.yml").write_text(claim("second", 1))
    (tmp_path / "notes.txt").write_text("no manifest")
    (tmp_path / "deeper/c.yaml").write_text(claim("third", 1))
    return tmp_path


async def test_folder_is_applied_and_deleted_as_its_files(nats_server: NatsServer, bus: Bus, manifests: Path) -> None:
    """A dry run stores nothing and says whether it would fit; -R goes into folders.

    Delete takes the same folder, and its dry run deletes nothing.
    """
    dry = await _run(nats_server, "apply", "-f", str(manifests), "--dry-run")
    no_node = " - no node has published a machine or an inventory yet  [no-node]"
    assert dry.splitlines() == [
        *("ResourceClaim default/first created (dry run)", "ResourceClaim default/second created (dry run)"),
        *("ResourceClaim default/first would wait: NoNode", no_node),
        *("ResourceClaim default/second would wait: NoNode", no_node),
    ]
    assert await bus.list(OBJECT) == ()

    await _run(nats_server, "apply", "-f", str(manifests), "-R", "--no-wait")
    assert [entry.parts["name"] for entry in await bus.list(OBJECT)] == ["first", "second", "third"]
    assert "first unchanged (dry run)" in await _run(nats_server, "apply", "-f", str(manifests), "--dry-run")

    assert "would be deleted (dry run)" in await _run(nats_server, "delete", "-f", str(manifests), "--dry-run")
    assert len(await bus.list(OBJECT)) == 3
    await _run(nats_server, "delete", "-f", str(manifests))
    assert [entry.parts["name"] for entry in await bus.list(OBJECT)] == ["third"]


async def test_folder_without_a_manifest_is_refused(nats_server: NatsServer, bus: Bus, tmp_path: Path) -> None:
    """An empty folder is an error, and one whose manifests lie deeper says how to take them."""
    assert "holds no manifest" in await _run(nats_server, "apply", "-f", str(tmp_path), code=66)
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper/c.yaml").write_text(claim("third", 1))

    assert "add -R" in await _run(nats_server, "apply", "-f", str(tmp_path), code=66)


async def test_watched_listing_tells_each_change_once(nats_server: NatsServer, bus: Bus, manifests: Path) -> None:
    """What is there, then what comes, then what goes, each as it happens.

    SIGTERM ends it with 0.
    """
    await _run(nats_server, "apply", "-f", str(manifests / "a.yaml"), "--no-wait")
    watch = await _start(nats_server, "get", "claims", "-w", "--no-headers")
    assert watch.stdout is not None
    try:
        async with asyncio.timeout(_LIMIT_S):
            assert (await watch.stdout.readline()).startswith(b"first ")
            await _run(nats_server, "apply", "-f", str(manifests / "b.yml"), "--no-wait")
            assert (await watch.stdout.readline()).startswith(b"second ")
            await _run(nats_server, "delete", "claim", "first")
            assert await watch.stdout.readline() == b"first  gone\n"
            watch.send_signal(signal.SIGTERM)
            assert await watch.wait() == 0
    finally:
        if watch.returncode is None:
            watch.kill()
            await watch.wait()


async def test_diff_shows_what_apply_would_change_and_writes_nothing(
    nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    """New objects whole, changed ones by line, equal ones not at all.

    Exit code 1 when there is a difference, as kubectl's.
    """
    manifest = tmp_path / "class.yaml"
    manifest.write_text(device_class("fast", "true"))
    new = await _run(nats_server, "diff", "-f", str(manifest), code=1)
    assert new.splitlines()[:2] == ["--- stored: nothing", "+++ applied: DeviceClass fast"]
    assert await bus.list(OBJECT) == ()

    await _run(nats_server, "apply", "-f", str(manifest), "--no-wait")
    assert "---" not in await _run(nats_server, "diff", "-f", str(manifest))
    manifest.write_text(device_class("fast", "false"))
    changed = await _run(nats_server, "diff", "-f", str(manifest), code=1)

    assert [line for line in changed.splitlines() if line.startswith(("-", "+")) and "expression" in line] == [
        "-      expression: 'true'",
        "+      expression: 'false'",
    ]
    assert "generation: 2" in changed


async def test_diff_has_the_same_as_a_document(nats_server: NatsServer, bus: Bus, tmp_path: Path) -> None:
    """Which objects, what apply would do with each, and the lines."""
    manifest = tmp_path / "claim.yaml"
    manifest.write_text(claim("fast", 1))

    answer = json.loads(await _run(nats_server, "diff", "-f", str(manifest), "--json", code=1))

    assert [(item["kind"], item["namespace"], item["name"], item["verb"]) for item in answer["differences"]] == [
        ("ResourceClaim", "default", "fast", "created")
    ]
    assert "+  name: fast" in answer["differences"][0]["diff"]
