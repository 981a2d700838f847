"""`kubectl topobus …` is `topobus …`, found and completed by kubectl itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from topobus.cli import kubectl_plugin

_ROOT = Path(__file__).parents[3]
_SCRIPTS = {"kubectl-topobus": "main", "kubectl_complete-topobus": "complete_main"}


def test_plugin_is_installed_under_the_names_that_kubectl_looks_for() -> None:
    """Both scripts are entry points of the wheel, and lead to functions that exist."""
    scripts = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]

    assert {name: scripts.get(name) for name in _SCRIPTS} == {
        name: f"topobus.cli.kubectl_plugin:{function}" for name, function in _SCRIPTS.items()
    }
    assert all(callable(getattr(kubectl_plugin, function)) for function in _SCRIPTS.values())


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A PATH on which kubectl finds the plugin; no cluster."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    for name, function in _SCRIPTS.items():
        script = tmp_path / name
        # As pip writes them: the name of the file is how the program knows by whom it is called.
        script.write_text(
            f"#!{sys.executable}\nimport sys\nfrom topobus.cli.kubectl_plugin import "
            f"{function}\nsys.exit({function}())\n"
        )
        script.chmod(0o755)
    # Where the plugin is installed, kubectl would tell of two.
    others = [folder for folder in os.environ["PATH"].split(":") if not Path(folder, "kubectl-topobus").exists()]
    kubectl = tmp_path / "kubectl"
    kubectl.symlink_to(shutil.which("kubectl") or "")
    return {
        **os.environ,
        "PATH": ":".join([str(tmp_path), *others]),
        "HOME": str(tmp_path),
        "KUBECONFIG": str(tmp_path / "none"),
    }


def _kubectl(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["kubectl", *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_kubectl_lists_the_plugin(environment: dict[str, str], tmp_path: Path) -> None:
    """Executable, by its name, and not hidden by another."""
    listed = _kubectl(environment, "plugin", "list")

    assert str(tmp_path / "kubectl-topobus") in listed.stdout
    assert "overshadowed" not in listed.stdout + listed.stderr


def test_kubectl_hands_words_and_exit_codes_through(environment: dict[str, str]) -> None:
    """Help speaks of `kubectl topobus`, and a refusal is the plugin's own exit code."""
    helped = _kubectl(environment, "topobus", "place", "--help")
    refused = _kubectl(environment, "topobus", "inventory", "--nats", "nats://127.0.0.1:1")

    assert (helped.returncode, refused.returncode) == (0, 69)
    assert "  kubectl topobus place [POD.YAML" in helped.stdout
    assert "connection refused" in refused.stderr


def test_kubectl_completes_the_plugin(environment: dict[str, str]) -> None:
    """As kubectl 1.26 and later ask it: the words, and the directive at the end."""
    completed = _kubectl(environment, "__complete", "topobus", "keys", "secrets", "re")

    assert "renew" in [line.partition("\t")[0] for line in completed.stdout.splitlines()]
    assert completed.stdout.splitlines()[-1] == ":4"
