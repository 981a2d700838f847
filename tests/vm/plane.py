"""The control plane of machine `node`, on this host: etcd, API server, scheduler and the
controllers that claims need; and a nats-server, which is slow when emulated.

A test in the guest makes a file `gates` of the feature gates that it wants: all that have gates are
started again with them, and the file is taken away. The guest reads nothing that this host writes
meanwhile: where a file's size differs between a guest's look at it and its read, Linux 6.12 asks
for the missing bytes without end (9p), and the reader hangs.

All listen on free ports of the loopback address, keep what they have in one folder, and end with
the block. The certificate is the API server's own, and clients are configured not to check it,
because all clients are on this machine.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "TOPOBUS_VM_KUBERNETES"
_PROGRAMS = (
    "kubelet", "kube-apiserver", "kube-scheduler", "kube-controller-manager", "containerd", "containerd-shim-runc-v2", "ctr",  # noqa: E501
)  # fmt: skip
# Nothing else is needed: no service account, and no controller that
# takes a slow node for a lost one.
_CONTROLLERS = (
    "resourceclaim-controller,garbage-collector-controller,device-taint-eviction-controller,"
    "resourcepoolstatusrequest-controller"
)
_GATED = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
# What QEMU's network calls the loopback address of this host.
_HOST = "10.0.2.2"
_READY_S = 120


def kubernetes() -> Path:
    """Where the programs of Kubernetes and containerd are."""
    return Path(os.environ[VARIABLE]).resolve()


def missing() -> str:
    """Say why there can be no control plane; empty when there can."""
    named = os.environ.get(VARIABLE, "")
    absent = [name for name in _PROGRAMS if not named or not os.access(kubernetes() / name, os.X_OK)]
    return f"{VARIABLE} names no folder with {', '.join(absent)}" if absent else ""


@contextmanager
def control_plane(checkout: Path, root: Path, job: Path) -> Iterator[Callable[[], None]]:
    """Run one; `root` is the guest's own Debian, `job` gets the kubeconfigs of kubelet and of an
    administrator and the address of NATS.

    The value is to be called now and then: it sets the gates that a test in the guest wants.

    Errors: raises RuntimeError with the output of a program of it that does not come up.
    """
    home = job / "plane"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    (job / "gates").unlink(missing_ok=True)
    api, store, peer, nats = _free_ports(4)
    fetch = [checkout / "tools/fetch-debian-package", "etcd-server", "own", checkout / ".cache/debian"]
    etcd = Path(subprocess.run(fetch, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()) / "usr/bin/etcd"
    key = subprocess.run(
        ["chroot", root, "openssl", "genrsa", "2048"], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ).stdout
    (home / "accounts.key").write_bytes(key)
    tokens = {"admin": secrets.token_hex(16), "kubelet": secrets.token_hex(16)}
    (home / "tokens").write_text(
        f'{tokens["admin"]},admin,1,"system:masters"\n{tokens["kubelet"]},system:node:guest,2,"system:nodes"\n',
        encoding="utf-8",
    )
    for file, host, token in (
        (home / "admin.conf", "127.0.0.1", tokens["admin"]),
        (job / "admin.conf", _HOST, tokens["admin"]),
        (job / "kubelet.conf", _HOST, tokens["kubelet"]),
    ):
        file.write_text(json.dumps(_kubeconfig(f"https://{host}:{api}", token)), encoding="utf-8")
    (job / "nats-url").write_text(f"nats://{_HOST}:{nats}", encoding="utf-8")
    commands: dict[str, Sequence[str | Path]] = {
        "nats-server": (root / "opt/topobus/bin/nats-server", "-js", "-sd", home / "nats", "-a", "127.0.0.1", "-p", str(nats)),  # noqa: E501
        "etcd": (
            etcd, "--data-dir", home / "etcd", "--unsafe-no-fsync", f"--listen-client-urls=http://127.0.0.1:{store}",
            f"--advertise-client-urls=http://127.0.0.1:{store}", f"--listen-peer-urls=http://127.0.0.1:{peer}",
            # Without progress notices, watches of objects that do not change are taken for lost.
            "--experimental-watch-progress-notify-interval=5s",
        ),
        "kube-apiserver": (
            kubernetes() / "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{store}", f"--secure-port={api}", "--bind-address=127.0.0.1",  # noqa: E501
            "--advertise-address=127.0.0.1", f"--cert-dir={home}", f"--token-auth-file={home}/tokens", "--authorization-mode=Node,RBAC",  # noqa: E501
            "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={home}/accounts.key",  # noqa: E501
            f"--service-account-signing-key-file={home}/accounts.key", "--service-cluster-ip-range=10.96.0.0/16",
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
            # Kinds of gates that are off.
            "--runtime-config=resource.k8s.io/v1beta2=true,resource.k8s.io/v1alpha3=true",
        ),
        "kube-controller-manager": (
            kubernetes() / "kube-controller-manager", f"--kubeconfig={home}/admin.conf", "--leader-elect=false", "--secure-port=0",  # noqa: E501
            f"--controllers={_CONTROLLERS}",
        ),
        "kube-scheduler": (kubernetes() / "kube-scheduler", f"--kubeconfig={home}/admin.conf", "--leader-elect=false", "--secure-port=0"),  # noqa: E501
    }  # fmt: skip
    running: dict[str, subprocess.Popen[bytes]] = {}
    gates = ""

    def start(name: str) -> None:
        more = [f"--feature-gates={gates}"] if gates and name in _GATED else []
        with (home / f"{name}.log").open("ab") as out:
            words = [*commands[name], *more]
            running[name] = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=home)
        atexit.register(running[name].kill)
        if name == "kube-apiserver":
            _wait(running[name], f"https://127.0.0.1:{api}/readyz", home / f"{name}.log")

    def end(*names: str) -> None:
        for name in names:
            running[name].kill()
            running[name].wait()

    def set_gates() -> None:
        nonlocal gates
        if not (job / "gates").exists():
            return
        wanted = (job / "gates").read_text()
        if wanted != gates:
            gates = wanted
            end(*_GATED)
            for name in _GATED:
                start(name)
        (job / "gates").unlink()

    try:
        for name in commands:
            start(name)
        yield set_gates
    finally:
        end(*reversed(running))


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def _kubeconfig(server: str, token: str) -> dict[str, object]:
    return {
        "apiVersion": "v1", "kind": "Config", "current-context": "vm",
        "clusters": [{"name": "vm", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "vm", "user": {"token": token}}],
        "contexts": [{"name": "vm", "context": {"cluster": "vm", "user": "vm"}}],
    }  # fmt: skip


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusting))
    end = time.monotonic() + _READY_S
    while process.poll() is None and time.monotonic() < end:
        try:
            direct.open(url, timeout=5).close()
        except OSError:
            time.sleep(0.3)
        else:
            return
    raise RuntimeError(f"the control plane is not there after {_READY_S} s:\n{log.read_text(errors='replace')[-2000:]}")
