"""Promises of compose.yaml that need no container engine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from topobus.bus.server_config.nats_permissions import PRINCIPALS
from topobus.cli.application import run
from topobus.controller.config import ControllerSettings
from topobus.cpu.config import CpuSettings
from topobus.discovery.config import DiscoverySettings
from topobus.formats.messages.device_classes import DEVICE_SERVICES
from topobus.fpga.config import FpgaSettings
from topobus.gateway.config import GatewaySettings
from topobus.gpu.config import GpuSettings
from topobus.nic.config import NicSettings
from topobus.process.config import ServiceSettings, load_settings
from topobus.process.probe import read_endpoint
from topobus.simulation.nats_server import find_nats_server
from topobus.topology.config import TopologySettings

FILE = Path(__file__).parents[3] / "compose.yaml"
# As compose reads it where nothing is set: ${NAME:-default}.
_TEXT = re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", FILE.read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(_TEXT)["services"]

SETTINGS: dict[str, type[ServiceSettings]] = {
    "discovery": DiscoverySettings,
    "gpu": GpuSettings,
    "nic": NicSettings,
    "fpga": FpgaSettings,
    "cpu": CpuSettings,
    "topology": TopologySettings,
    "gateway": GatewaySettings,
    "controller": ControllerSettings,
}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_container_has_no_more_rights_than_it_needs(name: str) -> None:
    """A read-only image, no capability, no way to more rights, and no port of the host's but on the
    loopback interface.
    """
    service = SERVICES[name]

    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "network_mode", "pid", "devices"} & service.keys()
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_service_takes_its_environment(name: str) -> None:
    """A variable that a service does not know ends it with status 78, and compose would start it
    again for ever.
    """
    load_settings(SETTINGS[name], name, file=None, environ=SERVICES[name]["environment"])


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_service_sees_its_own_password_alone(name: str) -> None:
    """Each service is a user of its own, whose password is in a volume that no other service
    mounts.

    It waits until that is made.
    """
    service = SERVICES[name]
    settings = load_settings(SETTINGS[name], name, file=None, environ=service["environment"])
    assert settings.nats.zone == ("vendor" if name in DEVICE_SERVICES else "core")
    mounted = {volume.split(":")[0]: volume.split(":")[1:] for volume in service["volumes"]}

    assert (settings.nats.user, settings.nats.password_file) == (name, "/nats-user/password")
    assert {volume: place for volume, place in mounted.items() if volume.startswith(("user-", "nats-"))} == {
        f"user-{name}": ["/nats-user", "ro"]
    }
    assert (
        service["depends_on"]["keys"]
        == SERVICES["nats"]["depends_on"]["keys"]
        == {"condition": "service_completed_successfully"}
    )


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_service_waits_for_all_that_prepares_something(name: str) -> None:
    """Whoever runs once and goes is awaited: its end is success to `docker compose up --wait`, and
    a service that is started alone has what it reads.
    """
    preparing = {other for other, service in SERVICES.items() if service.get("restart") == "no"}

    assert preparing == {"keys", "machine"}
    assert SERVICES[name]["depends_on"] == {
        other: {"condition": "service_completed_successfully"} for other in preparing
    }


def test_passwords_are_made_for_every_user_when_compose_starts_first(tmp_path: Path) -> None:
    """The maker has a volume for each user, and the services' group.

    The server alone mounts the file of all, and includes it with its settings.
    """
    keys, nats = SERVICES["keys"], SERVICES["nats"]
    places = dict(volume.split(":") for volume in keys["volumes"])
    command = keys["command"]

    assert places == {"nats-users": "/keys/nats"} | {
        f"user-{principal}": f"/keys/{principal}" for principal in PRINCIPALS
    }
    image = (FILE.parent / "deploy" / "images" / "Dockerfile").read_text(encoding="utf-8")
    assert f"USER 65532:{keys['user'].rpartition(':')[2]}" in image
    assert (keys["entrypoint"], command[0], command[1]) == (["/usr/local/bin/service", "keys"], "make", "/keys")
    assert command[command.index("--server-file") + 1] == "/keys/nats/users.conf"
    assert [
        name
        for name, service in SERVICES.items()
        if any(volume.startswith("nats-users:") for volume in service.get("volumes", ()))
    ] == [
        "nats",
        "keys",
    ]
    assert run(["keys", command[0], str(tmp_path / "keys"), *command[2:-1], str(tmp_path / "users.conf")]) == 0
    assert "\naccounts {" in (tmp_path / "users.conf").read_text(encoding="utf-8")
    (etc := tmp_path / "etc" / "nats").mkdir(parents=True)
    (tmp_path / "etc" / "nats-users").mkdir()
    for file in (FILE.parent / "deploy" / "nats").glob("*.conf"):
        (etc / file.name).write_bytes(file.read_bytes())
    (tmp_path / "etc" / "nats-users" / "users.conf").write_bytes((tmp_path / "users.conf").read_bytes())
    checked = subprocess.run(
        [find_nats_server(), "-t", "-c", etc / "with-users.conf"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert "nats-users:/etc/nats-users:ro" in nats["volumes"]


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_health_check_is_answered_before_any_import(name: str) -> None:
    """What compose runs every few seconds in eight containers is the probe that reads its two
    settings alone, and nothing that compose 1.29 refuses.
    """
    service = SERVICES[name]
    command, program, *arguments = service["healthcheck"]["test"]

    assert (command, program) == ("CMD", "/usr/local/bin/service")
    assert read_endpoint(name, arguments, service["environment"]) == ("0.0.0.0", 8080)
    assert service["healthcheck"].keys() == {"test", "interval", "timeout", "retries", "start_period"}
