"""The lists of dependencies agree: a process needs nothing but the project's own and its extra's,
the pages say how many that are, and all of it is locked.
"""

import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SERVICES = ("discovery", "gpu", "nic", "fpga", "cpu", "topology", "gateway", "controller", "console", "cli")
# What the pages count for: CPython 3.11 on Linux.
_MARKERS = {
    "python_version": "3.11",
    "python_full_version": "3.11.9",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "os_name": "posix",
}
# Imports every module of a service where only the distributions named can be
# imported, whatever else is installed.
_IMPORT_ALONE = """
import importlib, importlib.metadata, pkgutil, re, sys
service, allowed = sys.argv[1], set(sys.argv[2:])
plain = lambda name: re.sub("[-_.]+", "-", name).lower()
owners = importlib.metadata.packages_distributions()
class Absent:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top != "topobus" and top in owners and not {plain(owner) for owner in owners[top]} & allowed:
            raise ModuleNotFoundError(f"{name} is not in the extra", name=name)
sys.meta_path.insert(0, Absent())
room = importlib.import_module(f"topobus.{service}")
for module in pkgutil.walk_packages(room.__path__, f"topobus.{service}."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


@cache
def _needs(service: str) -> set[str]:
    command = [sys.executable, ROOT / "tools" / "service-requirements", service]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")) - {""}


def _name(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def _locked(service: str) -> list[Requirement]:
    """Give a service's lock, without hashes."""
    text = (ROOT / "requirements" / f"{service}.txt").read_text(encoding="utf-8")
    return [Requirement(line.rstrip("\\ ")) for line in text.splitlines() if line and line[0] not in " #"]


def test_extra_all_installs_the_union_of_what_services_need() -> None:
    """`pip install '.[all]'` gives the whole system: nothing that a service needs is missing, and
    nothing else is there.
    """
    assert {need for service in SERVICES for need in _needs(service)} == _needs("all")


def test_lock_of_extra_all_has_the_versions_of_every_image() -> None:
    """What a release lists and audits as `all.txt` is what the images install, and nothing else."""
    images = {
        requirement.name: str(requirement.specifier)
        for service in (*SERVICES, "device", "relay")
        for requirement in _locked(service)
    }

    assert {requirement.name: str(requirement.specifier) for requirement in _locked("all")} == images


def test_project_depends_on_what_every_service_needs() -> None:
    """What one service alone needs stands in its extra, so that another
    service does not bring it.
    """
    shared = set.intersection(*(_needs(service) for service in SERVICES))

    assert set(PROJECT["project"]["dependencies"]) == shared


@pytest.mark.parametrize("service", SERVICES)
def test_service_imports_nothing_but_its_extra(service: str) -> None:
    """Every module of a service can be imported where only the packages of its own lock are
    installed.
    """
    allowed = [canonicalize_name(requirement.name) for requirement in _locked(service)]
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALONE, service, *allowed],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("service", [*SERVICES, "all"])
def test_page_says_how_many_packages_an_extra_brings(service: str) -> None:
    """The table of what one install costs has the number of the lock."""
    page = (ROOT / "docs" / "reference" / "installing.md").read_text(encoding="utf-8")
    locked = {
        requirement.name
        for name in (SERVICES if service == "all" else [service])
        for requirement in _locked(name)
        if not requirement.marker or requirement.marker.evaluate(_MARKERS)
    }

    row = re.search(rf"^\| [^|]*`{service}`[^|]* \| (\d+) \|", page, re.MULTILINE)
    assert row is not None
    assert int(row[1]) == len(locked)


@pytest.mark.parametrize("service", SERVICES)
def test_service_is_locked_with_hashes_and_no_address(service: str) -> None:
    """Each image installs exact versions with hashes, and the lock names no download address."""
    text = (ROOT / "requirements" / f"{service}.txt").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=\S)", text.strip())

    assert {_name(need) for need in _needs(service)} <= {
        canonicalize_name(requirement.name) for requirement in _locked(service)
    }
    assert all("==" in entry and "--hash=sha256:" in entry for entry in entries)
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
