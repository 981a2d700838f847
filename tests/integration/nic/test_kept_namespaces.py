"""A pod that ends while nobody takes its interface out: the namespace is kept, and the interface
comes back.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from support.hand_over_rig import Rig, configured, dies_at, read_record, rig
from support.real_interfaces import ip, network_namespace, why_not_here
from topobus.devicekit.device_record import DeviceRecord
from topobus.nic.interfaces.rules.interface_state import InterfaceState
from topobus.nic.netlink.hand_over import hand_over
from topobus.nic.netlink.kept_namespaces import KeptNamespaces, unmount_namespace
from topobus.nic.netlink.places import Places
from topobus.nic.netlink.take_back import take_back
from topobus.values.outcome import Refusal

pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(why_not_here()), reason=why_not_here())]

_KEY = "nic-eth1@uid"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A folder of the test's own for what is kept."""
    return Places(kept=str(tmp_path / "kept"))


def _places(host: Rig, places: Places) -> Places:
    return msgspec.structs.replace(host.places, kept=places.kept)


def _end_pod(host: Rig) -> None:
    """Take the namespace away, as a runtime does with a pod that has ended."""
    ip("netns", "del", host.pod)


def test_virtual_interface_comes_back_when_its_pod_ended_unseen(places: Places) -> None:
    """The runtime removes the namespace while no service runs.

    A service that starts later finds the interface in it and restores it; nothing stays mounted.
    """
    with rig() as host:
        before = host.state()
        record = DeviceRecord()
        ours = _places(host, places)
        assert KeptNamespaces(ours).keep(host.namespace, record, _KEY) is None
        handed_over = hand_over(
            ours, "eth1", host.namespace, configured(interface={"name": "net1"}), record, tag="topobus eth1"
        )
        assert not isinstance(handed_over, Refusal), handed_over
        _end_pod(host)

        # As after a kill: nothing is known but the record.
        kept = KeptNamespaces(ours)
        taken = take_back(ours, kept.open(host.namespace, record), record)
        kept.let_go(record)

        assert (taken.outcome, taken.name) == ("restored", "eth1")
        assert isinstance(before, InterfaceState)
        assert host.state() == before
        assert record.steps == ()
        assert list(Path(places.kept).iterdir()) == []
        assert places.kept not in Path("/proc/self/mounts").read_text()


@pytest.mark.parametrize("changed", ["another pod's namespace", "another boot"])
def test_path_of_the_runtime_leads_nowhere_when_it_may_be_another_pods(places: Places, changed: str) -> None:
    """A path such as /proc/<pid>/ns/net is another pod's after this one has ended, and an inode
    after a reboot: no stranger's namespace is entered.
    """
    record = DeviceRecord()
    with network_namespace() as pod, network_namespace() as other:
        assert KeptNamespaces(places).keep(f"/run/netns/{pod}", record, _KEY) is None
        unmount_namespace(Path(places.kept, _KEY))
        if changed == "another boot":
            record.steps[0].before["boot_id"] = "of another boot"
        name = pod if changed == "another boot" else other

        path = KeptNamespaces(places).open(f"/run/netns/{name}", record)

        assert path == ""


def test_path_of_the_runtime_is_taken_when_it_leads_to_the_same_namespace(places: Places) -> None:
    """Where mounting is not permitted, and this service began anew, the runtime's path is all there
    is.
    """
    record = DeviceRecord()
    with network_namespace() as pod:
        assert KeptNamespaces(places).keep(f"/run/netns/{pod}", record, _KEY) is None
        unmount_namespace(Path(places.kept, _KEY))

        path = KeptNamespaces(places).open(f"/run/netns/{pod}", record)

        assert path == f"/run/netns/{pod}"


def test_virtual_interface_is_lost_when_nobody_kept_the_namespace(places: Places) -> None:
    """What the kernel does without us: this is what keeping is for."""
    with rig() as host:
        record = DeviceRecord()
        handed_over = hand_over(
            host.places, "eth1", host.namespace, configured(interface={"name": "net1"}), record, tag="topobus eth1"
        )
        assert not isinstance(handed_over, Refusal), handed_over
        _end_pod(host)

        assert (
            take_back(host.places, KeptNamespaces(_places(host, places)).open(host.namespace, record), record).outcome
            == "lost"
        )


def test_namespace_is_let_go_when_the_service_is_killed_at_any_moment(places: Places, tmp_path: Path) -> None:
    """Killed before or after each write of the record: the next one lets go of what is there, and
    nothing stays mounted.
    """
    with rig() as host:
        ours = _places(host, places)
        deaths = 0
        for moment in range(1, 100):
            record_file = tmp_path / f"record-{moment}"
            is_dead = dies_at(
                moment, record_file, lambda record: KeptNamespaces(ours).keep(host.namespace, record, _KEY)
            )
            deaths += is_dead
            record = DeviceRecord(read_record(record_file)) if record_file.exists() else DeviceRecord()
            KeptNamespaces(ours).let_go(record)

            assert record.steps == ()
            assert not os.path.ismount(Path(places.kept, _KEY))
            assert places.kept not in Path("/proc/self/mounts").read_text()
            if not is_dead:
                # It came to its end, and its namespace was let go of, too.
                break

        assert deaths >= 4


@pytest.mark.parametrize(
    "path",
    [
        "/proc/self/ns/net",
        "/proc/self/fd/3",
        "/proc/thread-self/fd/3",
        "PID/fd/3",
        "KEPT/nic-eth2@other",
        "/KEPT/nic-eth2@other",
        "LINK/nic-eth2@other",
    ],
)
def test_namespace_is_refused_when_it_is_one_of_our_own(path: str, places: Places, tmp_path: Path) -> None:
    """Nobody reaches into another pod, or this process, by a path that no runtime gave, however it
    is written.
    """
    (tmp_path / "link").symlink_to(places.kept)
    path = (
        path.replace("KEPT", places.kept).replace("PID", f"/proc/{os.getpid()}").replace("LINK", str(tmp_path / "link"))
    )
    with network_namespace() as other:
        keeper, others = KeptNamespaces(places), DeviceRecord()
        assert keeper.keep(f"/run/netns/{other}", others, "nic-eth2@other") is None
        record = DeviceRecord()

        refusal = keeper.keep(path, record, _KEY)
        keeper.let_go(others)

    assert refusal is not None
    assert [reason.code for reason in refusal.reasons] == ["namespace-gone"]
    assert record.steps == ()


def test_namespace_is_let_go_when_an_earlier_one_was_left_mounted(places: Places) -> None:
    """The journal was lost and its mount stayed: the next tenant gets its own namespace there, and
    nothing stays when it leaves.
    """
    with network_namespace() as before, network_namespace() as after:
        lost, record = DeviceRecord(), DeviceRecord()
        assert KeptNamespaces(places).keep(f"/run/netns/{before}", lost, _KEY) is None
        keeper = KeptNamespaces(places)

        assert keeper.keep(f"/run/netns/{after}", record, _KEY) is None
        kept = Path(keeper.open("/run/netns/gone", record)).stat().st_ino
        wanted = Path(f"/run/netns/{after}").stat().st_ino
        keeper.let_go(record)

        assert kept == wanted
        assert list(Path(places.kept).iterdir()) == []
        assert places.kept not in Path("/proc/self/mounts").read_text()


def test_namespace_is_kept_inside_the_folder_whatever_the_owner_is_called(places: Places, tmp_path: Path) -> None:
    """A uid is text of others: with slashes in it, it is still one file of ours."""
    with network_namespace() as pod:
        keeper, record = KeptNamespaces(places), DeviceRecord()
        assert keeper.keep(f"/run/netns/{pod}", record, "nic-eth1@/../../escaped") is None
        files = sorted(path.name for path in Path(places.kept).iterdir())
        keeper.let_go(record)

    assert files == ["nic-eth1@%2F..%2F..%2Fescaped"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]
    assert list(Path(places.kept).iterdir()) == []


def test_namespace_is_refused_at_once_when_its_path_is_a_pipe(places: Places, tmp_path: Path) -> None:
    """Opening a pipe waits for its other end; a driver's thread would wait for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    refusal = KeptNamespaces(places).keep(str(pipe), DeviceRecord(), _KEY)

    assert refusal is not None
    assert [reason.code for reason in refusal.reasons] == ["namespace-gone"]
