"""`topobus holders`, and what other commands say of a pod that holds devices and is not stored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.cli_process import run_cli
from topobus.contracts.catalogue import LEDGER
from topobus.domain.idset import CpuSet
from topobus.domain.ledger import Allocation, Holding, Ledger
from topobus.domain.request import Owner, OwnerKind
from topobus.runtime.bus import Bus
from topobus.simulation.nats_server import NatsServer

pytestmark = pytest.mark.integration

_POD = Owner(kind=OwnerKind.POD, name="trainer", uid="u1")
_USER = Owner(kind=OwnerKind.POD, namespace="prod", name="web", uid="")


async def _publish(bus: Bus) -> None:
    """Two nodes: on one a placed pod and what kubelet gave to another pod, on the other a claim with two pods."""
    by_plugin = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="", name="topobus.dev/nic", uid="x")
    claim = Owner(kind=OwnerKind.CLAIM, name="fast", uid="u2")
    held = {
        "n1": (
            Allocation(owner=_POD, decision_id="d-1", holdings=(Holding(container="a", devices={"gpu": ("gpu-0",)}, cpus=CpuSet(0, 1)),)),
            Allocation(owner=by_plugin, user=_USER, holdings=(Holding(devices={"nic": ("nic-0",)}),)),
        ),
        "n2": (Allocation(owner=claim, pods=(_USER,), holdings=(Holding(devices={"gpu": ("gpu-7", "gpu-3")}),)),),
    }
    for node, allocations in held.items():
        ledger = Ledger(node=node, allocations={allocation.owner.key: allocation for allocation in allocations})
        await bus.put(LEDGER, ledger, node=node)


def _words(line: str) -> str:
    return " ".join(line.split())


async def test_holders_lists_every_way_on_every_node_when_it_is_asked(nats_server: NatsServer, bus: Bus) -> None:
    """One row an owner: the pod where it is known, what it holds, and who uses it."""
    await _publish(bus)

    code, output, _ = await run_cli(nats_server, "holders")

    assert code == 0
    assert [_words(line) for line in output.splitlines()[1:]] == [
        "pod default/trainer n1 1 gpu: gpu-0; 2 cpu: 0-1 -",
        "pod prod/web n1 1 nic: nic-0 -",
        "claim default/fast n2 2 gpu: gpu-3 gpu-7 prod/web",
    ]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--node", "n2"), ["claim/fast"]),
        (("-n", "prod"), ["pod/web"]),
        (("-l", "way=place"), ["pod/trainer"]),
    ],
    ids=["node", "namespace", "selector"],
)
async def test_holders_are_narrowed_when_options_say_so(
    nats_server: NatsServer, bus: Bus, arguments: tuple[str, ...], wanted: list[str]
) -> None:
    """By node, by the holder's namespace, by a selector."""
    await _publish(bus)

    _, output, _ = await run_cli(nats_server, "holders", "-o", "json", *arguments)

    def shown(holder: dict[str, Any]) -> str:
        owner = holder["allocation"].get("user") or holder["allocation"]["owner"]
        return f"{owner['kind']}/{owner['name']}"

    assert [shown(holder) for holder in json.loads(output)["holders"]] == wanted


async def test_pod_that_is_not_stored_is_described_and_counted_when_it_holds_devices(nats_server: NatsServer, bus: Bus) -> None:
    """`place` stores no object: `describe` answers from the ledger, and `get` says where to look."""
    await _publish(bus)

    code, output, noted = await run_cli(nats_server, "describe", "pod", "trainer")
    _, _, listed = await run_cli(nats_server, "get", "pods")
    missing, _, why = await run_cli(nats_server, "describe", "pod", "nobody")

    assert code == 0
    assert "pod default/trainer: placed by `topobus place`, not stored" in output
    assert "`topobus release pod default/trainer` lets go of it" in noted
    assert "1 pod holds devices and is not stored: `topobus holders`" in listed
    assert (missing, "there is no pod default/nobody" in why) == (1, True)
