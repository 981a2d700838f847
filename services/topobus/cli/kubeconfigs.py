"""Finds the file by which a command reaches a cluster's API server."""

from __future__ import annotations

import os
from pathlib import Path

from topobus.cli.exits import InputError

__all__ = ["find_kubeconfig"]


def find_kubeconfig(given: Path | None) -> Path | None:
    """Find the kubeconfig as kubectl does: the option, $KUBECONFIG, the home folder.

    None means the pod's own account.

    Errors: raises InputError when the option or the variable names a file that does not exist.
    """
    named = given or (Path(first) if (first := os.environ.get("KUBECONFIG", "").split(os.pathsep)[0]) else None)
    if named is not None:
        if not named.is_file():
            raise InputError(
                f"there is no kubeconfig {named}", next_step="name one with --kubeconfig FILE or KUBECONFIG"
            )
        return named
    usual = Path.home() / ".kube" / "config"
    return usual if usual.is_file() else None
