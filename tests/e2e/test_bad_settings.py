"""Wrong settings, at each of the eight services as a process: status 78, one message that names the
key and where it was written, no traceback.

Almost all are asked by --check-config: what it does not find, an operator finds at night.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from support.running import LIMIT_S, SERVICES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

DEVICE_SERVICES = ("gpu", "nic", "fpga", "cpu")
_AT_ONCE = 4


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A wrong setting: how it comes in, at which services, and what the message must say."""

    says: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    """`*` stands for the service's name."""
    toml: str | None = None
    services: tuple[str, ...] = SERVICES


LONG = "/x" * 60
CASES = {
    "unknown-key-in-file": Wrong(toml="[nats]\nurrl = 'x'\n", says=("nats.urrl", "did you mean url?", "file ")),
    "unknown-section-in-file": Wrong(toml="[nat]\nurl = 'x'\n", says=("there is no setting nat", "file ")),
    "unknown-key-in-variable": Wrong(
        variables={"TOPOBUS_*__NATS__URRL": "x"}, says=("TOPOBUS_*__NATS__URRL", "did you mean URL?")
    ),
    "unknown-shared-variable": Wrong(
        variables={"TOPOBUS_ALL__NOD": "x"}, says=("TOPOBUS_ALL__NOD", "did you mean NODE?")
    ),
    "unknown-shared-hardware": Wrong(
        variables={"TOPOBUS_ALL__HARDWARE__ROOTT": "x"}, says=("TOPOBUS_ALL__HARDWARE__ROOTT",)
    ),
    "section-as-key": Wrong(variables={"TOPOBUS_ALL__NATS": "x"}, says=("TOPOBUS_ALL__NATS", "URL|url")),
    "number-that-is-text": Wrong(
        variables={"TOPOBUS_*__HTTP__PORT": "many"}, says=("http.port", "'many'", "TOPOBUS_*__HTTP__PORT")
    ),
    "number-out-of-range": Wrong(toml="[http]\nport = 65536\n", says=("http.port", "65536", "file ")),
    "number-without-end": Wrong(
        variables={"TOPOBUS_ALL__NATS__TIMEOUT_S": "inf"}, says=("nats.timeout_s", "TOPOBUS_ALL__NATS__TIMEOUT_S")
    ),
    "no-number": Wrong(toml="[nats]\ntimeout_s = nan\n", says=("nats.timeout_s", "file ")),
    "table-where-text-belongs": Wrong(toml="[node]\nname = 'x'\n", says=("node", "file ")),
    "bad-node-name": Wrong(variables={"TOPOBUS_ALL__NODE": "No_Node"}, says=("node", "'No_Node'", "TOPOBUS_ALL__NODE")),
    "bad-node-name-in-file": Wrong(toml="node = '-x'\n", says=("node", "'-x'", "settings.toml")),
    "unknown-log-level": Wrong(
        variables={"TOPOBUS_ALL__LOG__LEVEL": "loud"}, says=("log.level", "debug", "TOPOBUS_ALL__LOG__LEVEL")
    ),
    "file-that-is-no-toml": Wrong(toml="[nats\n", says=("settings.toml", "is not TOML")),
    "url-of-another-scheme": Wrong(
        variables={"TOPOBUS_ALL__NATS__URL": "http://x:1"}, says=("nats.url", "TOPOBUS_ALL__NATS__URL")
    ),
    "url-without-a-host": Wrong(toml="[nats]\nurl = 'nats://'\n", says=("nats.url", "settings.toml")),
    "url-with-a-bad-port": Wrong(
        variables={"TOPOBUS_ALL__NATS__URL": "nats://x:99999"}, says=("nats.url", "TOPOBUS_ALL__NATS__URL")
    ),
    "url-with-an-open-bracket": Wrong(
        variables={"TOPOBUS_ALL__NATS__URL": "nats://[::1"}, says=("nats.url", "TOPOBUS_ALL__NATS__URL")
    ),
    "password-file-that-is-missing": Wrong(
        variables={"TOPOBUS_ALL__NATS__PASSWORD_FILE": "/nowhere"},
        says=("nats.password_file", "/nowhere", "TOPOBUS_ALL__NATS__PASSWORD_FILE"),
    ),
    "certificate-that-is-none": Wrong(
        toml="[nats]\ntls_ca_file = '/dev/null'\n", says=("nats.tls_ca_file", "settings.toml")
    ),
    "unknown-plugin-allowed": Wrong(
        services=DEVICE_SERVICES,
        variables={"TOPOBUS_*__DRIVERS__ALLOW": "nvidea"},
        says=("drivers.allow", "'nvidea'", "DRIVERS__ALLOW"),
    ),
    "unknown-plugin-denied": Wrong(
        services=DEVICE_SERVICES, toml="[drivers]\ndeny = ['x']\n", says=("drivers.deny", "'x'", "settings.toml")
    ),
    "negative-time": Wrong(
        services=DEVICE_SERVICES, toml="[health]\npoll_s = -1\n", says=("health.poll_s", "-1", "settings.toml")
    ),
    "unknown-policy": Wrong(
        services=("topology",),
        variables={"TOPOBUS_TOPOLOGY__ALIGNMENT__POLICY": "strict"},
        says=("alignment.policy", "single-numa-node", "TOPOBUS_TOPOLOGY__ALIGNMENT__POLICY"),
    ),
    "bad-cpulist": Wrong(
        services=("topology",),
        toml="[alignment]\nreserved_cpus = '0-'\n",
        says=("alignment", "reserved_cpus", "cpulist", "settings.toml"),
    ),
    "options-that-exclude-each-other": Wrong(
        services=("topology",),
        toml="[alignment.cpu]\nfull_pcpus_only = true\ndistribute_cpus_across_cores = true\n",
        says=("alignment.cpu", "settings.toml"),
    ),
    "unknown-mode": Wrong(
        services=("controller",), toml="mode = 'fast'\n", says=("mode", "corrected", "settings.toml")
    ),
    "budget-too-small": Wrong(
        services=("controller",), toml="step_budget = 1\n", says=("step_budget", "100", "settings.toml")
    ),
    "socket-folder-too-long": Wrong(
        services=("gateway",),
        variables={"TOPOBUS_GATEWAY__KUBELET__PLUGINS_DIR": LONG},
        says=("kubelet.plugins_dir", "107", "TOPOBUS_GATEWAY__KUBELET__PLUGINS_DIR"),
    ),
    "bad-prefix": Wrong(
        services=("gateway",), toml="resource_prefix = 'kubernetes.io'\n", says=("resource_prefix", "settings.toml")
    ),
    "unknown-exposure": Wrong(
        services=("gateway",), toml="[exposure]\ngpu = 'all'\n", says=("exposure", "settings.toml")
    ),
    "cluster-without-its-file": Wrong(
        services=("gateway",), toml="[cluster]\nmode = 'kubeconfig'\n", says=("cluster", "settings.toml")
    ),
}


@dataclass(frozen=True, kw_only=True)
class End:
    """How a process ended."""

    status: int
    out: str
    err: str

    def assert_refused(self, service: str, says: tuple[str, ...]) -> None:
        """Check status and message."""
        assert self.status == 78, self
        assert self.out == ""
        assert "Traceback" not in self.err
        assert self.err.startswith(f"topobus-{service}: ")
        assert self.err.count("\n") == 1, "one message of one line"
        for part in says:
            words = part.replace("*", service.upper()).split("|")
            assert any(word in self.err for word in words), f"{words} not in: {self.err}"


async def start(service: str, *arguments: str, **variables: str) -> End:
    """Run a service with these settings until it ends."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TOPOBUS_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"topobus.{service}.main",
        *arguments,
        env={**clean, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return End(status=process.returncode or 0, out=out.decode(), err=err.decode())


def chosen() -> Iterator[ParameterSet]:
    """Each case at one service that it concerns, in turn, so that all services and all cases are
    met and each process is started for a reason.
    """
    for number, (name, wrong) in enumerate(CASES.items()):
        service = wrong.services[number % len(wrong.services)]
        yield pytest.param(service, wrong, id=f"{name}-{service}")


@pytest.mark.parametrize(("service", "wrong"), list(chosen()))
async def test_service_names_key_and_origin_when_a_setting_is_wrong(service: str, wrong: Wrong, tmp_path: Path) -> None:
    """Each wrong setting is refused before anything is connected."""
    arguments = ["--check-config"]
    if wrong.toml is not None:
        file = tmp_path / "settings.toml"
        file.write_text(wrong.toml)
        arguments += ["--config", str(file)]

    end = await start(
        service, *arguments, **{key.replace("*", service.upper()): value for key, value in wrong.variables.items()}
    )

    end.assert_refused(service, wrong.says)


async def test_every_service_refuses_when_key_node_url_or_file_is_wrong(tmp_path: Path) -> None:
    """What concerns all is refused by all eight, in the same words, without --check-config, and an
    unreadable file is named.
    """
    room = asyncio.Semaphore(_AT_ONCE)
    wrong: list[tuple[tuple[str, ...], dict[str, str], tuple[str, ...]]] = [
        ((), {"TOPOBUS_ALL__NATS__URL": "ftp://x"}, ("nats.url", "TOPOBUS_ALL__NATS__URL")),
        (("--config", str(tmp_path)), {}, (str(tmp_path), "cannot read")),
    ]

    async def check_case(
        service: str, arguments: tuple[str, ...], variables: dict[str, str], says: tuple[str, ...]
    ) -> None:
        async with room:
            (await start(service, *arguments, **variables)).assert_refused(service, says)

    async with asyncio.TaskGroup() as group:
        for service in SERVICES:
            for arguments, variables, says in wrong:
                group.create_task(check_case(service, arguments, variables, says))


@pytest.mark.parametrize("service", ["discovery", "gateway"])
async def test_service_names_the_port_when_it_is_in_use(service: str) -> None:
    """A port that somebody else listens at is refused at the start, not silently left out."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        end = await start(service, TOPOBUS_ALL__HTTP__PORT=port)

    end.assert_refused(service, ("http.port", port, "TOPOBUS_ALL__HTTP__PORT"))


# Each service once with nothing but what it imports itself.
@pytest.mark.real_start
@pytest.mark.parametrize("service", SERVICES)
async def test_check_config_says_good_when_nothing_is_set(service: str) -> None:
    """The defaults are good, everywhere."""
    end = await start(service, "--check-config")

    assert (end.status, end.err) == (0, "")
    assert "the settings are good" in end.out
