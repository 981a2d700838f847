"""A containerd 2 of one's own, with CDI and NRI switched on, driven through the Container Runtime
Interface as kubelet drives it.

Nothing can be pulled: its one image is made here of a static busybox. containerd comes unpacked
aside from another Debian release when the installed one is older; runc is the machine's own.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import grpc_tools.protoc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from engine.engine import ROOT, EngineUnavailable, apt_install, must, say
from topobus.values.edits import ContainerEdits

__all__ = ["Containerd", "Ended", "Sandbox", "Started", "provide_containerd"]

_IMAGE = "localhost/topobus-busybox:1"
_APPLETS = ("sh", "sleep", "ls", "env", "cat", "test")
_HOST_NETWORK = 2
_EXITED = 2
_START_S = 30.0
_RUN_S = 60.0
_POD_NETWORK = 0
# A network of pods that gives them an address of which nobody knows, and `lo`; what a
# pod has besides is the test's.
_CNI_PLUGIN = """\
#!/bin/sh
case $CNI_COMMAND in
ADD) echo '{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"x"}],"ips":[{"address":"10.99.0.2/24","interface":0}]}';;
VERSION) echo '{"cniVersion":"1.0.0","supportedVersions":["0.3.1","0.4.0","1.0.0"]}';;
esac
"""  # noqa: E501
_CNI_NETWORK = '{"cniVersion": "1.0.0", "name": "nothing", "plugins": [{"type": "nothing"}]}'
_CONFIG = """\
version = 3
root = "{root}/root"
state = "{root}/state"
[grpc]
  address = "{root}/c.sock"
[plugins.'io.containerd.cri.v1.runtime']
  enable_cdi = true
  cdi_spec_dirs = ["{cdi}"]
  # A sandbox may forbid to lower it, and it has nothing to do with devices.
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = "{runc}"
      SystemdCgroup = false
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dir = "{root}/cni/bin"
  conf_dir = "{root}/cni/net.d"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "native"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{image}"
[plugins.'io.containerd.nri.v1.nri']
  disable = false
  socket_path = "{root}/nri.sock"
"""


class Ended:
    """A container that ran to its end."""

    def __init__(self, code: int, output: str) -> None:
        self.code = code
        self.lines = [line.split(" ", 3)[3] for line in output.splitlines() if line.count(" ") >= 3]


class Started:
    """A container that runs."""

    def __init__(self, container_id: str) -> None:
        self.id = container_id

    def cpus(self) -> str:
        """Read the CPUs that the kernel lets it run on."""
        return self.cpuset_file().read_text(encoding="ascii").strip()

    def cpuset_file(self) -> Path:
        """Find the file that says so, in its cgroup of either version."""
        groups = [
            *Path("/sys/fs/cgroup").glob(f"cpuset/**/{self.id}/cpuset.cpus"),
            *Path("/sys/fs/cgroup").glob(f"**/{self.id}/cpuset.cpus.effective"),
        ]
        if not groups:
            raise FileNotFoundError(f"container {self.id[:12]} has no cgroup with a cpuset")
        return groups[0]


class Sandbox:
    """A pod's sandbox; `run` runs a script in a container of it, with CDI devices by name, to its
    end.
    """

    def __init__(self, sandbox_id: str, run: Callable[[str, Sequence[str]], Ended]) -> None:
        self.id = sandbox_id
        self.run = run


class Containerd:
    """A running containerd; `run` is what kubelet does for a pod of one container."""

    def __init__(self, folder: Path, stub: ModuleType | Any, channel: grpc.Channel) -> None:
        self._folder = folder
        self._types = stub
        self._channel = channel
        self._count = 0

    def run(self, script: str, *, cdi_devices: Sequence[str] = (), edits: ContainerEdits | None = None) -> Ended:
        """Run a shell script in a container of its own pod, with CDI devices by name or a device
        plugin's answer.

        Errors: raises grpc.RpcError when the runtime refuses (an unknown CDI device, a
        device node that is not there).
        """
        with self._pod(script, cdi_devices, edits) as (name, made):
            return self._ended(name, made)

    def _ended(self, name: str, made: Any) -> Ended:
        """Wait for a container's end."""
        give_up = time.monotonic() + _RUN_S
        while (status := self._call("ContainerStatus", made).status).state != _EXITED:
            if time.monotonic() > give_up:
                raise TimeoutError(f"{name} still runs after {_RUN_S:g} s")
            time.sleep(0.05)
        log = self._folder / "logs" / f"{name}.log"
        return Ended(status.exit_code, log.read_text(encoding="utf-8") if log.exists() else status.message)

    @contextmanager
    def started(self, *, cdi_devices: Sequence[str] = ()) -> Iterator[Started]:
        """Have a container run for the length of a block; it sleeps.

        Errors: as `run`.
        """
        with self._pod("sleep 1000", cdi_devices, None) as (_, made):
            yield Started(made.container_id)

    @contextmanager
    def sandbox(self, name: str, *, uid: str) -> Iterator[Sandbox]:
        """Have the sandbox of a pod with a network namespace of its own for the length of a block.

        Containers are made by the test.

        Errors: as `run`.
        """
        options = self._new("NamespaceOption", network=_POD_NETWORK)
        config = self._new(
            "PodSandboxConfig",
            # Another attempt at the same pod is another sandbox.
            metadata=self._new("Metadata", name=name, uid=uid, namespace="default", attempt=self._count),
            log_directory=str(self._folder / "logs"),
            linux=self._new("Linux", security_context=self._new("SecurityContext", namespace_options=options)),
        )
        self._count += 1
        pod = self._call("RunPodSandbox", self._new("RunPodSandboxRequest", config=config))
        try:
            yield Sandbox(pod.pod_sandbox_id, lambda script, names: self._run_in(pod, config, options, script, names))
        finally:
            self._call("StopPodSandbox", pod)
            self._call("RemovePodSandbox", pod)

    def remove_all(self) -> None:
        """Remove what is left of sandboxes, as kubelet does: containerd keeps one that a plugin
        refused, and its process goes on.
        """
        for sandbox in self._call("ListPodSandbox", self._new("Nothing")).items:
            pod = self._new("SandboxId", pod_sandbox_id=sandbox.id)
            self._call("StopPodSandbox", pod)
            self._call("RemovePodSandbox", pod)

    def _run_in(self, pod: Any, sandbox: Any, options: Any, script: str, names: Sequence[str]) -> Ended:
        self._count += 1
        name = f"container-{self._count}"
        container = self._container(name, script, names, None, options)
        container.metadata.name = name
        request = self._new(
            "CreateContainerRequest", pod_sandbox_id=pod.pod_sandbox_id, config=container, sandbox_config=sandbox
        )
        made = self._call("CreateContainer", request)
        self._call("StartContainer", made)
        return self._ended(name, made)

    @contextmanager
    def _pod(self, script: str, cdi_devices: Sequence[str], edits: ContainerEdits | None) -> Iterator[tuple[str, Any]]:
        """Have a pod of one container for the length of a block.

        Gives its name and the container.
        """
        self._count += 1
        name = f"pod-{self._count}"
        options = self._new("NamespaceOption", network=_HOST_NETWORK)
        sandbox = self._new(
            "PodSandboxConfig",
            metadata=self._new("Metadata", name=name, uid=name, namespace="default"),
            log_directory=str(self._folder / "logs"),
            linux=self._new("Linux", security_context=self._new("SecurityContext", namespace_options=options)),
        )
        pod = self._call("RunPodSandbox", self._new("RunPodSandboxRequest", config=sandbox))
        try:
            container = self._container(name, script, cdi_devices, edits, options)
            request = self._new(
                "CreateContainerRequest", pod_sandbox_id=pod.pod_sandbox_id, config=container, sandbox_config=sandbox
            )
            made = self._call("CreateContainer", request)
            self._call("StartContainer", made)
            yield name, made
        finally:
            self._call("StopPodSandbox", pod)
            self._call("RemovePodSandbox", pod)

    def _container(
        self, name: str, script: str, cdi_devices: Sequence[str], edits: ContainerEdits | None, options: Any
    ) -> Any:
        given = edits or ContainerEdits()
        return self._new(
            "ContainerConfig",
            metadata=self._new("ContainerMetadata", name="main"),
            image=self._new("ImageSpec", image=_IMAGE, user_specified_image=_IMAGE),
            command=["/bin/sh", "-c", script],
            envs=[self._new("KeyValue", key=key, value=value.encode()) for key, value in sorted(given.env.items())],
            mounts=[
                self._new(
                    "Mount",
                    container_path=mount.container_path,
                    host_path=mount.host_path,
                    readonly="ro" in mount.options,
                )
                for mount in given.mounts
            ],
            devices=[
                self._new(
                    "Device",
                    container_path=device_node.path,
                    host_path=device_node.host_path or device_node.path,
                    permissions=device_node.permissions,
                )
                for device_node in given.device_nodes
            ],
            log_path=f"{name}.log",
            linux=self._new(
                "ContainerLinux", security_context=self._new("ContainerSecurityContext", namespace_options=options)
            ),
            CDI_devices=[self._new("CdiDevice", name=cdi_device) for cdi_device in cdi_devices],
        )

    def _new(self, kind: str, **fields: Any) -> Any:
        return self._types[kind](**fields)

    def _call(self, method: str, request: Any) -> Any:
        answers = {
            "RunPodSandbox": "SandboxId",
            "ListPodSandbox": "SandboxList",
            "CreateContainer": "ContainerId",
            "ContainerStatus": "ContainerStatusResponse",
        }
        call = self._channel.unary_unary(
            f"/runtime.v1.RuntimeService/{method}",
            request_serializer=lambda value: value.SerializeToString(),
            response_deserializer=self._types[answers.get(method, "Nothing")].FromString,
        )
        return call(request, timeout=_RUN_S)


@contextmanager
def provide_containerd(folder: Path, cdi: Path) -> Iterator[Containerd]:
    """Start a containerd below `folder` that reads CDI files of `cdi`.

    It and all that it started are gone afterwards.

    Errors: raises EngineUnavailable with what to do.
    """
    programs = _programs()
    if shutil.which("runc") is None:
        apt_install("runc")
    runc = shutil.which("runc")
    (folder / "logs").mkdir(parents=True)
    _network(folder / "cni")
    config = folder / "config.toml"
    config.write_text(_CONFIG.format(root=folder, cdi=cdi, runc=runc, image=_IMAGE), encoding="utf-8")
    with ExitStack() as undo:
        log = undo.enter_context((folder / "containerd.log").open("wb"))
        # The shim is looked up on PATH.
        path = f"{programs}:/usr/sbin:/usr/bin:/sbin:/bin"
        daemon = subprocess.Popen([programs / "containerd", "-c", config], stdout=log, stderr=log, env={"PATH": path})
        undo.callback(daemon.wait, 30)
        undo.callback(daemon.terminate)
        channel = undo.enter_context(grpc.insecure_channel(f"unix://{folder}/c.sock"))
        try:
            grpc.channel_ready_future(channel).result(timeout=_START_S)
        except grpc.FutureTimeoutError as err:
            tail = (folder / "containerd.log").read_text(encoding="utf-8", errors="replace")[-2000:]
            raise EngineUnavailable(
                f"containerd does not answer after {_START_S:g} s; its log ends with:\n{tail}"
            ) from err
        _image(folder / "image.tar")
        ctr = [str(programs / "ctr"), "--address", str(folder / "c.sock"), "--namespace", "k8s.io"]
        must(
            [*ctr, "images", "import", "--local", "--snapshotter", "native", str(folder / "image.tar")],
            timeout_s=60,
            what="image import",
        )
        made = Containerd(folder, _types(folder), channel)
        undo.callback(made.remove_all)
        yield made


def _network(folder: Path) -> None:
    """Write the network of pods; containerd asks `loopback` for `lo`."""
    (folder / "bin").mkdir(parents=True)
    (folder / "net.d").mkdir()
    for name in ("nothing", "loopback"):
        plugin = folder / "bin" / name
        plugin.write_text(_CNI_PLUGIN, encoding="utf-8")
        plugin.chmod(0o755)
    (folder / "net.d" / "10-nothing.conflist").write_text(_CNI_NETWORK, encoding="utf-8")


def _programs() -> Path:
    """Find the folder with a containerd of version 2 and its shim:
    installed, else unpacked aside.
    """
    installed = shutil.which("containerd")
    if installed is not None and _major(Path(installed)) >= 2:
        return Path(installed).parent
    say("fetching containerd 2 of another Debian release")
    fetch = [str(ROOT / "tools" / "fetch-debian-package"), "containerd", "2", str(ROOT / ".cache" / "debian")]
    folder = Path(must(fetch, timeout_s=300, what="fetching containerd").strip()) / "usr" / "bin"
    if _major(folder / "containerd") < 2:
        raise EngineUnavailable(f"{folder}/containerd does not run here; install containerd 2 or later")
    return folder


def _major(program: Path) -> int:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"\bv?(\d+)\.\d+\.\d+", done.stdout)
    return int(match[1]) if match else 0


def _types(folder: Path) -> dict[str, Any]:
    """Compile the messages of cri.proto."""
    compiled = folder / "cri.binpb"
    here = Path(__file__).parent
    status = grpc_tools.protoc.main(
        ["protoc", f"-I{here}", f"--descriptor_set_out={compiled}", str(here / "cri.proto")]
    )
    if status != 0:
        raise EngineUnavailable("cri.proto does not compile")
    files = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return {
        descriptor_proto.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"runtime.v1.{descriptor_proto.name}")
        )
        for file in files.file
        for descriptor_proto in file.message_type
    }


def _image(into: Path) -> None:
    """Write an OCI archive with busybox in it; as a pod's sandbox it sleeps."""
    if shutil.which("busybox") is None:
        apt_install("busybox-static")
    busybox = Path(shutil.which("busybox") or sys.exit("no busybox"))
    with tarfile.open(into, "w") as archive:
        layer = _layer(busybox.read_bytes())
        settings = {"Entrypoint": ["/bin/sleep", "1000000"], "Env": ["PATH=/bin"]}
        platform = {"architecture": "amd64", "os": "linux"}
        config = _json({**platform, "config": settings, "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]}})
        manifest = _json(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": _entry("application/vnd.oci.image.config.v1+json", config),
                "layers": [_entry("application/vnd.oci.image.layer.v1.tar", layer)],
            }
        )
        named = {
            **_entry("application/vnd.oci.image.manifest.v1+json", manifest),
            "annotations": {"io.containerd.image.name": _IMAGE},
        }
        _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(archive, "index.json", _json({"schemaVersion": 2, "manifests": [{**named, "platform": platform}]}))
        for blob in (layer, config, manifest):
            _add(archive, f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}", blob)


def _layer(busybox: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("bin", "proc", "sys", "dev", "etc", "tmp"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(folder)
        _add(archive, "bin/busybox", busybox, mode=0o755)
        for name in _APPLETS:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes, *, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    archive.addfile(entry, io.BytesIO(data))


def _entry(kind: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
