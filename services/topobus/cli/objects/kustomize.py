"""Builds a kustomization by the user's own program, `kustomize` or `kubectl`: its rules are large,
change, and are not repeated here.

Source: `kustomize build` and `kubectl kustomize`, which is in kubectl since 1.14.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from topobus.cli.exits import InputError
from topobus.cli.objects.input_files import MANIFEST_BYTES
from topobus.values.errors import ContractError

__all__ = ["built_kustomization"]

# Names that a kustomization may have, in the order in which kustomize looks for them.
_FILES = ("kustomization.yaml", "kustomization.yml", "Kustomization")
_PROGRAMS = (("kustomize", "build"), ("kubectl", "kustomize"))
_SHOWN_LINES = 3


def built_kustomization(folder: Path) -> str:
    """Build the manifests of a kustomization, as text.

    Errors: raises InputError for a folder that has none, when no program can build it, and with the
    program's own message when it fails; ContractError when it prints more than a manifest may have.
    """
    if not any((folder / name).is_file() for name in _FILES):
        raise InputError(
            f"{folder} has no kustomization ({', '.join(_FILES)})",
            next_step="name the folder that has it; plain manifests are applied with -f FOLDER",
        )
    command = next(((path, word) for program, word in _PROGRAMS if (path := shutil.which(program)) is not None), None)
    if command is None:
        raise InputError(
            f"cannot build {folder}: neither kustomize nor kubectl is on the PATH",
            next_step="install one: kubectl (https://kubernetes.io/docs/tasks/tools) or kustomize "
            "(https://kubectl.docs.kubernetes.io/installation/kustomize); "
            "or build it elsewhere and give the result: topobus apply -f -",
        )
    try:
        done = subprocess.run(
            [*command, str(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as err:
        raise InputError(
            f"cannot run {command[0]}: {err.strerror}", next_step="check that program, or build with another"
        ) from err
    if done.returncode != 0:
        words = "; ".join(done.stderr.strip().splitlines()[-_SHOWN_LINES:]) or f"it ended with {done.returncode}"
        raise InputError(
            f"{' '.join(command)} {folder}: {words}",
            next_step="correct the kustomization; the same command shows what it builds",
        )
    if len(done.stdout) > MANIFEST_BYTES:
        raise ContractError(
            f"{folder}: it builds more than {MANIFEST_BYTES} bytes", next_step="take it apart into smaller ones"
        )
    return done.stdout
