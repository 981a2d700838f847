"""`tools/release`: what it refuses before it builds anything.

That it builds the same wheel twice and runs the demo from it, it proves itself at each release.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a version, a changelog and the script.

    Python there only says that it was called.
    """
    for name, text in (
        ("pyproject.toml", 'version = "1.2.0"\n'),
        ("CHANGELOG.md", "# Changelog\n\n## 1.2.0\n"),
        ("requirements/build.txt", ""),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "release", tmp_path / "tools" / "release")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(repository: Path, *arguments: str) -> None:
    """Run git there, as somebody."""
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=repository, check=True, capture_output=True)


def commit(repository: Path) -> None:
    """Commit all that is there."""
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "a")


def release(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script; what would build is a program that fails with a word of its own."""
    builder = repository.parent / f"{repository.name}-python"
    builder.write_text("#!/bin/sh\necho 'it builds' >&2\nexit 7\n")
    builder.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(builder)}
    return subprocess.run(
        [str(repository / "tools" / "release"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_release_begins_to_build_when_all_is_committed(repository: Path) -> None:
    """Version, changelog, a clean tree and no tag: the first thing that
    is run is the interpreter.
    """
    answer = release(repository, "1.2.0")

    assert (answer.returncode, "it builds" in answer.stderr) == (7, True)


def test_release_is_refused_when_the_version_is_another(repository: Path) -> None:
    """What the package says of itself is what is released."""
    answer = release(repository, "1.3.0")

    assert (answer.returncode, "pyproject.toml has version 1.2.0, wanted 1.3.0" in answer.stderr) == (65, True)


def test_release_is_refused_when_the_changelog_has_no_such_section(repository: Path) -> None:
    """Who updates must be able to read what changed."""
    (repository / "CHANGELOG.md").write_text("## Unreleased\n")
    commit(repository)

    answer = release(repository, "1.2.0")

    assert (answer.returncode, "no section '## 1.2.0'" in answer.stderr) == (65, True)


def test_release_is_refused_when_something_is_not_committed(repository: Path) -> None:
    """A wheel that nobody can build again is no release."""
    (repository / "new").write_text("")

    answer = release(repository, "1.2.0")

    assert (answer.returncode, "uncommitted changes" in answer.stderr) == (65, True)


def test_release_is_refused_when_another_commit_has_the_tag(repository: Path) -> None:
    """A version is one commit for ever; the tagged one may be built again."""
    git(repository, "tag", "v1.2.0")
    assert "it builds" in release(repository, "1.2.0").stderr
    commit(repository)

    answer = release(repository, "1.2.0")

    assert (answer.returncode, "v1.2.0 is tagged already" in answer.stderr) == (65, True)


@pytest.mark.parametrize("arguments", [[], ["latest"], ["--key", "1.2.0"], ["1.2.0", "1.3.0"], ["--push", "1.2.0"]])
def test_usage_is_told_when_an_argument_is_wrong(repository: Path, arguments: list[str]) -> None:
    """A wrong word builds nothing."""
    answer = release(repository, *arguments)

    assert (answer.returncode, "usage" in answer.stderr, "it builds" in answer.stderr) == (64, True, False)


@pytest.mark.parametrize("key", ["absent", "CHANGELOG.md", "."])
def test_release_is_refused_when_the_key_is_none(repository: Path, key: str) -> None:
    """It is looked at before minutes of building, not after them."""
    answer = release(repository, "--key", key, "1.2.0")

    assert (answer.returncode, "is no key" in answer.stderr, "it builds" in answer.stderr) == (66, True, False)


@pytest.mark.parametrize("script", ["release", "audit", "build-images", "mutants"])
def test_script_has_no_finding_of_shellcheck(script: str) -> None:
    """Its quoting and its tests are what they look like."""
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("no shellcheck is on the PATH (apt-get install shellcheck)")

    done = subprocess.run(
        [shellcheck, str(ROOT / "tools" / script)], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stdout
