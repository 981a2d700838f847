"""Finds the file by which a command reaches a cluster's API server, and the namespace that it names."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from topobus.cli.exits import InputError

__all__ = ["find_kubeconfig", "namespace_of"]


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


def namespace_of(kubeconfig: Path | None, context: str) -> str:
    """Return the namespace of a context of a kubeconfig, by default its current one.

    A file that cannot be read has none: what connects by it reports why.
    """
    try:
        config = yaml.safe_load(kubeconfig.read_text(encoding="utf-8")) if kubeconfig is not None else {}
        named = {entry["name"]: entry["context"] for entry in config.get("contexts") or ()}
        return str(named.get(context or config.get("current-context"), {}).get("namespace") or "default")
    except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError):
        return "default"
