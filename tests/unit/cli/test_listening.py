"""`topobus up --listen`: what it refuses, and by which names a server is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.cli.application import run
from topobus.local_system.nats_listening import Listening, NatsCertificate
from topobus.values.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--listen", "0.0.0.0", "--open"], "--open leaves the users out, on this machine's loopback interface only"),
        (["--listen", "10.0.0.1", "--nats", "nats://10.0.0.1"], "--nats names another one"),
        (["--listen", "gpu1.example.org"], "wanted an address of this machine"),
        (["--name", "gpu1.example.org"], "--name is for a server that others reach"),
        (["--listen", "127.0.0.1", "--name", "gpu1"], "admits no other machine"),
    ],
    ids=["open", "another-server", "a-name", "name-alone", "loopback-with-name"],
)
def test_up_refuses_to_listen_when_the_flags_disagree(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    """A usage error with a next step; nothing is started."""
    assert run(["up", *arguments]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert says in printed
    assert "next:" in printed


@pytest.mark.parametrize(
    ("listening", "wanted", "left_out"),
    [
        (
            Listening(address="0.0.0.0", names=("gpu1.example.org",)),
            {"127.0.0.1", "::1", "localhost", "gpu1.example.org"},
            set(),
        ),
        (Listening(address="10.1.2.3"), {"10.1.2.3"}, {"127.0.0.1", "localhost"}),
        (Listening(address="fd00::5"), {"fd00::5"}, {"::1"}),
    ],
    ids=["everywhere", "one-address", "ipv6"],
)
def test_listening_names_whatever_clients_use_when_it_has_tls(
    listening: Listening, wanted: set[str], left_out: set[str]
) -> None:
    """Each way to the server is in its certificate, and no address at which it does not listen."""
    names = set(listening.wanted_names())
    assert listening.has_tls
    assert wanted <= names
    assert not names & left_out


@pytest.mark.parametrize(
    ("listening", "certificate", "here", "elsewhere"),
    [
        (Listening(address="10.1.2.3"), ("10.1.2.3",), "10.1.2.3", "10.1.2.3"),
        (Listening(address="10.1.2.3", names=("gpu1",)), ("10.1.2.3", "gpu1"), "10.1.2.3", "gpu1"),
        (Listening(address="0.0.0.0", names=("gpu1",)), ("127.0.0.1", "gpu1"), "127.0.0.1", "gpu1"),
        (Listening(address="0.0.0.0"), ("*.example.org", "gpu1.example.org"), "gpu1.example.org", "gpu1.example.org"),
    ],
    ids=["address", "name", "everywhere", "certificate-of-somebody-else"],
)
def test_host_is_one_of_the_certificate_when_clients_are_told_it(
    listening: Listening, certificate: tuple[str, ...], here: str, elsewhere: str
) -> None:
    """Services here connect by the shortest way that the certificate is for, others by the name
    that the user gave.
    """
    assert (listening.host_here(certificate), listening.host_elsewhere(certificate)) == (here, elsewhere)


def test_address_is_refused_when_this_machine_does_not_have_it(tmp_path: Path) -> None:
    """192.0.2.0/24 is nobody's: the error says so before any file is made."""
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.77") as refused:
        NatsCertificate(Listening(address="192.0.2.77"), tmp_path / "tls", tmp_path / "authority")
    assert "0.0.0.0" in refused.value.next_step
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_made_when_nobody_else_is_let_in(tmp_path: Path) -> None:
    """On loopback there is no certificate and no line of configuration."""
    certificate = NatsCertificate(Listening(), tmp_path / "tls", tmp_path / "authority")

    assert (certificate.folder, certificate.authority_file, certificate.url_here(4222), certificate.url_elsewhere(4222)) == (  # noqa: E501
        None, "", "nats://127.0.0.1:4222", "",
    )  # fmt: skip
    assert certificate.configuration("/tls", 8222) == ""
    assert list(tmp_path.iterdir()) == []
