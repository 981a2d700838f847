"""compose.yaml on a real container engine: build, up, all healthy, a pod placed, a GPU that fails seen from the host, down."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.conftest import Images
from engine.engine import ROOT, Compose, EngineUnavailable, say

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

SERVICES = {"nats", "discovery", "gpu", "nic", "fpga", "cpu", "topology", "gateway", "controller"}
HEALTHY_WITHIN_S = 180


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def system(images: Images) -> Iterator[Compose]:
    """The system of compose.yaml, built, up and healthy; gone afterwards with its volumes."""
    trouble = ""
    with ExitStack() as undo:
        try:
            compose = _bring_up(images, undo)
        except EngineUnavailable as err:
            trouble = str(err)
        if trouble:
            pytest.fail(trouble, pytrace=False)
        yield compose
        say("taking everything down")


def _bring_up(images: Images, undo: ExitStack) -> Compose:
    """Build and start all, and wait until it is healthy; whatever was begun is undone at the end, also after a failure half-way."""
    env = {
        **os.environ,
        "BASE_IMAGE": images.base,
        "NATS_IMAGE": images.nats,
        "TOPOBUS_NATS_PORT": str(_free_port()),
        "TOPOBUS_IMAGE_PREFIX": "topobus-ci",
        "TOPOBUS_RESCAN_S": "1",
        "COMPOSE_HTTP_TIMEOUT": "300",
    }
    compose = Compose("topobus-ci", env)
    compose.down()
    undo.callback(compose.down)
    built = sorted({"keys", *SERVICES} - {"nats"})
    for number, service in enumerate(built, 1):
        say(f"building image {number} of {len(built)}: {service}")
        compose.run("build", service, timeout_s=600)
    say("starting")
    compose.run("up", "-d", timeout_s=300)
    _wait_until_healthy(compose)
    folder = Path(tempfile.mkdtemp(prefix="tc-"))
    undo.callback(shutil.rmtree, folder, ignore_errors=True)
    password = folder / "password"
    password.touch(mode=0o600)
    password.write_text(_password(compose, "cli"))
    compose.env.update({"TOPOBUS_CLI__NATS__USER": "cli", "TOPOBUS_CLI__NATS__PASSWORD_FILE": str(password)})
    return compose


def _password(compose: Compose, user: str) -> str:
    """Give a user's password as the documentation says."""
    return compose.run("run", "--rm", "--no-deps", "-T", "keys", "show", "/keys", user, timeout_s=120)


def _wait_until_healthy(compose: Compose) -> None:
    give_up = time.monotonic() + HEALTHY_WITHIN_S
    said_last = ""
    while True:
        states = {service: state for service, state in compose.health().items() if service in SERVICES}
        waiting = sorted(SERVICES - {service for service, state in states.items() if state == "healthy"})
        if not waiting:
            say("all nine are healthy")
            return
        if time.monotonic() > give_up:
            raise EngineUnavailable(f"not healthy after {HEALTHY_WITHIN_S} s: {waiting}; states {states}\n{compose.logs()}")
        if said_last != (said_last := ", ".join(waiting)):
            say(f"waiting for {said_last}")


def _topobus(compose: Compose, *arguments: str, wanted_exit: int = 0) -> str:
    """Run the CLI on the host against the published port."""
    done = subprocess.run(
        [sys.executable, "-m", "topobus.cli.main", *arguments, "--nats", _url(compose)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=compose.env,
        check=False,
    )

    assert done.returncode == wanted_exit, f"topobus {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _url(compose: Compose) -> str:
    return f"nats://127.0.0.1:{compose.env['TOPOBUS_NATS_PORT']}"


def test_compose_places_a_pod_when_all_services_are_up(system: Compose) -> None:
    """From the host, a pod gets its GPUs and NICs from services that run in nine containers."""
    answer = json.loads(_topobus(system, "place", "examples/pods/trainer.yaml", "--json"))

    result = answer["chosen"]["result"]
    assert (result["outcome"], {name: len(devices) for name, devices in result["containers"][0]["devices"].items()}) == (
        "placement",
        {"gpu": 2, "nic": 2},
    )


def test_compose_keeps_out_who_has_no_password_of_its_own(system: Compose) -> None:
    """Nobody without a login; the file of `cli` alone opens `cli`; a second start makes no other passwords; a new one is taken over without a restart."""
    password = Path(system.env["TOPOBUS_CLI__NATS__PASSWORD_FILE"])
    stranger = {name: value for name, value in system.env.items() if not name.startswith("TOPOBUS_CLI__NATS__")}
    refused = subprocess.run(
        [sys.executable, "-m", "topobus.cli.main", "inventory", "--nats", _url(system)],
        env=stranger,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    system.run("run", "--rm", "--no-deps", "-T", "keys", timeout_s=120)
    kept = _password(system, "cli")
    system.run(
        "run",
        "--rm",
        "--no-deps",
        "-T",
        "keys",
        "rotate",
        "/keys",
        "cli",
        "gpu",
        "--for-group",
        "--server-file",
        "/keys/nats/users.conf",
        timeout_s=120,
    )
    system.run("kill", "-s", "HUP", "nats", timeout_s=60)
    changed = _password(system, "cli")
    before = password.read_text()
    password.write_text(changed)
    # The server takes its new file a moment after the signal: until then it lets in with the old one.
    give_up = time.monotonic() + HEALTHY_WITHIN_S
    while not (findings := _findings(system)) or any(finding["level"] == "fail" for finding in findings):
        assert time.monotonic() < give_up, findings

    assert refused.returncode == 69
    assert "does not let us in without a user" in " ".join(refused.stderr.split())
    assert kept == before != changed


def _findings(compose: Compose) -> list[dict[str, str]]:
    done = subprocess.run(
        [sys.executable, "-m", "topobus.cli.main", "doctor", "--json", "--nats", _url(compose)],
        env=compose.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    findings: list[dict[str, str]] = json.loads(done.stdout)["findings"] if done.stdout else []
    return findings


def test_compose_tells_the_host_when_a_gpu_fails(system: Compose) -> None:
    """A GPU that falls off the bus inside the machine's volume reaches a subscriber on the host, and so does its return."""
    inventories = json.loads(_topobus(system, "inventory", "gpu", "--json"))["inventories"]
    victim = inventories[0]["devices"][-1]
    watch = subprocess.Popen(
        [sys.executable, "-m", "topobus.cli.main", "health", "watch", "--class", "gpu", "--json", "--nats", _url(system)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=system.env,
    )
    assert watch.stdout is not None
    events = (json.loads(line)["event"] for line in watch.stdout)
    seen: list[str] = []
    try:
        while len(seen) < len(inventories[0]["devices"]):
            seen.append(next(events)["device"])
        system.run("run", "--rm", "--no-deps", "machine", "remove", "/machine", victim["pci"], timeout_s=60)
        failed = next(event for event in events if event["device"] == victim["name"])
        system.run("run", "--rm", "--no-deps", "machine", "restore", "/machine", victim["pci"], timeout_s=60)
        returned = next(event for event in events if event["device"] == victim["name"] and event["health"]["state"] == "healthy")
    finally:
        watch.terminate()
        watch.wait(10)
        watch.stdout.close()
        if watch.stderr is not None:
            watch.stderr.close()

    assert sorted(seen) == sorted(device["name"] for device in inventories[0]["devices"])
    assert (failed["health"]["state"], failed["health"]["conditions"][0]["dimension"]) == ("unhealthy", "presence")
    assert returned["generation"] > failed["generation"]
