"""Certificates of NATS servers: made once by an authority of our own, whole or not at all, made
anew in time, and never touched where somebody else made them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from support.laws import steps
from topobus.bus.login.certificate_facts import CertificateFacts, parse_certificate, pem_blocks, read_certificates
from topobus.bus.login.certificates import ServerCertificate, add_authority, certify, drop_old_authorities
from topobus.values.errors import ConfigError

_NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)
_NAMES = ("nats", "hub.example.org", "10.0.0.1", "::1")
_KILLED = 9


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """The folder of a server's certificate."""
    return tmp_path / "tls"


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """The folder of its authority."""
    return tmp_path / "authority"


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file()
    }


def _verify(
    server: Path, *, authorities: Path | None = None, name: str = "nats", when: datetime = _NOW + timedelta(hours=1)
) -> str:
    """Say what openssl, at its strictest, has against a server's certificate.

    Empty when nothing.
    """
    purpose = ("-purpose", "sslserver", "-x509_strict", "-verify_hostname", name, "-attime", str(int(when.timestamp())))
    trust = ("-CAfile", str(authorities or server / "ca.crt"))
    done = subprocess.run(
        ["openssl", "verify", *purpose, *trust, str(server / "tls.crt")], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stderr


def _is_pair(server: Path) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(server / "tls.crt", server / "tls.key")
    except ssl.SSLError:
        return False
    return True


@pytest.mark.parametrize("umask", [0o000, 0o077], ids=["umask-0", "umask-77"])
@pytest.mark.parametrize(
    ("is_for_group", "modes"), [(False, (0o700, 0o600)), (True, (0o750, 0o640))], ids=["owner", "group"]
)
def test_certificate_is_good_for_its_names_when_it_was_made(
    server: Path, authority: Path, umask: int, is_for_group: bool, modes: tuple[int, int]
) -> None:
    """The program openssl verifies it for each name and for no other.

    Whatever the umask, the keys are closed to others and what is public can be read.
    """
    before = os.umask(umask)
    try:
        made = certify(server, _NAMES, authority=authority, now=_NOW, is_for_group=is_for_group)
    finally:
        os.umask(before)

    assert [_verify(server, name=name) for name in ("nats", "hub.example.org")] == ["", ""]
    assert "hostname mismatch" in _verify(server, name="other")
    assert made.facts.names == tuple(sorted(_NAMES))
    assert _is_pair(server)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in (server, *server.iterdir())} == {
        "tls": modes[0], "tls.key": modes[1], "tls.crt": 0o644, "ca.crt": 0o644,
    }  # fmt: skip
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in (authority, *authority.iterdir())} == {
        "authority": 0o700, "ca.key": 0o600, "ca.crt": 0o644,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("later", "names", "is_new"),
    [
        (timedelta(days=1), _NAMES, False),
        (timedelta(days=1), ("10.0.0.1", "NATS."), False),
        (timedelta(days=1), (), False),
        (timedelta(days=1), (*_NAMES, "other"), True),
        (timedelta(days=240), _NAMES, False),
        (timedelta(days=250), _NAMES, True),
        (timedelta(days=400), (), True),
        (timedelta(hours=-2), _NAMES, None),
    ],
    ids=["same", "fewer", "none-named", "one-more", "a-third-left", "less-left", "expired", "clock-went-back"],
)
def test_certificate_is_made_anew_only_when_it_will_not_do(
    server: Path, authority: Path, later: timedelta, names: tuple[str, ...], is_new: bool | None
) -> None:
    """What is good stays as it is, bytes and all.

    A new one has the same key and the same authority. A clock that went behind the
    authority's beginning is refused.
    """
    certify(server, _NAMES, authority=authority, now=_NOW)
    before = _digests(server)

    if is_new is None:
        with pytest.raises(ConfigError, match="is good from"):
            certify(server, names, authority=authority, now=_NOW + later)
        return
    made = certify(server, names, authority=authority, now=_NOW + later)
    after = _digests(server)
    assert bool(made.why_new) is is_new
    assert (after.pop("tls.crt") != before.pop("tls.crt")) is is_new
    assert after == before
    assert _verify(server, when=_NOW + later) == ""


def test_authority_changes_without_a_moment_of_distrust_when_it_is_done_in_steps(
    server: Path, authority: Path, tmp_path: Path
) -> None:
    """A client trusts the server at each step: with the old authorities' file before the server's
    certificate changes, and with the new file all along.
    """
    certify(server, _NAMES, authority=authority, now=_NOW)
    old = shutil.copy(server / "ca.crt", tmp_path / "old.crt")
    first_key = (server / "tls.key").read_bytes()

    add_authority(server, authority=authority, now=_NOW)
    both = shutil.copy(server / "ca.crt", tmp_path / "both.crt")
    assert [_verify(server, authorities=file) for file in (old, both)] == ["", ""]
    with pytest.raises(ConfigError, match="not by the newest authority"):
        drop_old_authorities(server, authority=authority)
    assert not certify(server, (), authority=authority, now=_NOW).why_new

    certify(server, (), authority=authority, now=_NOW, is_renewal=True)
    assert _verify(server, authorities=both) == ""
    assert "unable to get local issuer" in _verify(server, authorities=old)
    assert (server / "tls.key").read_bytes() != first_key
    assert _is_pair(server)

    drop_old_authorities(server, authority=authority)
    assert _verify(server) == ""
    assert len(pem_blocks((server / "ca.crt").read_text())) == 1
    assert not certify(server, (), authority=authority, now=_NOW).why_new


@pytest.mark.parametrize("has_authority", [False, True], ids=["no-authority-here", "another-authority-here"])
@pytest.mark.parametrize("is_mounted", [False, True], ids=["files", "mounted-secret"])
def test_folder_is_never_written_when_somebody_else_filled_it(
    server: Path, authority: Path, tmp_path: Path, has_authority: bool, is_mounted: bool
) -> None:
    """A certificate of another authority is taken as it is, though it is about to expire and has
    other names.

    Nothing is made beside it, and renewing it is refused.
    """
    secret = tmp_path / "secret" / "..2026_11_23"
    certify(secret, ("theirs",), authority=tmp_path / "theirs", now=_NOW)
    if is_mounted:
        server.mkdir()
        (server / "..data").symlink_to(secret)
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (server / name).symlink_to(f"..data/{name}")
    else:
        secret.rename(server)
    if has_authority:
        certify(tmp_path / "unrelated", ("ours",), authority=authority, now=_NOW)
    before = _digests(tmp_path), sorted(tmp_path.rglob("*"))

    made = certify(server, _NAMES, authority=authority, now=_NOW + timedelta(days=360))
    with pytest.raises(ConfigError, match="was not made by an authority in"):
        certify(server, _NAMES, authority=authority, now=_NOW, is_renewal=True)
    with pytest.raises(ConfigError, match="was not made by an authority in"):
        add_authority(server, authority=authority, now=_NOW)

    assert made == ServerCertificate(folder=server, facts=read_certificates(server / "tls.crt")[0], is_ours=False)
    assert (_digests(tmp_path), sorted(tmp_path.rglob("*"))) == before


def test_certificate_is_one_when_several_make_it_at_once(server: Path, authority: Path) -> None:
    """Eight that begin together make one authority and one certificate.

    All of them are given that one.
    """
    made: list[ServerCertificate] = []
    together = threading.Barrier(8)

    def start() -> None:
        together.wait()
        made.append(certify(server, _NAMES, authority=authority, now=_NOW))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [certificate.facts for certificate in made] == [read_certificates(server / "tls.crt")[0]] * 8
    assert sum(bool(certificate.why_new) for certificate in made) == 1
    assert _verify(server) == ""


def _start(server: Path, authority: Path) -> None:
    certify(server, _NAMES, authority=authority, now=_NOW)


def _renew(server: Path, authority: Path) -> None:
    certify(server, (*_NAMES, "more"), authority=authority, now=_NOW)


def _change_authority(server: Path, authority: Path) -> None:
    add_authority(server, authority=authority, now=_NOW)
    certify(server, (), authority=authority, now=_NOW, is_renewal=True)


@pytest.mark.law
@pytest.mark.parametrize("work", [_start, _renew, _change_authority], ids=["start", "renew", "change-authority"])
def test_certificate_is_finished_when_whoever_made_it_was_killed_at_any_step(
    tmp_path: Path, work: Callable[[Path, Path], None]
) -> None:
    """Killed before each of its system calls that changes something, it leaves files that are
    whole, and the next call completes them without leaving anything behind.
    """
    before = tmp_path / "before"
    if work is not _start:
        _start(before / "tls", before / "authority")
    for step in steps(1000):
        life = tmp_path / f"life-{step}"
        shutil.copytree(before, life, ignore_dangling_symlinks=True) if before.exists() else life.mkdir()
        old = shutil.copy(life / "tls" / "ca.crt", life / "old.crt") if before.exists() else None

        is_complete = _done_in_a_child(work, life, killed_at=step)
        for file in (*life.glob("tls/*.crt"), *life.glob("authority/ca.*")):
            assert read_certificates(file)
        if old is not None:
            assert _verify(life / "tls") == ""

        certify(life / "tls", _NAMES, authority=life / "authority", now=_NOW)
        assert _verify(life / "tls") == ""
        assert _is_pair(life / "tls")
        assert sorted(path.name for path in (life / "tls").iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
        assert sorted(path.name for path in (life / "authority").iterdir()) == ["ca.crt", "ca.key"]
        if is_complete:
            break
    assert step > 10


def _done_in_a_child(work: Callable[[Path, Path], None], life: Path, *, killed_at: int) -> bool:
    """Do the work in a process that ends without a word before its n-th change.

    Gives whether it came to its end before.
    """
    child = os.fork()
    if child == 0:
        steps = 0

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal steps
            is_write = (
                event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
            )
            if is_write or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "subprocess.Popen"):
                steps += 1
                if steps == killed_at:
                    os._exit(_KILLED)

        sys.addaudithook(count)
        work(life / "tls", life / "authority")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_error_says_what_to_install_when_openssl_is_missing(
    server: Path, authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program and its package are named, nothing half-made is left, and with the program there
    the same call succeeds.
    """
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path))
        with pytest.raises(ConfigError, match="openssl, which makes certificates, is not installed") as refused:
            certify(server, _NAMES, authority=authority, now=_NOW)
    assert "apt-get install openssl" in refused.value.next_step
    assert _digests(tmp_path) == {}
    assert certify(server, _NAMES, authority=authority, now=_NOW).why_new


@pytest.mark.parametrize(
    "name", ["nats://hub:4222", "hub:4222", "a b", "", "x\nDNS:evil", "a,DNS:b", "fe80::1%eth0", "*.*.org", "é.org"]
)
def test_name_is_refused_when_it_is_no_host_and_no_address(
    server: Path, authority: Path, tmp_path: Path, name: str
) -> None:
    """The error repeats it; nothing is made, and nothing of it reaches openssl's configuration."""
    with pytest.raises(ConfigError, match="wanted a host name or an address"):
        certify(server, ("good", name), authority=authority, now=_NOW)
    assert _digests(tmp_path) == {}


def test_certificate_needs_names_when_it_is_the_first(server: Path, authority: Path, tmp_path: Path) -> None:
    """Without any name the error says which flag is missing, and nothing is made."""
    with pytest.raises(ConfigError, match="needs the names") as refused:
        certify(server, (), authority=authority, now=_NOW)
    assert "--name" in refused.value.next_step
    assert _digests(tmp_path) == {}


@pytest.mark.parametrize("secret", ["authority/ca.key", "tls/tls.key"])
def test_key_is_refused_when_others_may_read_it(server: Path, authority: Path, tmp_path: Path, secret: str) -> None:
    """A key that others may have read signs nothing more: the error
    names the file and what to do.
    """
    certify(server, _NAMES, authority=authority, now=_NOW)
    (tmp_path / secret).chmod(0o644)

    with pytest.raises(ConfigError, match=f"{secret} has mode 644"):
        certify(server, (*_NAMES, "more"), authority=authority, now=_NOW)


def test_certificate_is_refused_when_a_key_is_there_that_nobody_here_signed(server: Path, authority: Path) -> None:
    """A key without certificate and without authority is somebody's half: it is not taken for ours
    and not overwritten.
    """
    server.mkdir()
    (server / "tls.key").write_text("theirs")

    with pytest.raises(ConfigError, match=r"has tls\.key and no tls\.crt"):
        certify(server, _NAMES, authority=authority, now=_NOW)
    assert (server / "tls.key").read_text() == "theirs"


def _der(server: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert((server / "tls.crt").read_text())


def test_facts_are_those_of_openssl_when_a_certificate_is_read(server: Path, authority: Path) -> None:
    """Names, dates and common names are what openssl prints."""
    certify(server, _NAMES, authority=authority, now=_NOW)
    command = [
        "openssl",
        "x509",
        "-in",
        str(server / "tls.crt"),
        "-noout",
        "-dates",
        "-issuer",
        "-subject",
        "-ext",
        "subjectAltName",
    ]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    facts = parse_certificate(_der(server))

    assert f"notBefore={facts.not_before:%b %d %H:%M:%S %Y} GMT" in printed
    assert f"notAfter={facts.not_after:%b %d %H:%M:%S %Y} GMT" in printed
    assert f"issuer=CN = {facts.issuer}" in printed
    assert f"subject=CN = {facts.subject}" in printed
    assert facts.names == ("10.0.0.1", "::1", "hub.example.org", "nats")
    assert all(name in printed for name in ("DNS:hub.example.org, DNS:nats", "IP Address:10.0.0.1"))


def test_certificate_is_refused_when_it_is_cut_or_changed_anywhere(server: Path, authority: Path) -> None:
    """Whatever somebody sends in its place is facts or a ValueError, and nothing else.

    No cut one gives facts.
    """
    certify(server, _NAMES, authority=authority, now=_NOW)
    der = _der(server)
    for length in range(len(der)):
        with pytest.raises(ValueError, match=r"."):
            parse_certificate(der[:length])
    outcomes = set()
    for at in range(len(der)):
        for value in (0, 0x30, 0x7F, 0x80, 0x84, 0xFF):
            try:
                outcomes.add(type(parse_certificate(der[:at] + bytes([value]) + der[at + 1 :])))
            except ValueError as err:
                outcomes.add(type(err))
    assert CertificateFacts in outcomes
    assert outcomes <= {CertificateFacts, ValueError}
