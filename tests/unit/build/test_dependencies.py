"""The lists of dependencies agree: what one service needs is in what `pip install .` gives, and all of it is locked."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SERVICES = ("discovery", "gpu", "nic", "fpga", "cpu", "topology", "gateway", "controller", "cli")


def _needs(service: str) -> set[str]:
    command = [sys.executable, ROOT / "tools" / "service-requirements", service]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")) - {""}


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~ ;\[]", requirement, maxsplit=1)[0].lower()


def test_project_installs_the_union_of_what_services_need() -> None:
    """`pip install .` gives the whole system: nothing that a service needs is missing, and nothing else is there."""
    assert {need for service in SERVICES for need in _needs(service)} == set(PROJECT["project"]["dependencies"])


@pytest.mark.parametrize("service", SERVICES)
def test_service_is_locked_with_hashes_and_no_address(service: str) -> None:
    """Each image installs exact versions with hashes, and the lock names no download address."""
    text = (ROOT / "requirements" / f"{service}.txt").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=\S)", text.strip())

    assert {_name(one) for one in _needs(service)} <= {_name(one) for one in entries}
    assert all("==" in one and "--hash=sha256:" in one for one in entries)
    assert "://" not in text


@pytest.mark.parametrize("service", SERVICES)
def test_service_has_one_name_for_script_extra_image_and_folder(service: str) -> None:
    """Folder, console script, extra, compose service and image go by one name."""
    script = "topobus" if service == "cli" else f"topobus-{service}"
    compose = (ROOT / "compose.yaml").read_text(encoding="utf-8")

    assert PROJECT["project"]["scripts"][script] == f"topobus.{service}.main:main"
    assert service in PROJECT["project"]["optional-dependencies"]
    assert (ROOT / "services" / "topobus" / service / "main.py").is_file()
    assert f"SERVICE: {service}}}" in compose
