"""NVLink between GPUs: direct peers, and all GPUs on the same switches.

Only links between GPUs of this machine are listed.
"""

from __future__ import annotations

from collections.abc import Mapping

from topobus.devicekit.pci import pci_device_name
from topobus.gpu.nvml.nvml import NvmlGpu
from topobus.values.device import Link, LinkClass
from topobus.values.pci import PciAddress

__all__ = ["links_of"]


def links_of(device_class: str, address: PciAddress, nvml_gpus: Mapping[PciAddress, NvmlGpu]) -> tuple[Link, ...]:
    """List the links of one GPU to others that are there, by address."""
    own = nvml_gpus.get(address)
    if own is None:
        return ()
    peers = {peer: (gbps, own.counts.get(peer, 0)) for peer, gbps in own.links.items() if peer in nvml_gpus}
    if own.switch_gbps:
        # Two GPUs on NVSwitches reach each other at the full width of the narrower one.
        reached = {
            peer: (min(own.switch_gbps, gpu.switch_gbps), min(own.switch_count, gpu.switch_count))
            for peer, gpu in nvml_gpus.items()
            if peer != address and gpu.switch_gbps
        }
        peers.update(reached)
    return tuple(
        Link(peer=pci_device_name(device_class, peer), kind=LinkClass.FABRIC, bandwidth_gbps=gbps, count=count)
        for peer, (gbps, count) in sorted(peers.items())
    )
