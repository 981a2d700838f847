"""Topobus as the cluster suite finds it: running already, applied by the suite from manifests, or
run by the suite as processes of its own on this machine.

`TOPOBUS_CLUSTER_INSTALLATION` selects: `running` (the default), `manifests` or `processes` (`hands`
and `nodes` are of tests that install it themselves). What the suite must do to it (kill, update,
break a device, uninstall) it does itself in the last two; for `running`, and for kubelet in all
three, shell commands in the environment do it, since every installation does it another way. A test
without its command is skipped, with the reason.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.cluster import seconds
from support.looks import next_look
from topobus.simulation.machines import RecordedMachine, build
from topobus.simulation.nats_server import find_nats_server, free_port
from topobus.values.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("running", "manifests", "processes", "hands", "nodes")
NODE_SERVICES = ("discovery", "gpu", "nic", "topology")
_READY_S = 60.0
_NAMESPACE = "topobus"


def setting(name: str, default: str = "") -> str:
    """Read a setting of the suite."""
    return os.environ.get(f"TOPOBUS_CLUSTER_{name}", default)


async def command(name: str, **more: str) -> None:
    """Run the shell command that a setting holds; skip the test, loudly, when there is none."""
    text = setting(name)
    if not text:
        pytest.skip(f"NOT CHECKED ON A CLUSTER: TOPOBUS_CLUSTER_{name} not set (a shell command)")
    await _run(text, is_shell=True, **more)


async def _run(*words: str, is_shell: bool = False, **more: str) -> None:
    environment = {**os.environ, **more}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": environment}
    made = (
        asyncio.create_subprocess_shell(words[0], **pipes)
        if is_shell
        else asyncio.create_subprocess_exec(*words, **pipes)
    )  # type: ignore[arg-type]
    process = await made
    limit_s = seconds("TOPOBUS_CLUSTER_COMMAND_S", 180)
    try:
        output, _ = await asyncio.wait_for(process.communicate(), limit_s)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise AssertionError(f"{' '.join(words)} did not end within TOPOBUS_CLUSTER_COMMAND_S={limit_s:g} s") from None
    assert process.returncode == 0, f"{' '.join(words)} ended with {process.returncode}: {output.decode()[-2000:]}"


class Installation:
    """One that is running already; everything is done by commands of the environment."""

    async def install(self) -> None:
        """Bring it up; ready when this returns."""

    async def kill_gateway(self) -> None:
        """Kill the node's gateway with SIGKILL. What runs it starts it again."""
        await command("KILL_GATEWAY")

    async def update(self, *, surge: bool) -> None:
        """Replace the node's gateway: with `surge` the new one first, else the old one ends first.

        Done when the new one is ready.
        """
        await command("UPDATE_SURGE" if surge else "UPDATE")

    async def break_device(self, device: str, pci: str) -> None:
        """Let a device fail; the command gets its name and PCI address as DEVICE and PCI."""
        await command("BREAK_DEVICE", DEVICE=device, PCI=pci)

    async def set_spares(self, device_class: str, count: int) -> None:
        """Set `spares.count` of a device service; the command gets both as CLASS and COUNT, and
        returns when the service runs with it.
        """
        await command("SET_SPARES", CLASS=device_class, COUNT=str(count))

    async def uninstall(self) -> None:
        """Take it off the node."""
        await command("UNINSTALL")

    @property
    def nats_url(self) -> str:
        """Where its NATS is reached from here, as a user who may read; empty: nowhere."""
        return setting("NATS_URL")

    def check(self) -> None:
        """Fail when it cannot be in order, before a test waits for it in vain."""

    def close(self) -> None:
        """End what the suite itself started."""


class Manifests(Installation):
    """Applied by kubectl from a kustomization of this repository (TOPOBUS_CLUSTER_MANIFESTS, by
    default deploy/kubernetes-try-out).
    """

    _workloads = ("statefulset/nats", "daemonset/topobus-node", "daemonset/topobus-gateway")

    def __init__(self) -> None:
        self._folder = str(ROOT / setting("MANIFESTS", "deploy/kubernetes-try-out"))
        self._kubectl = shutil.which(setting("KUBECTL", "kubectl")) or ""
        if not self._kubectl:
            pytest.fail(
                "no kubectl on the PATH: set TOPOBUS_CLUSTER_KUBECTL, or TOPOBUS_CLUSTER_INSTALLATION=processes",
                pytrace=False,
            )

    async def install(self) -> None:
        """Bring it up."""
        await _run(self._kubectl, "apply", "-k", self._folder)
        await self._settled()

    async def kill_gateway(self) -> None:
        """Kill it, and see it come back."""
        # PID 1 of a container ignores SIGKILL from inside, so the pod goes without any
        # grace: its processes are killed.
        await self._on_pods(
            "delete", "pod", "-l", "app.kubernetes.io/name=topobus-gateway", "--grace-period=0", "--force"
        )
        await self._settled()

    async def update(self, *, surge: bool) -> None:
        """Replace it, the new one first or last."""
        strategy = '{"maxSurge":1,"maxUnavailable":0}' if surge else '{"maxSurge":0,"maxUnavailable":1}'
        patch = f'{{"spec":{{"updateStrategy":{{"rollingUpdate":{strategy}}}}}}}'
        await self._on_pods("patch", "daemonset", "topobus-gateway", "-p", patch)
        await self._on_pods("rollout", "restart", "daemonset/topobus-gateway")
        await self._settled()

    async def uninstall(self) -> None:
        """Take everything off the node."""
        await _run(self._kubectl, "delete", "-k", self._folder, "--ignore-not-found", "--timeout=120s")

    async def _on_pods(self, *words: str) -> None:
        await _run(self._kubectl, "-n", _NAMESPACE, *words)

    async def _settled(self) -> None:
        # It says what it waits for, and ends before a command has to.
        limit_s = 0.9 * seconds("TOPOBUS_CLUSTER_COMMAND_S", 180)
        for workload in self._workloads:
            await self._on_pods("rollout", "status", workload, f"--timeout={limit_s:g}s")


class Processes(Installation):
    """NATS and the node's services as processes of this one, on a recorded machine: no images, no
    pods.

    As root where kubelet's folders are root's.

    Shapes: on — the words that run a command on the node, by becoming it; address — where the node
    is reached from here; nats_url — a server that runs already; machine — a recorded one.
    """

    services: tuple[str, ...] = (*NODE_SERVICES, "gateway")

    def __init__(
        self,
        node: str,
        kubelet: Path,
        kubeconfig: Path,
        *,
        on: Sequence[str] = (),
        address: str = "127.0.0.1",
        nats_url: str = "",
        machine: str = "dgx",
    ) -> None:
        self._node = node
        self._profile = machine
        self._kubelet = kubelet
        self._kubeconfig = kubeconfig
        self._on = tuple(on)
        self._address = address
        self._nats_url = nats_url
        self._folder = Path(setting("STATE_DIR") or tempfile.mkdtemp(prefix="te"))
        self._is_ours = not setting("STATE_DIR")
        self._nats = free_port()
        self._running: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
        self._machine: RecordedMachine | None = None
        self._changed: dict[str, str] = {}
        """Settings that a test has changed."""

    @property
    def folder(self) -> Path:
        """Where state and logs are."""
        return self._folder

    async def install(self) -> None:
        """Bring it up."""
        self._prepare()
        if not self._nats_url:
            self.start("nats")
        for name in self.services:
            self.start(name)
        await self.until_ready()

    def _prepare(self) -> None:
        machine = self._folder / "machine"
        try:
            self._machine = build(self._profile, machine, has_device_nodes=True)
        except ConfigError:
            # Only root makes device nodes; a simulated node needs none.
            self._machine = build(self._profile, machine)

    def kill(self, name: str) -> None:
        """Kill one process (`nats`, `nic`, `cpu`, `gateway`, …), as a crash would."""
        process, _ = self._running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(30)

    @contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """Stop one process for the length of a block: it runs, and does nothing."""
        process, _ = self._running[name]
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def start(self, name: str) -> None:
        """Start what was killed; it becomes ready by itself."""
        if name == "nats":
            words = ["-js", "-sd", str(self._folder / "nats"), "-a", "127.0.0.1", "-p", str(self._nats)]
            self._spawn("nats", [str(find_nats_server()), *words])
        else:
            self._start(name)

    async def until_ready(self) -> None:
        """Wait until every running service reports that it is ready."""
        for name in self.services:
            await self._until_ready(name)

    async def kill_gateway(self) -> None:
        """Kill it, and see it come back."""
        await asyncio.to_thread(self.kill, "gateway")
        self.start("gateway")
        await self._until_ready("gateway")

    async def update(self, *, surge: bool) -> None:
        """Replace it, the new one first or last."""
        self._running["old gateway"] = self._running.pop("gateway")
        if surge:
            self._start("gateway")
            await self._until_ready("gateway")
        await self._stop("old gateway")
        if not surge:
            self._start("gateway")
        await self._until_ready("gateway")

    async def break_device(self, device: str, pci: str) -> None:
        """Take the device off its bus."""
        assert self._machine is not None
        await asyncio.to_thread(self._machine.remove_pci, pci)

    async def set_spares(self, device_class: str, count: int) -> None:
        """Start the service again with the setting."""
        self._changed[f"TOPOBUS_{device_class.upper()}__SPARES__COUNT"] = str(count)
        await self._stop(device_class)
        self._start(device_class)
        await self._until_ready(device_class)

    async def uninstall(self) -> None:
        """Take everything off the node.

        TOPOBUS_CLUSTER_UNINSTALLED, a shell command, can report that to a simulated kubelet.
        """
        for name in reversed(self.services):
            await self._stop(name)
        if setting("UNINSTALLED"):
            await command("UNINSTALLED")

    def close(self) -> None:
        """End what still runs."""
        for process, _ in self._running.values():
            process.terminate()
        for process, _ in self._running.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()
        if self._is_ours:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def nats_url(self) -> str:
        """On loopback, without users."""
        return self._nats_url or f"nats://127.0.0.1:{self._nats}"

    def check(self) -> None:
        """All are still running."""
        for name, (process, _) in self._running.items():
            assert process.poll() is None, (
                f"{name} has ended with {process.returncode}; its log ends with {self.log(name)}"
            )

    def log(self, name: str) -> str:
        """What a service wrote, for whoever reads a failure."""
        path = self._folder / f"{name.removeprefix('old ')}.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    async def _stop(self, name: str) -> None:
        process, _ = self._running[name]
        process.terminate()
        status = await asyncio.to_thread(process.wait, 60)
        del self._running[name]
        assert status == 0, f"{name} did not end in order but with {status}: {self.log(name)}"

    def _service_settings(self) -> dict[str, str]:
        """Give settings on top of those that every installation of this kind has."""
        return {}

    def _start(self, name: str) -> None:
        port = free_port()
        kubelet = self._kubelet
        settings = {
            "TOPOBUS_ALL__NODE": self._node,
            "TOPOBUS_ALL__NATS__URL": self.nats_url,
            "TOPOBUS_ALL__HTTP__HOST": self._address,
            "TOPOBUS_ALL__HTTP__PORT": str(port),
            "TOPOBUS_ALL__HARDWARE__ROOT": str(self._folder / "machine"),
            "TOPOBUS_ALL__HARDWARE__RUNTIME_DEV": str(self._folder / "machine" / "dev"),
            "TOPOBUS_GATEWAY__KUBELET__DEVICE_PLUGIN_DIR": str(kubelet / "device-plugins"),
            "TOPOBUS_GATEWAY__KUBELET__PLUGINS_REGISTRY_DIR": str(kubelet / "plugins_registry"),
            "TOPOBUS_GATEWAY__KUBELET__PLUGINS_DIR": str(kubelet / "plugins"),
            "TOPOBUS_GATEWAY__POD_RESOURCES_SOCKET": str(kubelet / "pod-resources" / "kubelet.sock"),
            # Empty: not opened, and kubelet alone reports that a pod is over.
            "TOPOBUS_GATEWAY__RUNTIME__SOCKET": setting("NRI").format(node=self._node),
            "TOPOBUS_GATEWAY__CDI_DIR": str(cdi_dir()),
            "TOPOBUS_GATEWAY__CHECKPOINT_PATH": str(self._folder / "checkpoint.json"),
            "TOPOBUS_GATEWAY__CLUSTER__MODE": "kubeconfig",
            "TOPOBUS_GATEWAY__CLUSTER__KUBECONFIG": str(self._kubeconfig),
            "TOPOBUS_GATEWAY__CLUSTER__SHAPES": "true",
            "TOPOBUS_GATEWAY__INSTANCE": uuid.uuid4().hex,
            # The recorded machine's device nodes are in its own folder.
            "TOPOBUS_GATEWAY__EDITS": json.dumps(
                {name: {"device_nodes": [f"{self._folder}/machine/dev/"]} for name in ("gpu", "nic")}
            ),
        }
        settings.update(self._service_settings())
        settings.update(json.loads(setting("SETTINGS", "{}")))
        settings.update(self._changed)
        self._spawn(name, [sys.executable, "-m", f"topobus.{name}.main"], settings, port)

    def _spawn(self, name: str, words: list[str], settings: dict[str, str] | None = None, port: int = 0) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TOPOBUS_")}
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*self._on, *words], env={**environment, **(settings or {})}, stdout=log, stderr=log
            )
        self._running[name] = (process, port)

    async def _until_ready(self, name: str) -> None:
        said = ""
        for _ in range(int(_READY_S / 0.1)):
            process, port = self._running[name]
            if process.poll() is not None and "Address already in use" in self.log(name)[-400:]:
                # Somebody else took the port between the choice and the start.
                self._start(name)
                continue
            assert process.poll() is None, f"{name} ended with {process.returncode}: {self.log(name)}"
            is_ready, said = await asyncio.to_thread(_asked, self._address, port)
            if is_ready:
                return
            await next_look()
        raise AssertionError(f"{name} is not ready after {_READY_S:g} s: {said}; its log ends with {self.log(name)}")


def cdi_dir() -> Path:
    """Where claims' CDI files are on this node."""
    return Path(setting("CDI_DIR", "/var/run/cdi"))


def make_installation(node: str) -> Installation:
    """Make what the environment asks for."""
    kind = setting("INSTALLATION", "running")
    if kind not in KINDS:
        pytest.fail(f"TOPOBUS_CLUSTER_INSTALLATION is {kind!r}, wanted one of {', '.join(KINDS)}", pytrace=False)
    if kind in ("hands", "nodes"):
        pytest.skip(f"NOT CHECKED ON A CLUSTER: TOPOBUS_CLUSTER_INSTALLATION={kind} is what test_{kind}.py needs")
    if kind == "manifests":
        return Manifests()
    if kind == "processes":
        return Processes(node, Path(os.environ["TOPOBUS_KUBELET_DIR"]), Path(os.environ["KUBECONFIG"]))
    return Installation()


def _asked(address: str, port: int) -> tuple[bool, str]:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            f"http://{address}:{port}/readyz", timeout=2
        ) as answer:
            return answer.status == 200, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as err:
        return False, err.read().decode(errors="replace")
    except OSError as err:
        return False, str(err)
