"""Containers as the runtime tells of them, and what is seen of them from the outside."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import pytest

from topobus.gateway.claims.rules.claim_allocation import AllocatedDevice
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.containers.live_containers import LiveContainer, LiveContainers, with_processes
from topobus.gateway.device_plugins.rules.holdings import allocations_of
from topobus.gateway.device_plugins.rules.replicas import Chosen
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device_sharing import HeldShare
from topobus.values.ledger import Allocation, Holders, Holding
from topobus.values.request import Owner, OwnerKind

ID = "3f" * 32


def container(name: str = "main", *, pod: str = "a", cdi: tuple[str, ...] = ()) -> LiveContainer:
    """A container of a pod."""
    return LiveContainer(
        id=f"id-{name}-{pod}", name=name, namespace="default", pod=pod, pod_uid=f"uid-{pod}", cdi_devices=cdi
    )


def entry(uid: str = "u-1") -> ClaimEntry:
    """A claim with one GPU that was reserved for pod a."""
    devices = (AllocatedDevice(request="r", pool="n1", device="gpu-0"),)
    return ClaimEntry(
        namespace="default", name="c", uid=uid, device_class="gpu", attempt="a-1", devices=devices, pods=("uid-a",)
    )


def machine(root: Path) -> Tree:
    """A machine with one process in a container's control group that has a GPU open, and one that
    has nothing.
    """
    for pid, group in ((4711, f"0::/kubepods/burstable/podx/cri-containerd-{ID}.scope"), (4712, "0::/init.scope")):
        folder = root / "proc" / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "cgroup").write_text(f"{group}\n")
        (folder / "comm").write_text("python3\n")
    (root / "proc/4711/fd/3").symlink_to("/dev/nvidia0")
    return Tree(HardwareSettings(root=str(root)))


def test_claims_containers_are_those_that_name_it_when_the_runtime_tells_names() -> None:
    """A container beside them that has none of the claim's devices holds nothing.

    A pod of another claim neither.
    """
    containers = LiveContainers()
    for made in (
        container(cdi=("claim-u-1-gpu-0",)),
        container("beside", cdi=("claim-u-2-gpu-0",)),
        container(pod="b"),
    ):
        containers.made(made)

    assert [str(made_container) for made_container in containers.of_claim(entry())] == [
        "container main of pod default/a"
    ]
    assert containers.of_unknown_claim("u-2") == (container("beside", cdi=("claim-u-2-gpu-0",)),)


def test_nothing_is_unknown_when_no_runtime_is_expected() -> None:
    """A node without NRI is as it was.

    One that expects a runtime waits for it at the start, and for ever where it is needed.
    """
    nobody, expecting = LiveContainers(), LiveContainers()
    expecting.expect(lambda is_needed: "away" if is_needed else "")

    assert nobody.why_untold(is_needed=True) == ""
    assert (expecting.why_untold(), expecting.why_untold(is_needed=True)) == ("", "away")

    expecting.synchronize([])

    assert expecting.why_untold(is_needed=True) == ""


def test_container_is_seen_from_the_outside_when_a_process_is_in_its_control_group(tmp_path: Path) -> None:
    """Whatever a runtime that was started again says of it."""
    assert with_processes([ID, "77" * 32], machine(tmp_path)) == {ID}


async def test_process_is_named_when_it_has_a_node_open(tmp_path: Path) -> None:
    """Evidence for the operator, where the processes of the machine can be seen.

    Nothing is said where there is none.
    """
    containers = LiveContainers()
    containers.tree = machine(tmp_path)

    assert await containers.openers_of(["/dev/nvidia0"]) == " (process 4711 (python3) has /dev/nvidia0 open)"
    assert await containers.openers_of(["/dev/nvidia1"]) == ""


@pytest.mark.parametrize(
    ("resource", "devices", "replicas", "names", "chosen", "is_in_the_way"),
    [
        ("gpu", ("gpu-0",), {}, {"gpu-0"}, Chosen(devices=("gpu-0",)), True),
        ("gpu-pool", ("gpu-0",), {}, {"gpu-0"}, Chosen(devices=("gpu-0",)), True),
        ("gpu", ("gpu-1",), {}, {"gpu-0"}, Chosen(devices=("gpu-0",)), False),
        (
            "gpu-shared",
            ("gpu-0",),
            {"gpu-0": (0,)},
            {"gpu-0::0"},
            Chosen(devices=("gpu-0",), shares={"gpu-0": HeldShare(replicas=(0,))}),
            True,
        ),
        (
            "gpu-shared",
            ("gpu-0",),
            {"gpu-0": (0,)},
            {"gpu-0::1"},
            Chosen(devices=("gpu-0",), shares={"gpu-0": HeldShare(replicas=(1,))}),
            False,
        ),
        ("gpu-shared", ("gpu-0",), {"gpu-0": (0,)}, {"gpu-0"}, Chosen(devices=("gpu-0",)), True),
        (
            "gpu",
            ("gpu-0",),
            {},
            {"gpu-0::1"},
            Chosen(devices=("gpu-0",), shares={"gpu-0": HeldShare(replicas=(1,))}),
            True,
        ),
    ],
    ids=[
        "same",
        "by-another-resource",
        "another-device",
        "same-replica",
        "another-replica",
        "whole-over-replica",
        "replica-over-whole",
    ],
)
def test_allocation_is_in_the_way_when_it_has_what_kubelet_gives_on(
    resource: str,
    devices: tuple[str, ...],
    replicas: dict[str, tuple[int, ...]],
    names: set[str],
    chosen: Chosen,
    is_in_the_way: bool,
) -> None:
    """By whichever resource; two replicas of one device live beside each other."""
    owner = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name=f"topobus.dev/{resource}", uid="hash")
    shares = {"gpu": {name: HeldShare(replicas=numbers) for name, numbers in replicas.items()}} if replicas else {}
    claim = Owner(kind=OwnerKind.CLAIM, namespace="default", name="c", uid="u")
    held = Allocation(owner=owner, holdings=(Holding(devices={"gpu": devices}, shares=shares),))
    ledger = Holders(
        node="n", allocations={owner.key: held, claim.key: Allocation(owner=claim, holdings=held.holdings)}
    )

    assert allocations_of(ledger, "gpu", frozenset(names), chosen) == ((held,) if is_in_the_way else ())


async def test_container_is_not_ended_when_the_runtime_leaves_it_out_during_a_look_at_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was not looked at yet, so its device is held until the next look, which finds its
    processes.
    """
    first, second = container("first"), container("second")
    looks: list[frozenset[str]] = []
    containers, looked = LiveContainers(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def leave_out_second() -> None:
        containers.synchronize([])

    def look(container_ids: Collection[str], _: Tree) -> frozenset[str]:
        looks.append(frozenset(container_ids))
        if len(looks) == 1:
            # Done before the thread's answer is heard: the loop takes calls in their order.
            loop.call_soon_threadsafe(leave_out_second)
        else:
            loop.call_soon_threadsafe(looked.set)
        return frozenset(container_ids)

    monkeypatch.setattr("topobus.gateway.containers.live_containers.with_processes", look)
    monkeypatch.setattr("topobus.gateway.containers.live_containers._LOOK_S", 0.0)
    containers.synchronize([first, second])
    containers.synchronize([second])
    looking = asyncio.create_task(containers.run())
    async with asyncio.timeout(60):
        await looked.wait()
    looking.cancel()

    assert looks[:2] == [{first.id}, {first.id, second.id}]
