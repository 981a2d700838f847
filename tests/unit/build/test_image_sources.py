"""The image build sees every file that the wheel is made of."""

import re
import tomllib
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[3]


def _copied() -> list[PurePosixPath]:
    """Give the sources that the Dockerfile's first stage copies."""
    first = (ROOT / "deploy" / "images" / "Dockerfile").read_text(encoding="utf-8").split("\nFROM ")[1]
    return [
        PurePosixPath(word) for line in re.findall(r"^COPY (.+)$", first, re.MULTILINE) for word in line.split()[:-1]
    ]


def test_dockerfile_copies_all_that_the_wheel_is_made_of() -> None:
    """What pyproject.toml puts into the wheel, or reads while building it, is copied before the
    wheel is built, and .dockerignore keeps none of it out.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    wanted = [
        *wheel["only-include"],
        *wheel["force-include"],
        project["project"]["readme"],
        *project["project"]["license-files"],
    ]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()

    assert [
        path for path in wanted if not any(PurePosixPath(path).is_relative_to(source) for source in _copied())
    ] == []
    assert [path for path in wanted if PurePosixPath(path).parts[0] in ignored] == []


def test_images_are_built_without_the_test_kit() -> None:
    """Developers take the kit from the wheel; a service neither imports nor carries it."""
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()

    assert "shared/topobus/testing" in ignored
    assert (ROOT / "shared" / "topobus" / "testing").is_dir()
