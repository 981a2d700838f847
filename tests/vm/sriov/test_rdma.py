"""RDMA by netlink, beside the kernel's own tool.

The device is software (rdma_rxe): its folder lies below no PCI function, so the
nic class has no device of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from topobus.nic.rdma.rdma_hand_over import check_rdma
from topobus.nic.rdma.rdma_netlink import RdmaNetlink, open_socket
from topobus.values.errors import HardwareError
from vm.kernel import sh


@pytest.fixture(autouse=True)
def rxe() -> Iterator[None]:
    """Make one on the card that stays."""
    sh("modprobe rdma_rxe; rdma link add rxe0 type rxe netdev ens33")
    yield
    # The mode changes only while there is no other namespace, and one goes a moment after its name.
    sh("rdma link del rxe0; ip -all netns del; until rdma system set netns shared; do sleep 0.2; done")


def test_devices_and_mode_are_those_that_the_tool_shows() -> None:
    """Shared and exclusive: the one is refused for a pod's own device, the other is not."""
    for mode in ("shared", "exclusive"):
        sh(f"rdma system set netns {mode}")
        with RdmaNetlink(open_socket()) as rdma:
            assert rdma.mode() == mode
            assert [(link.index, link.name) for link in rdma.links()] == [
                (row["ifindex"], row["ifname"]) for row in json.loads(sh("rdma -j dev"))
            ]
        assert (check_rdma(["rxe0"]) is None) is (mode == "exclusive")


def test_device_that_the_kernel_does_not_move_is_an_error_with_its_reason() -> None:
    """This driver cannot: neither can the tool, and the device stays on the host."""
    sh("rdma system set netns exclusive; ip netns add pod")
    assert "cannot" in sh("rdma dev set rxe0 netns pod || echo cannot")
    namespace = os.open("/run/netns/pod", os.O_RDONLY)
    with RdmaNetlink(open_socket()) as rdma:
        with pytest.raises(HardwareError, match=r"rxe0 is not moved: .*not supported"):
            rdma.move("rxe0", namespace)
        assert [link.name for link in rdma.links()] == ["rxe0"]
    os.close(namespace)
