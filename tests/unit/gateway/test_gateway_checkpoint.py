"""Promises of the checkpoint: on disk when said so, never taken for empty, of its own version
alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import pytest

from topobus.devicekit.containers.cdi_files import write
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.rules.claim_allocation import AllocatedDevice
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.config import ClusterSettings, ForeignSettings, GatewaySettings, KubeletSettings, check
from topobus.values.errors import ConfigError


def entry(uid: str = "u-1", device_class: str = "gpu", *, is_prepared: bool = False) -> ClaimEntry:
    """An entry."""
    devices = (AllocatedDevice(request="r", pool="n1", device=f"{device_class}-0"),)
    return ClaimEntry(
        namespace="default",
        name="c",
        uid=uid,
        device_class=device_class,
        attempt="a-1",
        devices=devices,
        is_prepared=is_prepared,
    )


async def test_checkpoint_gives_back_what_was_stored_when_loaded_again(tmp_path: Path) -> None:
    """A restarted gateway knows each claim and class as it left them; the folder is made."""
    path = tmp_path / "new" / "checkpoint.json"
    before = Checkpoint.load(path)
    await before.put(entry(), entry(device_class="nic"))
    await before.put(entry(uid="u-2"), entry(uid="u-2", device_class="nic"))
    await before.put(entry(is_prepared=True))
    await before.remove("u-2")
    await before.remove("u-never-there")

    after = Checkpoint.load(path)

    assert after.entries() == (entry(is_prepared=True), entry(device_class="nic"))
    assert after.of_claim("u-1") == after.entries()
    assert (after.of_claim("u-2"), after.get("u-2", "nic")) == ((), None)


async def test_claims_entries_are_on_disk_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One write has the entries of all classes: no crash can fall between them.

    A change of the claim is one write as well, and reaches no other claim.
    """
    written: list[tuple[tuple[str, bool], ...]] = []

    def noted(folder: Path, name: str, data: bytes) -> None:
        write(folder, name, data)
        written.append(tuple((each.key, each.is_undoing) for each in Checkpoint.load(folder / name).entries()))

    monkeypatch.setattr("topobus.gateway.claims.checkpoint.write", noted)
    checkpoint = Checkpoint.load(tmp_path / "checkpoint.json")
    await checkpoint.put(entry(), entry(device_class="nic"))
    await checkpoint.put(entry("u-2"))

    changed = await checkpoint.change_claim("u-1", lambda each: msgspec.structs.replace(each, is_undoing=True))

    assert changed == checkpoint.of_claim("u-1")
    assert written == [
        (("u-1/gpu", False), ("u-1/nic", False)),
        (("u-1/gpu", False), ("u-1/nic", False), ("u-2/gpu", False)),
        (("u-1/gpu", True), ("u-1/nic", True), ("u-2/gpu", False)),
    ]


async def test_claim_is_not_ready_when_it_was_prepared_in_the_boot_before(tmp_path: Path) -> None:
    """It is known, and its devices stay its own.

    Containers may have them when they were made ready in this boot.
    """
    path = tmp_path / "checkpoint.json"
    before = Checkpoint.load(path, boot_id="one")
    await before.put(msgspec.structs.replace(entry(is_prepared=True), boot_id="one"))

    after = Checkpoint.load(path, boot_id="two")

    assert before.ready("u-1", "gpu") == after.get("u-1", "gpu")
    assert after.ready("u-1", "gpu") is None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        pytest.param('{"version": 1, "entr', "checkpoint.json", id="cut-off"),
        pytest.param("", "checkpoint.json", id="empty"),
        pytest.param('{"version": 1, "entries": [{"uid": 7}]}', "entries[0]", id="wrong-type"),
        pytest.param(
            '{"version": 2, "entries": []}', "version 2, which a newer gateway wrote; wanted 1", id="newer-version"
        ),
        pytest.param(
            '{"version": 2, "claims": {"a": 1}}',
            "version 2, which a newer gateway wrote",
            id="newer-version-of-another-shape",
        ),
        pytest.param('{"version": 0, "entries": []}', "version 0, wanted 1", id="no-version-of-ours"),
        pytest.param('{"entries": []}', "version", id="no-version"),
        pytest.param('{"version": 1}', "entries", id="no-entries"),
        pytest.param("[]", "checkpoint.json", id="no-object"),
        pytest.param("null", "checkpoint.json", id="null"),
        pytest.param("\x00" * 64, "checkpoint.json", id="zeros-after-a-power-cut"),
    ],
)
def test_checkpoint_stops_the_gateway_when_it_cannot_be_read(tmp_path: Path, text: str, part: str) -> None:
    """A corrupt file is never an empty one: the operator is told which file, what is wrong and what
    to do, and the file stays.
    """
    path = tmp_path / "checkpoint.json"
    path.write_text(text)

    with pytest.raises(ConfigError) as refused:
        Checkpoint.load(path)

    assert part in refused.value.message
    assert "move it away" in refused.value.next_step
    assert path.read_text() == text


def test_checkpoint_stops_the_gateway_when_a_link_leads_nowhere(tmp_path: Path) -> None:
    """Whoever linked the file wanted it on another disk: that this is not mounted does not make the
    node a new one.
    """
    path = tmp_path / "checkpoint.json"
    path.symlink_to(tmp_path / "elsewhere" / "checkpoint.json")

    with pytest.raises(ConfigError, match="No such file"):
        Checkpoint.load(path)


async def test_checkpoint_keeps_its_memory_when_the_disk_refuses(tmp_path: Path) -> None:
    """What is not on disk is not remembered either, so nobody is told of it."""
    path = tmp_path / "folder" / "checkpoint.json"
    checkpoint = Checkpoint.load(path)
    path.parent.rmdir()
    path.parent.write_text("a file where the folder was")

    with pytest.raises(OSError, match="folder"):
        await checkpoint.put(entry())

    assert checkpoint.entries() == ()


def _with_foreign(folder: str) -> GatewaySettings:
    return GatewaySettings(
        kubelet=KubeletSettings(device_plugin_dir="/k/device-plugins"),
        pod_resources_socket="/k/pod-resources/kubelet.sock",
        foreign=ForeignSettings(dir=folder),
    )


def _with_taint(taint: str, *expected: str, mode: Literal["off", "in-cluster"] = "in-cluster") -> GatewaySettings:
    devices = dict.fromkeys(expected, 8)
    return GatewaySettings(cluster=ClusterSettings(mode=mode, startup_taint=taint, expected_devices=devices))


def _with_verdicts(condition: str, target: str) -> GatewaySettings:
    return GatewaySettings(cluster=ClusterSettings(mode="in-cluster", condition_verdicts={condition: (target,)}))


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        pytest.param(GatewaySettings(resource_prefix="kubernetes.io"), "resource_prefix", id="kubernetes-own-prefix"),
        pytest.param(GatewaySettings(resource_prefix="Not A Domain"), "resource_prefix", id="no-domain"),
        pytest.param(GatewaySettings(exposure={"GPU 1": "dra"}), "GPU 1", id="class-that-is-no-label"),
        pytest.param(
            GatewaySettings(kubelet=KubeletSettings(device_plugin_dir="/" + "x" * 80)),
            "kubelet.device_plugin_dir",
            id="socket-path-too-long",
        ),
        pytest.param(_with_foreign("/k/device-plugins"), "foreign.dir", id="kubelets-own-folder"),
        pytest.param(
            _with_foreign("/k/x/../device-plugins/"), "foreign.dir", id="kubelets-own-folder-written-otherwise"
        ),
        pytest.param(_with_foreign("/k/pod-resources"), "foreign.dir", id="kubelets-folder-of-pod-resources"),
        pytest.param(
            _with_taint("starting:Never", "gpu"), "cluster.startup_taint: got 'starting:Never'", id="no-taint"
        ),
        pytest.param(_with_taint("starting:NoSchedule"), "expected_devices is empty", id="taint-for-ever"),
        pytest.param(
            _with_taint("starting:NoSchedule", "gpu", mode="off"), "cluster.mode is off", id="taint-without-cluster"
        ),
        pytest.param(
            _with_verdicts("topobus.dev/gpu-ready", "gpu"),
            "cluster.condition_verdicts: got 'topobus.dev/gpu-ready'",
            id="own-condition-as-verdict",
        ),
        pytest.param(
            _with_verdicts("KernelDeadlock", "all GPUs"),
            "cluster.condition_verdicts: got 'all GPUs'",
            id="verdict-on-no-label",
        ),
        pytest.param(_with_taint("", "GPU 1"), "cluster.expected_devices: got 'GPU 1'", id="expected-no-label"),
    ],
)
def test_settings_are_refused_early_when_they_would_fail_at_kubelet(settings: GatewaySettings, part: str) -> None:
    """What kubelet or bind would refuse later is refused at the start, with the key."""
    with pytest.raises(ConfigError) as refused:
        check(settings)

    assert part in refused.value.message


def test_settings_are_good_when_nothing_is_set() -> None:
    """The defaults are kubelet's own folders and offer each class both ways."""
    settings = GatewaySettings()

    check(settings)

    assert settings.offers_plugin("gpu")
    assert settings.offers_dra("gpu")


@pytest.mark.parametrize(
    ("exposure", "doors"),
    [("both", (True, True)), ("dra", (False, True)), ("device-plugin", (True, False)), ("none", (False, False))],
)
def test_class_is_offered_as_told_when_exposure_is_set(exposure: str, doors: tuple[bool, bool]) -> None:
    """One word a class decides its doors."""
    settings = GatewaySettings(exposure={"cpu": exposure})  # type: ignore[dict-item]  # the table holds plain words

    assert (settings.offers_plugin("cpu"), settings.offers_dra("cpu")) == doors


@pytest.mark.parametrize(
    ("default", "doors"),
    [("both", (False, True)), ("dra", (False, True)), ("device-plugin", (False, False)), ("none", (False, False))],
)
def test_cpus_have_no_device_plugin_when_nothing_is_said_of_them(default: str, doors: tuple[bool, bool]) -> None:
    """A device plugin pins nothing: whoever asks for such CPUs shares them with everybody.

    Other classes go by the default.
    """
    settings = GatewaySettings(default_exposure=default)  # type: ignore[arg-type]  # the table holds plain words

    assert (settings.offers_plugin("cpu"), settings.offers_dra("cpu")) == doors
    assert settings.offers_plugin("gpu") is (default in ("both", "device-plugin"))
