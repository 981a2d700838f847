"""The options by which commands name manifests, `-f`, `-R` and `-k`, and the reading of what they
name.

Objects keep the order of the manifests.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from topobus.cli.exits import UsageError
from topobus.formats.messages.messages import ApiObject

if TYPE_CHECKING:
    from topobus.cli.objects.manifests import Note

__all__ = ["Files", "Kustomization", "Recursive", "read_sources"]

Files = Annotated[
    tuple[Path, ...],
    Parameter(
        name=("--file", "-f"),
        help="A manifest or a folder of them, or several; - reads standard input.",
        allow_leading_hyphen=True,
    ),
]
Kustomization = Annotated[
    Path | None,
    Parameter(
        name=("--kustomize", "-k"), help="A folder with a kustomization; kustomize or kubectl on the PATH builds it."
    ),
]
Recursive = Annotated[bool, Parameter(name=("--recursive", "-R"), help="With a folder: include the folders within it.")]


def read_sources(
    verb: str, files: tuple[Path, ...], kustomization: Path | None, note: Note, *, is_recursive: bool
) -> list[ApiObject]:
    """Read all of our named objects. Others are left out with a note.

    Errors: raises UsageError when nothing is named, or a kustomization beside files; else as the
    readers do.
    """
    # Imported here: it loads the readers of manifests, which a deletion by name does not need.
    from topobus.cli.objects.kustomize import built_kustomization
    from topobus.cli.objects.manifests import manifest_files, only_ours, read_mixed
    from topobus.formats.kubernetes.manifest import parse_mixed

    if kustomization is not None and (files or is_recursive):
        raise UsageError(
            "-k takes no other files: a kustomization has its own list",
            next_step=f"name the others in the kustomization, or {verb} them by themselves",
        )
    if kustomization is not None:
        return only_ours(
            [parse_mixed(built_kustomization(kustomization), where=f"{kustomization}, built")], [kustomization], note
        )
    if not files:
        raise UsageError(
            f"wanted what to {verb}: -f FILE or -k FOLDER",
            next_step="examples/claims and examples/pods have manifests to start from",
        )
    return read_mixed(manifest_files(files, is_recursive=is_recursive), note)
