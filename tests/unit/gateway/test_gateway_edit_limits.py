"""Promises of the last door: what devices of a class may bring into a container, and what never
gets in.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.formats.messages.messages import Prepared
from topobus.gateway.config import GatewaySettings, check
from topobus.gateway.containers.rules.edit_limits import EditRights, host_paths, node_paths, refuse_forbidden, rights_of
from topobus.gateway.links import groups_of_nodes, real_paths, with_real_folders
from topobus.values.edits import ContainerEdits, Cpuset, DeviceNode, Hook, IntelRdt, Mount, NetDevice
from topobus.values.errors import ConfigError
from topobus.values.idset import CpuSet

OPERATORS = EditRights(
    device_nodes=("/dev/acme", "/dev/sdb"),
    mounts=("/opt/acme",),
    writable_mounts=("/run/acme",),
    variables=("LD_LIBRARY_PATH",),
    hooks=("/opt/acme/hook",),
    majors=(195,),
)


def node(path: str, host_path: str = "", permissions: str = "rw") -> ContainerEdits:
    """One device node."""
    return ContainerEdits(device_nodes=(DeviceNode(path=path, host_path=host_path, permissions=permissions),))


def mount(host: str, inside: str = "/opt/inside", *options: str) -> ContainerEdits:
    """One mount, read-only unless options say otherwise."""
    return ContainerEdits(mounts=(Mount(host_path=host, container_path=inside, options=options or ("ro", "rbind")),))


def env(name: str, value: str = "1") -> ContainerEdits:
    """One variable."""
    return ContainerEdits(env={name: value})


def hook(path: str, *variables: str) -> ContainerEdits:
    """One hook."""
    return ContainerEdits(hooks=(Hook(name="createRuntime", path=path, env=variables),))


FORBIDDEN = {
    "disk": (node("/dev/sda"), "device node '/dev/sda'"),
    "disk-under-another-name": (node("/dev/acme0", "/dev/sda"), "device node '/dev/sda'"),
    "memory": (node("/dev/mem"), "'/dev/mem'"),
    "kernel-memory": (node("/dev/kmem"), "'/dev/kmem'"),
    "ports": (node("/dev/port"), "'/dev/port'"),
    "other-prefix": (node("/dev/acm"), "begins with '/dev/acme' or '/dev/sdb'"),
    "outside-dev": (node("/dev/acme0", "/srv/acme0"), "begins with"),
    "outside-dev-in-the-container": (node("/srv/acme0", "/dev/acme0"), "below /dev in the container"),
    "dots": (node("/dev/acme/../sda"), "without '..'"),
    "relative": (node("dev/acme0"), "absolute path"),
    "double-slash": (node("/dev//acme0"), "without '..', '//'"),
    "newline-in-a-path": (node("/dev/acme\n0"), "control characters"),
    "name-of-the-runtime": (node("/dev/null", "/dev/acme0"), "the runtime does not use itself"),
    "mknod": (node("/dev/acme0", permissions="rwm"), "letters rw"),
    "no-permissions": (node("/dev/acme0", permissions=""), "letters rw"),
    "strange-permission": (node("/dev/acme0", permissions="rwx"), "letters rw"),
    "root": (mount("/"), "a mount of '/'"),
    "kubelet": (mount("/var/lib/kubelet"), "a mount of '/opt/acme' or '/run/acme'"),
    "beside-a-folder": (mount("/opt/acme-other"), "a mount of '/opt/acme'"),
    "out-of-a-folder": (mount("/opt/acme/../etc"), "without '..'"),
    "relative-mount": (mount("opt/acme"), "absolute path"),
    "for-writing": (mount("/opt/acme", "/opt/inside", "rw", "rbind"), "option ro"),
    "without-a-word-on-writing": (mount("/opt/acme", "/opt/inside", "rbind"), "option ro"),
    "both-words-on-writing": (mount("/opt/acme", "/opt/inside", "ro", "rw"), "option ro"),
    "shared-with-the-host": (mount("/opt/acme", "/opt/inside", "ro", "rshared"), "options 'rshared'"),
    "over-the-root": (mount("/opt/acme", "/"), "a folder of its own"),
    "over-proc": (mount("/opt/acme", "/proc/self/attr"), "a folder of its own"),
    "over-the-preload-file": (mount("/opt/acme/x", "/etc/ld.so.preload"), "a folder of its own"),
    "over-all-programs": (mount("/opt/acme", "/usr/bin"), "a folder of its own"),
    "relative-in-the-container": (mount("/opt/acme", "inside"), "absolute path"),
    "preload": (env("LD_PRELOAD", "/x.so"), "variable 'LD_PRELOAD'"),
    "path": (env("PATH"), "variable 'PATH'"),
    "python": (env("PYTHONPATH"), "variable 'PYTHONPATH'"),
    "bash": (env("BASH_ENV"), "variable 'BASH_ENV'"),
    "shell": (env("ENV"), "variable 'ENV'"),
    "separators": (env("IFS"), "variable 'IFS'"),
    "converters": (env("GCONV_PATH"), "variable 'GCONV_PATH'"),
    "node": (env("NODE_OPTIONS"), "variable 'NODE_OPTIONS'"),
    "proxy": (env("https_proxy"), "variable 'https_proxy'"),
    "no-name": (env(""), "variable ''"),
    "name-with-equals": (env("A=B"), "variable 'A=B'"),
    "name-with-a-digit-first": (env("1A"), "variable '1A'"),
    "name-with-newline": (env("A\nB"), "variable 'A\\nB'"),
    "newline": (env("A", "1\nLD_PRELOAD=/x.so"), "without control characters"),
    "zero": (env("A", "\0"), "without control characters"),
    "line-separator": (env("A", "\u2028"), "without control characters"),
    "too-long": (env("A", "x" * 131_072), "131072 bytes"),
    "too-many": (ContainerEdits(env={f"A_{number}": "" for number in range(513)}), "513 variables"),
    "annotation": (ContainerEdits(annotations={"acme.example/a": "1"}), "annotation 'acme.example/a'"),
    "hook": (hook("/usr/bin/nsenter"), "hook '/usr/bin/nsenter'"),
    "hook-below-a-program": (hook("/opt/acme/hook/../../../usr/bin/nsenter"), "hook '/opt/acme/hook/../"),
    "hook-with-preload": (
        hook("/opt/acme/hook", "LD_PRELOAD=/x.so"),
        "hook '/opt/acme/hook' with variable 'LD_PRELOAD'",
    ),
    "disk-by-its-numbers": (
        ContainerEdits(device_nodes=(DeviceNode(path="/dev/acme0", kind="b", major=8),)),
        "numbers 8:0 of its own",
    ),
    "file-system": (
        ContainerEdits(mounts=(Mount(host_path="/opt/acme", container_path="/a", options=("ro",), kind="ext4"),)),
        "of type 'ext4'",
    ),
    "groups": (ContainerEdits(additional_gids=(6,)), "groups (6,)"),
    "network-device": (
        ContainerEdits(net_devices=(NetDevice(host_name="eth0", name="eth0"),)),
        "network interface 'eth0'",
    ),
    "cache": (ContainerEdits(intel_rdt=IntelRdt(clos_id="a")), "cache or memory bandwidth"),
    "cpus": (ContainerEdits(cpuset=Cpuset(cpus=CpuSet(1))), "CPUs 1 for the container alone"),
}


@pytest.mark.parametrize(("edits", "words"), FORBIDDEN.values(), ids=FORBIDDEN.keys())
@pytest.mark.parametrize("is_common", [False, True], ids=["device", "common"])
def test_answer_is_refused_when_an_edit_is_outside_the_rights(
    edits: ContainerEdits, words: str, is_common: bool
) -> None:
    """Each is refused by name, with class, device, edit and what would be allowed, wherever in the
    answer it stands.
    """
    prepared = Prepared(common=edits, edits={"acme-0": env("OK")}) if is_common else Prepared(edits={"acme-0": edits})
    refusal = refuse_forbidden("acme", prepared, OPERATORS)

    assert refusal is not None
    assert all(reason.code == "edits-forbidden" for reason in refusal.reasons)
    assert words in refusal.reasons[0].message
    assert refusal.reasons[0].facts["class"] == "acme"
    assert refusal.reasons[0].facts["device"] == ("" if is_common else "acme-0")
    assert refusal.reasons[0].message.isprintable()


def test_reasons_are_as_many_as_the_rules_that_are_broken() -> None:
    """Eight cards whose nodes nobody allowed are one sentence, with the first of them and how many
    more there are.

    Another rule is another sentence.
    """
    cards = {f"acme-{number}": node(f"/dev/other{number}") for number in range(8)}
    refusal = refuse_forbidden("acme", Prepared(common=env("LD_AUDIT"), edits=cards), OPERATORS)

    assert refusal is not None
    variable, nodes = refusal.reasons
    assert variable.facts["count"] == 1
    assert nodes.facts == {**nodes.facts, "device": "acme-0", "edit": "device node '/dev/other0'", "count": 8}
    assert "device 'acme-0' device node '/dev/other0' and 7 more, which the gateway forbids: wanted" in nodes.message


@pytest.mark.parametrize(
    "edits",
    [
        pytest.param(node("/dev/acme0"), id="node"),
        pytest.param(node("/dev/other", "/dev/acme/0", "r"), id="node-under-another-name"),
        pytest.param(node("/dev/sdb1"), id="disk-that-the-operator-named"),
        pytest.param(mount("/opt/acme"), id="mount"),
        pytest.param(mount("/opt/acme/lib", "/usr/local/acme", "ro", "nosuid", "nodev", "bind"), id="mount-below"),
        pytest.param(mount("/run/acme", "/run/acme", "rw", "bind"), id="mount-for-writing"),
        pytest.param(env("LD_LIBRARY_PATH", "/opt/acme/lib"), id="variable-that-the-operator-named"),
        pytest.param(env("TOPOBUS_ACME_DEVICES", "a,b"), id="variable"),
        pytest.param(env("A", "Grüße = 1"), id="value-of-letters"),
        pytest.param(hook("/opt/acme/hook", "DEBUG=1"), id="hook"),
        pytest.param(
            ContainerEdits(device_nodes=(DeviceNode(path="/dev/acme0", kind="c", major=195, minor=3),)),
            id="node-that-is-not-there",
        ),
        pytest.param(node("/dev/acme0", permissions="none"), id="node-that-nobody-opens"),
    ],
)
def test_answer_is_taken_when_every_edit_is_within_the_rights(edits: ContainerEdits) -> None:
    """What the operator allows goes through as it is."""
    assert refuse_forbidden("acme", Prepared(common=edits, edits={"acme-0": edits}), OPERATORS) is None


def test_disk_needs_its_own_name_when_a_prefix_covers_all_of_dev() -> None:
    """A plugin that may give any node below /dev may give no disk, no memory and no console by
    that.
    """
    foreign = rights_of("widget-acme", EditRights(), is_foreign=True)
    refused = [
        path
        for path in (
            "/dev/sda",
            "/dev/nvme0n1",
            "/dev/mem",
            "/dev/dm-0",
            "/dev/tty0",
            "/dev/kvm",
            "/dev/net/tun",
            "/dev/sgx_enclave",
        )
        if refuse_forbidden("widget-acme", Prepared(edits={"w": node(path, permissions="rwm")}), foreign) is not None
    ]

    assert refused == ["/dev/sda", "/dev/nvme0n1", "/dev/mem", "/dev/dm-0", "/dev/tty0"]


def test_plugin_of_others_may_bring_nvidias_hooks_and_groups_and_no_other_program() -> None:
    """NVIDIA's CDI files name two programs of its toolkit.

    Root's group, a shell and a network interface stay out.
    """
    foreign = rights_of("gpu-nvidia", EditRights(), is_foreign=True)
    edits = {
        "toolkit": ContainerEdits(hooks=hook("/usr/bin/nvidia-cdi-hook").hooks, additional_gids=(44,)),
        "shell": hook("/usr/bin/bash"),
        "root": ContainerEdits(additional_gids=(0,)),
        "network": ContainerEdits(net_devices=(NetDevice(host_name="eth0", name="eth0"),)),
    }

    refused = [
        name
        for name, edit in edits.items()
        if refuse_forbidden("gpu-nvidia", Prepared(edits={"g": edit}), foreign) is not None
    ]

    assert refused == ["shell", "root", "network"]


def test_plugin_of_others_is_trusted_as_by_kubelet_only_when_it_is_one() -> None:
    """The word means something for a foreign plugin alone: our own
    services never pass unchecked.
    """
    prepared = Prepared(edits={"w": mount("relative")})
    trusted = EditRights(as_kubelet=True)

    assert refuse_forbidden("w", prepared, rights_of("w", trusted, is_foreign=True)) is None
    assert refuse_forbidden("w", prepared, rights_of("w", trusted, is_foreign=False)) is not None


def test_runtime_obeys_no_annotation_when_a_plugin_of_others_may_set_any() -> None:
    """An annotation by which a runtime injects devices needs a right of its own."""
    prepared = Prepared(
        edits={"w": ContainerEdits(annotations={"acme.example/a": "1", "cdi.k8s.io/acme": "acme.example/w=0"})}
    )
    refusal = refuse_forbidden("w", prepared, rights_of("w", EditRights(), is_foreign=True))
    named = rights_of("w", EditRights(annotations=("cdi.k8s.io/",)), is_foreign=True)

    assert refusal is not None
    assert [reason.facts["edit"] for reason in refusal.reasons] == ["annotation 'cdi.k8s.io/acme'"]
    assert refuse_forbidden("w", prepared, named) is None


def test_refusal_stays_short_when_everything_is_wrong() -> None:
    """An answer with thousands of faults against all rules gives an
    error that fits into a status.
    """
    edits = {f"acme-{number}": mount("/" + "x" * 1000) for number in range(1000)}
    edits |= {f"other-{number}": forbidden for number, (forbidden, _) in enumerate(FORBIDDEN.values())}
    refusal = refuse_forbidden("acme", Prepared(edits=edits), OPERATORS)

    assert refusal is not None
    assert len(refusal.reasons) == 8
    assert max(len(reason.message) for reason in refusal.reasons) < 500


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        pytest.param(
            mount("/dev/shm", "/dev/shm", "rw", "rbind"), "a mount of '/dev/shm'", id="shared-memory-without-a-daemon"
        ),
        pytest.param(
            ContainerEdits(mounts=(*mount("/run/topobus/mps/g/pipe").mounts, *mount("/dev/shm", "/srv", "rw").mounts)),
            "a mount of '/dev/shm' on '/srv'",
            id="shared-memory-elsewhere",
        ),
        pytest.param(mount("/usr/lib/libcuda.so.1", "/lib64/ld-linux-x86-64.so.2"), "loader", id="over-the-loader"),
        pytest.param(mount("/usr/lib/libcuda.so.1", "/lib/ld-musl-x86_64.so.1"), "loader", id="over-musls-loader"),
        pytest.param(
            mount("/usr/lib/libc.so.6", "/lib/x86_64-linux-gnu/libc.so.6"),
            "every program loads",
            id="over-the-c-library",
        ),
        pytest.param(
            mount("/usr/lib/libcuda.so.1", "/usr/lib/libnss_files.so.2"),
            "every program loads",
            id="over-a-name-service",
        ),
        pytest.param(
            mount("/usr/lib/libcuda.so.1", "/usr/lib/libother.so.1"), "under its own name", id="over-another-library"
        ),
        pytest.param(mount("/usr/lib/libcuda.so.1", "/bin/sh"), "a program at its own path", id="over-the-shell"),
        pytest.param(
            mount("/usr/bin/nvidia-smi", "/usr/bin/env"), "a program at its own path", id="over-another-program"
        ),
        pytest.param(
            mount("/usr/lib/nvidia/current/sh", "/bin/sh"), "a program at its own path", id="over-the-shell-by-its-name"
        ),
        pytest.param(
            mount("/usr/lib/nvidia/current/smi", "/usr/bin/nvidia-smi"),
            "a program at its own path",
            id="over-a-drivers-program",
        ),
    ],
)
def test_gpu_is_refused_what_takes_the_place_of_what_runs_in_a_container(edits: ContainerEdits, words: str) -> None:
    """The host's shared memory belongs to a client of an MPS daemon alone, and files of a driver
    stand where the driver has them.
    """
    refusal = refuse_forbidden("gpu", Prepared(edits={"g": edits}), rights_of("gpu", EditRights(), is_foreign=False))

    assert refusal is not None
    assert any(words in reason.message for reason in refusal.reasons)


@pytest.mark.parametrize(
    "edits",
    [
        pytest.param(
            ContainerEdits(
                mounts=(
                    *mount("/run/topobus/mps/g/pipe", "/run/topobus/mps/g/pipe", "rw").mounts,
                    *mount("/dev/shm", "/dev/shm", "rw").mounts,
                )
            ),
            id="shared-memory-of-a-daemon",
        ),
        pytest.param(
            mount("/usr/lib/x86_64-linux-gnu/libcuda.so.580.95", "/usr/lib/libcuda.so.1"),
            id="library-by-its-other-name",
        ),
        pytest.param(
            mount("/run/nvidia/driver/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi"), id="program-of-a-drivers-root"
        ),
        pytest.param(
            mount("/usr/local/nvidia/bin/nvidia-smi", "/usr/bin/nvidia-smi"), id="program-of-a-drivers-own-folder"
        ),
        pytest.param(
            mount("/usr/lib/nvidia/current/nvidia-smi", "/usr/bin/nvidia-smi"), id="program-of-debians-alternatives"
        ),
    ],
)
def test_gpu_gets_what_its_driver_needs(edits: ContainerEdits) -> None:
    """A client of an MPS daemon, a library and a program of a driver's root go in."""
    assert (
        refuse_forbidden("gpu", Prepared(edits={"g": edits}), rights_of("gpu", EditRights(), is_foreign=False)) is None
    )


def test_groups_are_those_of_the_nodes_that_come_with_them() -> None:
    """Disk and shadow open no GPU.

    Where no node of the answer is on this host, there is nothing to compare with.
    """
    rights = rights_of("gpu", EditRights(), is_foreign=False)
    video = Prepared(edits={"g": ContainerEdits(device_nodes=node("/dev/nvidia0").device_nodes, additional_gids=(44,))})
    disk = Prepared(
        edits={"g": ContainerEdits(device_nodes=node("/dev/nvidia0").device_nodes, additional_gids=(44, 6))}
    )

    refusal = refuse_forbidden("gpu", disk, rights, {}, frozenset({44, 109}))

    assert refusal is not None
    assert "groups (6,)" in refusal.reasons[0].message
    assert "44, 109" in refusal.reasons[0].message
    assert refuse_forbidden("gpu", video, rights, {}, frozenset({44, 109})) is None
    assert refuse_forbidden("gpu", disk, rights, {}, None) is None
    assert node_paths(disk) == ("/dev/nvidia0",)
    assert node_paths(Prepared(edits={"g": node("/dev/nvidia0")})) == ()


def test_groups_of_nodes_are_read_from_this_host(tmp_path: Path) -> None:
    """A file that is no device has no say, and what is not here is unknown."""
    file = tmp_path / "nvidia0"
    file.touch()

    assert groups_of_nodes(["/dev/null", str(tmp_path / "absent")]) == {Path("/dev/null").stat().st_gid}
    assert groups_of_nodes([str(file)]) == frozenset()
    assert groups_of_nodes([str(tmp_path / "absent"), "\0"]) is None


def test_answer_is_refused_when_it_is_larger_than_kubelet_takes() -> None:
    """Many values of legal length do not add up to a message that ends kubelet's stream."""
    edits = {
        f"acme-{number}": ContainerEdits(env={f"A_{entry}": "x" * 100_000 for entry in range(10)})
        for number in range(5)
    }
    refusal = refuse_forbidden("acme", Prepared(edits=edits), OPERATORS)

    assert refusal is not None
    assert "5000" in refusal.reasons[0].message


def test_link_is_refused_when_it_leads_out_of_the_allowed_folder(tmp_path: Path) -> None:
    """A folder that somebody replaced by a link to another one is no longer the one that the
    operator allowed.

    A link within stays one.
    """
    allowed = tmp_path / "real" / "acme"
    (allowed / "inside").mkdir(parents=True)
    (allowed / "out").symlink_to("/etc")
    (allowed / "in").symlink_to(allowed / "inside")
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    rights = EditRights(mounts=(f"{tmp_path}/linked/acme",))

    def refusal_of(path: str) -> object:
        prepared = Prepared(edits={"a": mount(path)})
        return refuse_forbidden("acme", prepared, with_real_folders(rights), real_paths(host_paths(prepared)))

    assert refusal_of(f"{tmp_path}/linked/acme/in") is None
    assert refusal_of(f"{tmp_path}/real/acme/inside") is None
    assert "which leads to '/etc'" in str(refusal_of(f"{tmp_path}/linked/acme/out"))


@pytest.mark.parametrize(
    ("device_class", "rights"),
    [
        pytest.param("Not A Class", EditRights(), id="class"),
        pytest.param("gpu", EditRights(mounts=("/",)), id="root"),
        pytest.param("gpu", EditRights(mounts=("opt/acme",)), id="relative"),
        pytest.param("gpu", EditRights(writable_mounts=("/opt/../etc",)), id="dots"),
        pytest.param("gpu", EditRights(device_nodes=("",)), id="everything"),
        pytest.param("gpu", EditRights(device_nodes=("/",)), id="every-path"),
    ],
)
def test_settings_are_refused_when_rights_name_no_place(device_class: str, rights: EditRights) -> None:
    """A slip of the operator's that would allow everything, or nothing, is found at the start."""
    with pytest.raises(ConfigError, match="edits"):
        check(GatewaySettings(node="n", edits={device_class: rights}))
