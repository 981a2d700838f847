"""`topobus verify`: checks the files of a release offline, by the signature of their sums.

The signature has the format of ssh-keygen(1), -Y, and that program checks it: no package of ours
has Ed25519, and a user can check it without Topobus. What the files say of each other is decided in
`topobus.cli.rules.release_check`.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from topobus.cli.exits import ExitCode, InputError
from topobus.cli.objects.input_files import SNAPSHOT_BYTES, read_bytes, read_text
from topobus.cli.options import OUTPUT_DEFAULTS, OutputOptions
from topobus.cli.rules.release_check import SIGNATURE, SUMS, Fault, check_release, commit_of
from topobus.values.errors import ConfigError, ContractError

__all__ = ["verify"]

# Seconds; it takes a hundredth of one.
_SSH_KEYGEN_S = 30.0
_PUBLIC_KEY = re.compile(r"(?:ssh|sk-ssh|ecdsa|sk-ecdsa)-[a-z0-9@.-]+ [A-Za-z0-9+/]+=*(?: .*)?")
_WHOLE = "give the folder with all files of a release: docs/how-to/verify-a-release.md"
_KEYS = "give the public key of the release's authors, a line such as `ssh-ed25519 AAAA… topobus releases`"


def verify(
    release: Annotated[Path, Parameter(help="The folder with a release's files, or the wheel in it.")],
    *,
    key: Annotated[Path, Parameter(help="The authors' public keys, a line each, from another place than the release.")],
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Check a release offline: signature, sums, SBOMs and provenance."""
    output = options.output()
    if not release.exists():
        raise InputError(f"there is no {release}", next_step=_WHOLE)
    folder, wheel = (release, "") if release.is_dir() else (release.parent, release.name)
    files = _read_files(folder)
    signer, faults = _check_signature(files[SUMS], folder / SIGNATURE, key)
    commit = ""
    # What is not signed may say anything.
    if not faults:
        faults = check_release(files, wheel)
        commit = "" if faults else commit_of(files)
    output.document({"folder": str(folder), "signed_by": signer, "commit": commit, "faults": faults})
    for fault in faults:
        output.show(Text.assemble((fault.code, "fail"), f": {fault.where}: got {fault.got}, wanted {fault.wanted}"))
        output.show(Text(f"  next: {fault.next_step}", "faint"))
    if not faults:
        output.show(Text(f"{folder}: signed by {signer}, and all files fit together", "ok"))
        output.show(Text(f"built from commit {commit}", "faint"))
    return ExitCode.NO if faults else ExitCode.OK


def _check_signature(sums: bytes, signature: Path, key: Path) -> tuple[str, tuple[Fault, ...]]:
    """Have ssh-keygen check the signature of the sums, and name the key that made it."""
    lines = [line.strip() for line in read_text(key, limit_bytes=1 << 16, next_step=_KEYS).splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or not all(map(_PUBLIC_KEY.fullmatch, keys)):
        raise ContractError(f"{key}: got no public keys of OpenSSH, one a line, as wanted", next_step=_KEYS)
    if not signature.is_file():
        step = "download it as well; what has no signature is not of the authors"
        return "", (Fault("no-signature", SIGNATURE, "no such file", f"the signature of {SUMS}", step),)
    with tempfile.NamedTemporaryFile("w", prefix="topobus-signers-") as file:
        file.write("".join(f'topobus namespaces="file" {line}\n' for line in keys))
        file.flush()
        command = ["ssh-keygen", "-Y", "verify", "-f", file.name, "-I", "topobus", "-n", "file", "-s", str(signature)]
        try:
            done = subprocess.run(command, input=sums, capture_output=True, timeout=_SSH_KEYGEN_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as err:
            raise ConfigError(
                f"ssh-keygen, which checks signatures, cannot run: {err}",
                next_step="install it, 8.1 or newer (Debian, Ubuntu: apt-get install openssh-client)",
            ) from err
    text = "; ".join((done.stdout + done.stderr).decode(errors="replace").strip().splitlines())
    if done.returncode == 0:
        return text.rpartition(" key ")[2], ()
    step = "do not install this release; compare the key with another place where its authors publish it"
    return "", (Fault("bad-signature", SIGNATURE, text, f"a signature of {SUMS} by a key of {key}", step),)


def _read_files(folder: Path) -> dict[str, bytes]:
    """Read the sums and what could be of a release. Other downloads may lie beside it."""
    try:
        names = [path.name for path in folder.iterdir() if path.name.startswith("topobus-") and path.is_file()]
    except OSError as err:
        raise InputError(f"cannot read {folder}: {err.strerror}", next_step=_WHOLE) from err
    return {
        name: read_bytes(folder / name, limit_bytes=SNAPSHOT_BYTES, next_step=_WHOLE) for name in sorted([SUMS, *names])
    }
