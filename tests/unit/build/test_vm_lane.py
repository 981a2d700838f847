"""The lane on a real kernel, as far as it can be looked at without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LANE = ROOT / "tests/vm"
MACHINES = sorted(path.name for path in (LANE / "machines").iterdir())


def lane(*words: str) -> subprocess.CompletedProcess[str]:
    """Call the lane's command, where there is no Kubernetes."""
    environment = {name: value for name, value in os.environ.items() if name != "TOPOBUS_VM_KUBERNETES"}
    words = (sys.executable, str(LANE / "run"), *words)
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment)


def test_machine_that_is_not_there_is_refused_with_those_that_are() -> None:
    """Before an image is made or anything boots."""
    done = lane("sriov", "dxg")

    assert done.returncode == 2
    assert "no machine dxg" in done.stderr
    assert all(name in done.stderr for name in MACHINES)


def test_machine_of_kubelet_is_no_success_when_there_is_no_kubernetes() -> None:
    """It did not run, and both the exit status and the last line say so."""
    done = lane("node")

    assert done.returncode == 69
    assert done.stderr.splitlines()[-1].startswith(
        "vm: node: DID NOT RUN: TOPOBUS_VM_KUBERNETES names no folder with kubelet"
    )


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in LANE.glob("*/test_*.py")))
def test_tests_are_of_a_machine_or_of_every_one(folder: str) -> None:
    """A folder of another name would never be run."""
    assert folder in {"every", *MACHINES}


def test_nothing_of_it_runs_outside_of_a_guest() -> None:
    """It would unplug this machine's cards."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        str(LANE / "pytest.ini"),
        str(LANE),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)

    assert "no tests collected" in done.stdout, done.stdout + done.stderr
