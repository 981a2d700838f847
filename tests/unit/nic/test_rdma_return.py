"""RDMA devices that went into a pod: when their return is waited for, and when nobody has to wait
any more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest

from topobus.devicekit.device_record import DeviceRecord
from topobus.nic.netlink.places import Places
from topobus.nic.rdma.rdma_hand_over import RDMA_STEP, take_back_rdma
from topobus.values.errors import HardwareError


class _NoDevices:
    """A kernel that has no RDMA device in this namespace."""

    def __init__(self, _socket: object) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def links(self) -> tuple[Any, ...]:
        return ()


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """A machine in its boot `now`, whose RDMA device is out of sight."""
    monkeypatch.setattr("topobus.nic.rdma.rdma_hand_over.RdmaNetlink", _NoDevices)
    monkeypatch.setattr("topobus.nic.rdma.rdma_hand_over.open_socket", lambda: None)
    boot = tmp_path / "sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("now\n")
    return Places(proc=str(tmp_path))


def record_of(boot: str) -> DeviceRecord:
    """A record of a device that went into a pod."""
    record = DeviceRecord()
    record.intend(RDMA_STEP, {"devices": ["mlx5_0"], "boot_id": boot})
    return record


def test_return_is_waited_for_while_a_device_is_out_of_sight(places: Places) -> None:
    """The kernel returns it when the pod's processes have closed it."""
    record = record_of("now")

    with pytest.raises(HardwareError, match="mlx5_0 is not back on the host yet"):
        take_back_rdma(places, "", record)

    assert record.step(RDMA_STEP) is not None


@pytest.mark.parametrize(
    ("boot", "is_lost"), [("now", True), ("before", False)], ids=["its card has left", "another boot"]
)
def test_return_is_not_waited_for_when_nothing_can_return(places: Places, boot: str, *, is_lost: bool) -> None:
    """With its card the RDMA device has gone, and after a reboot all of them began on the host."""
    record = record_of(boot)

    take_back_rdma(places, "", record, is_lost=is_lost)

    assert record.steps == ()
