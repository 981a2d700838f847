"""The OCI runtimes that containers are run by, alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from support.debian_packages import fetch_packages

__all__ = ["OciRuntime", "oci_runtime"]


class OciRuntime:
    """One by its program."""

    def __init__(self, program: str) -> None:
        self.program = program

    def write_spec(self, bundle: Path) -> None:
        """Write the runtime's default spec into a bundle."""
        subprocess.run([self.program, "spec"], cwd=bundle, check=True)

    def call(self, bundle: Path, *arguments: str, has_output: bool = True) -> subprocess.CompletedProcess[str]:
        """Call it on a bundle's containers, without output where they continue in the
        background.
        """
        output = subprocess.PIPE if has_output else subprocess.DEVNULL
        command = [self.program, "--root", str(bundle / "state"), *arguments]
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True, check=False)


@cache
def _runc() -> str:
    """Find runc: the machine's, else Debian's unpacked aside.

    Empty when it cannot be had or does not run here.
    """
    program = shutil.which("runc") or ""
    if not program:
        fetched = fetch_packages("runc")
        program = "" if isinstance(fetched, str) else f"{fetched[0]}/usr/sbin/runc"
    runs = bool(program) and subprocess.run([program, "--version"], capture_output=True, check=False).returncode == 0
    return program if runs else ""


def _crun() -> str:
    """Find crun where it can run: it takes no machine with both versions of cgroups."""
    return shutil.which("crun") or "" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else ""


@pytest.fixture(params=[_runc, _crun], ids=["runc", "crun"])
def oci_runtime(request: pytest.FixtureRequest) -> OciRuntime:
    """Run the test with each; skipped where one is not there."""
    program = request.param() if os.geteuid() == 0 else ""
    if not program:
        pytest.skip("NOT TESTED: needs root, and runc, or crun and cgroup v2, so that no container was run by it")
    return OciRuntime(program)
