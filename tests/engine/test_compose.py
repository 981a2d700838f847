"""compose.yaml on a real container engine, as it is shipped: all healthy, a pod placed, a GPU that
fails seen from the host, and who is kept out.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path

import pytest
from testcontainers.compose import DockerCompose

from engine.conftest import RUNNING
from engine.engine import ROOT, must
from topobus.health import HealthEvent, follow
from topobus.values.health import HealthState

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

DONE = {"keys", "machine"}
DOCKERFILE = "deploy/images/Dockerfile"
TAKEN_OVER_WITHIN_S = 180
_RUN = ("run", "--rm", "--no-deps", "-T")


def _compose(system: DockerCompose, *arguments: str) -> str:
    return must([*system.docker_compose_command(), *arguments], timeout_s=120, what=f"compose {arguments[0]}")


def _login(system: DockerCompose, user: str, folder: Path) -> Path:
    """Get a user's password as the page says, into a file."""
    file = folder / user
    file.touch(mode=0o600)
    file.write_text(_compose(system, *_RUN, "keys", "show", "/keys", user))
    return file


def _url(system: DockerCompose) -> str:
    return f"nats://127.0.0.1:{system.get_service_port('nats', 4222)}"


def _as_cli(password_file: Path) -> dict[str, str]:
    return {**os.environ, "TOPOBUS_CLI__NATS__USER": "cli", "TOPOBUS_CLI__NATS__PASSWORD_FILE": str(password_file)}


def _topobus(system: DockerCompose, *arguments: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the CLI on the host against the published port."""
    command = [sys.executable, "-m", "topobus.cli.main", *arguments, "--nats", _url(system)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=env, check=False)


def test_compose_has_all_services_healthy_when_up_waited(system: DockerCompose) -> None:
    """`docker compose up --wait` ends well: who makes keys and machine is done, all others are
    healthy, each of the image that compose.yaml builds for it.
    """
    containers = {container.Service: container for container in system.get_containers(include_all=True)}
    builds = {
        service: (
            wanted["build"]["dockerfile"],
            f"topobus-ci/{wanted['build']['args']['SERVICE']}:latest",
            wanted["image"],
        )
        for service, wanted in system.get_config()["services"].items()
        if "build" in wanted
    }

    assert {service for service, container in containers.items() if container.Health == "healthy"} == RUNNING
    assert {
        service for service, container in containers.items() if (container.State, container.ExitCode) == ("exited", 0)
    } == DONE
    assert set(builds) == (RUNNING | DONE) - {"nats"}
    assert [
        service for service, (dockerfile, image, given) in builds.items() if (dockerfile, image) != (DOCKERFILE, given)
    ] == []


def test_compose_places_a_pod_when_all_services_are_up(system: DockerCompose, tmp_path: Path) -> None:
    """From the host, a pod gets its GPUs and NICs from services that run in nine containers."""
    done = _topobus(
        system, "place", "examples/pods/trainer.yaml", "--json", env=_as_cli(_login(system, "cli", tmp_path))
    )
    result = json.loads(done.stdout)["chosen"]["result"]

    assert (
        result["outcome"],
        {name: len(devices) for name, devices in result["containers"][0]["devices"].items()},
    ) == (
        "placement",
        {"gpu": 2, "nic": 2},
    )


def test_compose_keeps_out_who_has_no_password_of_its_own(system: DockerCompose, tmp_path: Path) -> None:
    """Nobody without a login; the file of `cli` alone opens `cli`.

    A second start makes no other passwords; a new one is taken over without a restart.
    """
    password = _login(system, "cli", tmp_path)
    before = password.read_text()
    refused = _topobus(system, "inventory", env=os.environ)
    _compose(system, *_RUN, "keys")
    kept = _login(system, "cli", tmp_path).read_text()
    _compose(
        system, *_RUN, "keys", "rotate", "/keys", "cli", "gpu", "--for-group", "--server-file", "/keys/nats/users.conf"
    )
    _compose(system, "kill", "-s", "HUP", "nats")
    changed = _login(system, "cli", tmp_path).read_text()
    # The server takes its new file a moment after the signal: until
    # then it lets in with the old one.
    give_up = time.monotonic() + TAKEN_OVER_WITHIN_S
    while not (findings := _findings(system, password)) or any(finding["level"] == "fail" for finding in findings):
        assert time.monotonic() < give_up, findings

    assert refused.returncode == 69
    assert "does not let us in without a user" in " ".join(refused.stderr.split())
    assert kept == before != changed


def _findings(system: DockerCompose, password_file: Path) -> list[dict[str, str]]:
    done = _topobus(system, "doctor", "--json", env=_as_cli(password_file))
    findings: list[dict[str, str]] = json.loads(done.stdout)["findings"] if done.stdout else []
    return findings


async def test_compose_tells_a_subscriber_on_the_host_when_a_gpu_fails(system: DockerCompose, tmp_path: Path) -> None:
    """A GPU that falls off the bus inside the machine's volume reaches who follows with the
    documented login, and so does its return.
    """
    password_file = _login(system, "user", tmp_path)
    inventories = json.loads(
        _topobus(system, "inventory", "gpu", "--json", env=_as_cli(_login(system, "cli", tmp_path))).stdout
    )["inventories"]
    devices = inventories[0]["devices"]
    victim = devices[-1]
    async with (
        asyncio.timeout(300),
        aclosing(follow(_url(system), password_file=str(password_file), device_class="gpu")) as events,
    ):

        async def until(state: HealthState) -> HealthEvent:
            async for event in events:
                if event.device == victim["name"] and event.health.state is state:
                    return event
            raise AssertionError("unreachable")

        present = [(await anext(events)).device for _ in devices]
        await asyncio.to_thread(_compose, system, *_RUN, "machine", "remove", "/machine", victim["pci"])
        failed = await until(HealthState.UNHEALTHY)
        await asyncio.to_thread(_compose, system, *_RUN, "machine", "restore", "/machine", victim["pci"])
        returned = await until(HealthState.HEALTHY)

    assert sorted(present) == sorted(device["name"] for device in devices)
    assert failed.health.conditions[0].dimension == "presence"
    assert returned.generation > failed.generation
