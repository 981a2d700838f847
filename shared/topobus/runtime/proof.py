"""Proves that an answer comes from its device service, where NATS cannot tell who published it: a key for each class of a node, in files.

The answer's header `Topobus-Proof` is an HMAC-SHA256 (RFC 2104) over the reply subject, the ask's name, the body and the headers that carry an error. The reply subject
has 176 random bits and is used once, so no answer can be replayed for another ask. See docs/adr/0015.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from topobus.domain.errors import ConfigError

__all__ = ["PROOF", "AnswerSettings", "is_proven", "make_keys", "prove", "read_keys"]

PROOF = "Topobus-Proof"
_SUFFIX = ".key"
# What `make_keys` writes: 32 random bytes, as long as the hash, in hexadecimal.
_KEY_BYTES = 32
_KEY = "answers.key_dir"


class AnswerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How answers of device services prove their sender, on a NATS server that does not know who is who."""

    key_dir: str = ""
    """A folder with a file `<class>.key` for each device class. A device service proves its answers with its own class's; gateway and topology take
    answers of a class that has a file here only with its proof. Give each device service a folder with its own key alone. Empty: none."""


def prove(key: bytes, reply: str, ask: str, data: bytes, headers: Mapping[str, str]) -> str:
    """Give the proof of one answer: 64 hexadecimal digits.

    Every part is written with its length, so that no two answers have the same bytes.
    """
    parts = [reply.encode(), ask.encode(), data]
    for name in sorted(headers):
        parts += [name.encode(), headers[name].encode()]
    message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.new(key, message, hashlib.sha256).hexdigest()


def is_proven(key: bytes, proof: str, reply: str, ask: str, data: bytes, headers: Mapping[str, str]) -> bool:
    """Say whether a proof is that of the answer; takes as long for a wrong one as for a right one."""
    return hmac.compare_digest(proof.encode(), prove(key, reply, ask, data, headers).encode())


def read_keys(folder: str, classes: Collection[str] = ()) -> dict[str, bytes]:
    """Read the keys of a folder, by class; those of `classes` alone when any are given. An empty folder has none: an optional Secret that nobody made.

    Errors: raises ConfigError for a folder or a file that cannot be read, a file that others may read or change, and a key that is too short.
    """
    if not folder:
        return {}
    try:
        files = sorted(file for file in Path(folder).iterdir() if file.name.endswith(_SUFFIX))
    except OSError as err:
        raise ConfigError(
            f"{_KEY}: cannot read {folder}: {err.strerror}", next_step="make the folder, or leave the key out", key=_KEY
        ) from err
    return {file.name.removesuffix(_SUFFIX): _read(file) for file in files if not classes or file.name.removesuffix(_SUFFIX) in classes}


def make_keys(folder: Path, classes: Collection[str], *, is_for_group: bool = False) -> None:
    """Make the keys that are missing, readable by their owner alone (and by our group), in a folder that nobody else may enter.

    A folder that somebody waits for appears with all its keys. Errors: raises ConfigError when it cannot be written.
    """
    if folder.exists():
        _add_keys(folder, classes, 0o640 if is_for_group else 0o600)
        return
    unready = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    try:
        unready.mkdir(mode=0o750 if is_for_group else 0o700, parents=True)
        unready.chmod(0o750 if is_for_group else 0o700)
        _add_keys(unready, classes, 0o640 if is_for_group else 0o600)
        unready.rename(folder)
    except OSError as err:
        raise ConfigError(f"cannot make answer keys in {folder}: {err.strerror}", next_step="give a folder that can be written") from err


def main(argv: Sequence[str] | None = None) -> int:
    """Make answer keys as a command, for who hands them out (compose.yaml)."""
    # Here: every process of ours reads keys, and only this command parses words.
    import argparse

    parser = argparse.ArgumentParser(prog="python -m topobus.runtime.proof", description="Make the answer keys that are missing.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("classes", nargs="+")
    parser.add_argument("--for-group", action="store_true", help="let the group of this process read them")
    chosen = parser.parse_args(argv)
    try:
        make_keys(chosen.folder, chosen.classes, is_for_group=chosen.for_group)
    except ConfigError as err:
        print(f"answer keys: {err}", file=sys.stderr)  # noqa: T201 - the answer of a command
        return 78
    return 0


def _add_keys(folder: Path, classes: Collection[str], mode: int) -> None:
    try:
        for device_class in classes:
            file = folder / f"{device_class}{_SUFFIX}"
            try:
                # Never through a link, never over a key that somebody uses.
                handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
            except FileExistsError:
                continue
            with os.fdopen(handle, "w", encoding="ascii") as made:
                # Whatever the umask: the group may be who reads it.
                os.fchmod(made.fileno(), mode)
                made.write(f"{secrets.token_hex(_KEY_BYTES)}\n")
    except OSError as err:
        raise ConfigError(f"cannot make answer keys in {folder}: {err.strerror}", next_step="give a folder that can be written") from err


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            key = opened.read().strip()
    except OSError as err:
        raise ConfigError(
            f"{_KEY}: cannot read {file}: {err.strerror}", next_step="give this service the right to read it", key=_KEY
        ) from err
    if mode & 0o027:
        # The group may read: that is how Kubernetes gives a Secret to a pod that is not root (fsGroup).
        raise ConfigError(
            f"{_KEY}: {file} has mode {mode & 0o777:o}: others may read or change it, wanted 600 (or 640)",
            next_step=f"chmod 600 {file}, and make a new key if somebody may have read it",
            key=_KEY,
        )
    if len(key) < _KEY_BYTES:
        raise ConfigError(
            f"{_KEY}: {file} has {len(key)} bytes, wanted at least {_KEY_BYTES}", next_step=f"openssl rand -hex 32 > {file}", key=_KEY
        )
    return key


if __name__ == "__main__":
    sys.exit(main())
