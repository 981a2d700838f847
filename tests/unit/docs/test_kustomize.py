"""The overlays as the tests build them are what kubectl makes of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.kustomize import DEPLOY, Manifest, built, read

OVERLAYS = sorted(path.parent.name for path in DEPLOY.glob("*/kustomization.yaml"))


def _by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Any]:
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_is_what_kubectl_makes_of_it(overlay: str) -> None:
    """Every object, field by field. Needs kubectl on the PATH, which brings kustomize."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl on the PATH")
    made = subprocess.run(
        [kubectl, "kustomize", str(DEPLOY / overlay)], capture_output=True, text=True, timeout=60, check=False
    )

    assert made.returncode == 0, made.stderr
    assert _by_name(read(made.stdout)) == _by_name(built(overlay))


def test_open_overlay_is_the_plain_one_without_users() -> None:
    """No object of it names a Secret of NATS, and nothing is mounted twice or for nobody."""
    manifests = built("kubernetes-open")
    pods = [
        it["spec"]["template"]["spec"] for it in manifests if it["kind"] in ("DaemonSet", "Deployment", "StatefulSet")
    ]

    assert "topobus-nats" not in yaml.safe_dump(manifests)
    assert "topobus-keys" not in yaml.safe_dump(manifests)
    assert "__NATS__USER" not in yaml.safe_dump(manifests)
    for pod in pods:
        mounted = {mount["name"] for container in pod["containers"] for mount in container.get("volumeMounts", ())}
        claimed = {"data"} if any(container["name"] == "nats" for container in pod["containers"]) else set()
        assert mounted == {volume["name"] for volume in pod.get("volumes", ())} | claimed


def _texts() -> list[Path]:
    """List what users read: pages, manifests, and the sources with their messages."""
    root = DEPLOY.parent
    patterns = (
        "docs/**/*.md",
        "README.md",
        "deploy/**/*.yaml",
        "deploy/images/Dockerfile",
        "services/**/*.py",
        "shared/**/*.py",
    )
    return [path for pattern in patterns for path in sorted(root.glob(pattern))]


def test_installation_that_a_text_names_is_one_that_is_shipped() -> None:
    """Each folder behind `kubectl … -k` is a kustomization, and nobody is sent to a chart, of which
    there is none.
    """
    named_folders: dict[str, str] = {}
    charts: list[str] = []
    for path in _texts():
        text = path.read_text(encoding="utf-8")
        named_folders |= {
            folder: str(path) for folder in re.findall(r"kubectl (?:apply|delete) -k\s+(deploy/[\w/-]+)", text)
        }
        if path.suffix != ".md" and re.search(r"\bhelm\b|\bchart\b", text, re.IGNORECASE):
            charts.append(str(path))

    assert {
        folder: where
        for folder, where in named_folders.items()
        if not (DEPLOY.parent / folder / "kustomization.yaml").exists()
    } == {}
    assert {"deploy/kubernetes", "deploy/kubernetes-leaf"} <= set(named_folders)
    assert charts == []
