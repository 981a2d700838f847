"""Makes keys and certificates by the program `openssl`, in a folder that is deleted afterwards.

The authority's key comes as a file, and results are PEM texts. `topobus.bus.login.certificates`
keeps them in files. `openssl ca` signs and not `openssl x509`, which before 3.4 cannot set the
begin of a certificate's validity.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from topobus.bus.login.user_keys import UNREADY
from topobus.values.errors import ConfigError

__all__ = ["new_key", "sign_authority", "sign_server"]

_OPENSSL_S = 30.0
_KEY = ("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
_CONFIGURATION = """
[ca]
default_ca = issuing
[issuing]
new_certs_dir = .
database = index.txt
rand_serial = yes
default_md = sha256
policy = any
unique_subject = no
[any]
commonName = supplied
[req]
distinguished_name = subject
[subject]
[authority]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


def new_key(folder: Path) -> str:
    """Make a private key."""
    return _openssl(folder, *_KEY)


def sign_authority(folder: Path, key: str, name: str, life: tuple[datetime, datetime]) -> str:
    """Make the certificate of an authority by its own key.

    Shapes: folder — one that no other user can read while it is made.
    """
    with _workplace(folder) as work:
        (work / "key.pem").touch(mode=0o600)
        (work / "key.pem").write_text(key, encoding="ascii")
        _request(work, "key.pem", name)
        return _sign(work, "authority", life, "-selfsign", "-keyfile", "key.pem")


def sign_server(
    folder: Path, key: Path, names: Sequence[str], life: tuple[datetime, datetime], *, authority: Path
) -> str:
    """Make the certificate of a server.

    Shapes: folder — one that no other user can write while it is made. key — the server's. names —
    DNS names and addresses, one at least. authority — file of the authority's key and certificate.
    """
    # At most 64 characters (RFC 5280, ub-common-name); clients compare the names
    # beside it, and never this one.
    subject = next((name for name in names if len(name) <= 64), "nats")
    kinds = ",".join(f"{'IP' if _is_address(name) else 'DNS'}:{name}" for name in names)
    with _workplace(folder, f"subjectAltName = {kinds}\n") as work:
        _request(work, str(key.absolute()), subject)
        own = str(authority.absolute())
        return _sign(work, "server", life, "-keyfile", own, "-cert", own)


def _request(work: Path, key: str, name: str) -> None:
    _openssl(work, "req", "-new", "-config", "openssl.cnf", "-key", key, "-subj", f"/CN={name}", "-out", "request.pem")


def _sign(work: Path, extensions: str, life: tuple[datetime, datetime], *signer: str) -> str:
    begin, end = (f"{when:%Y%m%d%H%M%SZ}" for when in life)
    how = (
        "-config",
        "openssl.cnf",
        "-batch",
        "-notext",
        "-extensions",
        extensions,
        "-startdate",
        begin,
        "-enddate",
        end,
    )
    _openssl(work, "ca", *how, *signer, "-in", "request.pem", "-out", "made.pem")
    return (work / "made.pem").read_text(encoding="ascii")


@contextlib.contextmanager
def _workplace(folder: Path, more: str = "") -> Iterator[Path]:
    """Provide a folder in which `openssl` finds what it needs. It is deleted afterwards, at the
    latest with the next call.
    """
    with tempfile.TemporaryDirectory(prefix=UNREADY, dir=folder, ignore_cleanup_errors=True) as name:
        work = Path(name)
        (work / "openssl.cnf").write_text(_CONFIGURATION + more, encoding="ascii")
        (work / "index.txt").touch()
        yield work


def _openssl(work: Path, *arguments: str) -> str:
    """Run `openssl` in a folder, and return what it printed."""
    try:
        done = subprocess.run(
            ["openssl", *arguments],
            cwd=work,
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_OPENSSL_S,
            check=False,
        )
    except FileNotFoundError as err:
        raise ConfigError(
            "the program openssl, which makes certificates, is not installed",
            next_step="install it (Debian, Ubuntu: apt-get install openssl), or put tls.crt, tls.key and ca.crt there "
            "yourself",
        ) from err
    except (OSError, subprocess.TimeoutExpired) as err:
        raise ConfigError(
            f"openssl {arguments[0]} cannot run: {err}", next_step="see whether `openssl version` works"
        ) from err
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no word why"]
        raise ConfigError(
            f"openssl {arguments[0]} failed with status {done.returncode}: {last[0]}",
            next_step="see whether `openssl version` works",
        )
    return done.stdout


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
