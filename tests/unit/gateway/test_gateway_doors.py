"""Names of a driver's sockets: of one gateway's own, and never too long for a socket address."""

from __future__ import annotations

import pytest

from topobus.gateway.claims.rules.socket_paths import SOCKET_PATH_LIMIT, driver_sockets, is_instance_name
from topobus.gateway.config import CpuSettings, GatewaySettings, KubeletSettings, RuntimeSettings, check
from topobus.values.errors import ConfigError

UID = "3cec39ef-a300-4ce1-90fc-10e64dcb86ca"
DRIVER = "topobus.dev"


def names(folder: str, instance: str = UID) -> tuple[str, str]:
    """Both paths without their folder."""
    sockets = driver_sockets(f"{folder}/plugins", f"{folder}/plugins_registry", DRIVER, instance)
    return sockets.service.removeprefix(f"{folder}/plugins/"), sockets.registration.removeprefix(
        f"{folder}/plugins_registry/"
    )


def test_sockets_carry_the_pods_uid_when_the_path_has_room() -> None:
    """In kubelet's own folder the names tell driver and pod."""
    assert names("/var/lib/kubelet") == (f"{DRIVER}/dra-{UID}.sock", f"{DRIVER}-{UID}-reg.sock")


@pytest.mark.parametrize(
    ("length", "service", "registration"),
    [
        (44, "topobus.dev/dra-1b50cb6e.sock", "topobus.dev-1b50cb6e-reg.sock"),
        (70, "tb14bfa5a1.sock", "tb14bfa5a1.sock"),
    ],
)
def test_sockets_get_shorter_names_when_the_folder_is_long(length: int, service: str, registration: str) -> None:
    """First the uid is hashed, then all of it; each fits, and another gateway's differs."""
    folder = "/" + "k" * (length - 1)

    sockets = driver_sockets(f"{folder}/plugins", f"{folder}/plugins_registry", DRIVER, UID)

    assert names(folder) == (service, registration)
    assert max(len(sockets.service), len(sockets.registration)) <= SOCKET_PATH_LIMIT
    assert set(names(folder, "another")).isdisjoint(names(folder))


def test_sockets_of_two_drivers_differ_when_only_hashes_fit() -> None:
    """The last fall-back names driver and gateway in one hash."""
    folder = "/" + "k" * 69

    services = {driver_sockets(folder, folder, driver, UID).service for driver in (DRIVER, "other.topobus.dev")}

    assert len(services) == 2


def test_settings_are_refused_when_no_name_fits() -> None:
    """A folder that is too long for any name is the operator's to change: told which, how long, and
    how long it may be.
    """
    settings = GatewaySettings(node="n", kubelet=KubeletSettings(plugins_dir="/" + "k" * 95))

    with pytest.raises(
        ConfigError, match=r"kubelet\.plugins_dir: .* has 11\d bytes, a unix socket's path may have 107"
    ):
        check(settings)


@pytest.mark.parametrize("text", ["../evil", "a/b", "x" * 64, "ü"])
def test_instance_is_refused_when_it_cannot_be_part_of_a_file_name(text: str) -> None:
    """It ends up in a path, so it is checked before anything is made."""
    assert not is_instance_name(text)
    with pytest.raises(ConfigError, match="gateway: instance"):
        check(GatewaySettings(node="n", instance=text))


def test_owned_cpus_are_refused_without_the_runtimes_socket() -> None:
    """Nothing would pin them: the claims' containers would run on everybody's."""
    settings = GatewaySettings(node="n", cpus=CpuSettings(owned="4-7"), runtime=RuntimeSettings(socket=""))

    with pytest.raises(ConfigError, match=r"cpus\.owned is '4-7' and runtime\.socket is empty"):
        check(settings)
