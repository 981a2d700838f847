"""`topobus inventory` of devices that several have: how many shares are in use, and each with its
owner.
"""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from support.shared_devices import GIB, shared_gpus
from topobus.cli.render.device_listings import device_listing
from topobus.cli.render.output import THEME
from topobus.engine.drawing.letters import holders_of
from topobus.values.device import Inventory
from topobus.values.device_sharing import HeldShare
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.request import Owner, OwnerKind


def allocation(owner: Owner, share: HeldShare, user: Owner | None = None) -> Allocation:
    """A share of the GPU."""
    holding = Holding(devices={"gpu": ("gpu-0",)}, shared={"gpu": ("gpu-0",)}, shares={"gpu": {"gpu-0": share}})
    return Allocation(owner=owner, holdings=(holding,), pods=(user,) if user is not None else ())


def drawn(ledger: Ledger) -> list[list[str]]:
    """The table's lines, by words."""
    inventory = Inventory(node="n1", device_class="gpu", generation=1, devices=shared_gpus("gpu-0", "gpu-1"))
    written = StringIO()
    console = Console(file=written, width=140, theme=THEME)
    console.print(device_listing(inventory, holders_of(ledger)))
    return [line.split() for line in written.getvalue().splitlines()]


def test_inventory_lists_each_share_below_its_device() -> None:
    """A replica by its number with its pod, a claim's share with its amount, and how many shares
    are in use.
    """
    pod = Owner(kind=OwnerKind.POD, name="train", uid="")
    plugin = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu-shared", uid="h")
    claim = Owner(kind=OwnerKind.CLAIM, name="half", uid="c")
    parts = (
        allocation(plugin, HeldShare(amounts={"memory": 20 * GIB, "shares": 1}, replicas=(2,)), pod),
        allocation(claim, HeldShare(amounts={"memory": 40 * GIB, "shares": 1})),
    )

    lines = drawn(Ledger(node="n1", allocations={part.owner.key: part for part in parts}))

    rows = [line for line in lines if line and line[0] in ("gpu-0", "gpu-1", "└")]
    assert rows[0][0] == "gpu-0"
    assert rows[0][-4:] == ["2", "of", "4", "shares"]
    assert rows[1] == ["└", "share", "memory", "40Gi,", "shares", "1", "claim", "default/half"]
    assert rows[2] == ["└", "::2", "memory", "20Gi,", "shares", "1", "pod", "default/train"]
    assert rows[3][-4:] == ["0", "of", "4", "shares"]
