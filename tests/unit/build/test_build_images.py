"""`tools/build-images`: every image that the manifests name, by whichever engine is there.

No engine is run here, only what would be.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with an engine and a ctr that write down how they were called."""
    for name in ("podman", "ctr"):
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\necho "{name} $*" >> "{tmp_path}/calls"\n[ "$1" != -n ] || cat > /dev/null\n')
        script.chmod(0o755)
    return tmp_path


def build(programs: Path, *arguments: str, base: str = "") -> subprocess.CompletedProcess[str]:
    """Run it with nothing else on the PATH but the basics."""
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "ENGINE": "podman",
        "BASE_IMAGE": base,
        **{key: os.environ[key] for key in ("HOME",) if key in os.environ},
    }
    command = [str(ROOT / "tools" / "build-images"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_every_image_of_the_manifests_is_built_and_imported_when_asked(programs: Path) -> None:
    """The names are those that a node looks for, each built and handed to containerd once."""
    listed = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "kustomization.yaml").read_text(encoding="utf-8"))[
        "images"
    ]
    listed += yaml.safe_load((ROOT / "deploy" / "kubernetes-leaf" / "kustomization.yaml").read_text(encoding="utf-8"))[
        "images"
    ]
    # Not of these manifests: the base of images for device classes of one's own,
    # and the console of an overlay.
    listed += [{"name": "topobus/device"}, {"name": "topobus/console"}]
    answer = build(programs, "--import")
    calls = (programs / "calls").read_text().splitlines()

    assert answer.returncode == 0, answer.stderr
    assert sorted(answer.stdout.split()) == sorted(f"docker.io/{image['name']}:latest" for image in listed)
    assert len([call for call in calls if call.startswith("podman build")]) == len(listed)
    assert calls.count("ctr -n k8s.io images import -") == len(listed)


def test_images_have_the_registrys_name_when_one_is_given(programs: Path) -> None:
    """Prefix and tag are taken as they are, and nothing is imported."""
    answer = build(programs, "registry.example/topobus", "0.2.0")

    assert "registry.example/topobus/gateway:0.2.0" in answer.stdout.split()
    assert "ctr" not in (programs / "calls").read_text()


@pytest.mark.parametrize("base", ["", "python:3.11-slim-bookworm", "python@sha256:12"])
def test_release_is_refused_when_its_base_image_has_no_digest(programs: Path, base: str) -> None:
    """A tag may be another image tomorrow: nothing is built from it for a release."""
    answer = build(programs, "--release", "registry.example/topobus", "0.2.0", base=base)

    assert (answer.returncode, f"BASE_IMAGE: got '{base}', wanted NAME@sha256:" in answer.stderr) == (65, True)
    assert not (programs / "calls").exists()


def test_release_has_its_base_and_commit_as_labels_when_the_base_has_a_digest(programs: Path) -> None:
    """Whoever has the image can tell what it was built from."""
    digest = f"sha256:{'0a' * 32}"
    answer = build(
        programs, "--release", "registry.example/topobus", "0.2.0", base=f"mirror.example:5000/python@{digest}"
    )
    calls = (programs / "calls").read_text().splitlines()

    assert answer.returncode == 0, answer.stderr
    assert all(f"--build-arg BASE_IMAGE=mirror.example:5000/python@{digest} " in call for call in calls)
    assert all(
        f"image.base.name=mirror.example:5000/python --label org.opencontainers.image.base.digest={digest} " in call
        for call in calls
    )
    assert all(
        re.search(r"image\.version=0\.2\.0 --label org\.opencontainers\.image\.revision=[0-9a-f]{40} ", call)
        for call in calls
    )


def test_usage_is_told_when_an_option_is_unknown(programs: Path) -> None:
    """A wrong word builds nothing."""
    answer = build(programs, "--push")

    assert (answer.returncode, "usage" in answer.stderr) == (64, True)
    assert not (programs / "calls").exists()
