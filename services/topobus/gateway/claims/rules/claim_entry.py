"""One claim's devices of one class, as the node checkpoint has them. Pure."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from topobus.formats.containers.cdi import CdiSpec
from topobus.gateway.claims.claim_key import ClaimKey
from topobus.gateway.claims.rules.claim_allocation import AllocatedDevice
from topobus.gateway.claims.rules.claim_cdi import cdi_device_name
from topobus.values.idset import CpuSet
from topobus.values.names import ClaimUid
from topobus.values.sandbox import AttachedInterface, Sandbox

__all__ = ["ClaimEntry", "SandboxAttachment"]


class SandboxAttachment(Struct, frozen=True, kw_only=True):
    """The sandbox in which a claim's devices are, or may be."""

    sandbox: Sandbox
    is_attached: bool = False
    """False: attaching was begun or half undone. The next step asks the device service, which
    has the state."""
    interfaces: dict[str, AttachedInterface] = {}
    """What the devices became, by device. A device that is no interface is absent."""


class ClaimEntry(Struct, frozen=True, kw_only=True):
    """One claim's devices of one class."""

    namespace: str
    name: str
    uid: ClaimUid
    device_class: str
    attempt: str
    """Part of the operation ids of this preparation: the same for all classes of the claim and on
    every retry, another one after an unprepare."""
    devices: tuple[AllocatedDevice, ...] = ()
    is_prepared: bool = False
    """False: begun. A retry continues the same attempt. An unprepare undoes what may have
    happened."""
    is_undoing: bool = False
    """True: undoing was begun. The claim can be prepared again only after it was undone, and as
    another attempt."""
    is_left: bool = False
    """True: kubelet got the answer that the claim is undone, so that its pod ends, although a
    peer was away or a container still had its devices. The devices stay held until it is undone."""
    left_for: tuple[str, ...] = ()
    """Ids of the containers that had its devices then. It is not undone before the container
    runtime has reported their end."""
    boot_id: str = ""
    """The boot of the machine in which its devices were made ready. After another boot they are
    no longer ready and may have other numbers."""
    cpus: dict[str, CpuSet] = {}
    """The CPUs that the ledger chose for it, by the group of CPUs of which it has a share."""
    to_attach: tuple[str, ...] = ()
    """Devices that must be in the pod's sandbox before a container of it starts."""
    to_adjust: tuple[str, ...] = ()
    """Devices whose service is called for each container that gets them."""
    config: dict[str, tuple[dict[str, Any], ...]] = {}
    """Opaque parameters of `to_attach` and `to_adjust`, by device. They are stored because a
    sandbox may start while the claim cannot be read."""
    pods: tuple[str, ...] = ()
    """Uids of the pods that the claim was reserved for when it was last read. Others may have
    come since."""
    attachment: SandboxAttachment | None = None
    """None: its devices are in no sandbox."""
    left_sandbox: str = ""
    """Id of the last sandbox that they were taken out of: a runtime keeps listing a sandbox that
    it has stopped."""
    generation: int = 0
    """The claim's generation when it was prepared. 0: not known."""
    pod_claim_name: str = ""
    """The name by which its pod knows the claim, if it was made from a template. Empty: the
    claim's own."""
    has_metadata: bool = False
    """Whether its containers get files that describe its devices."""
    cdi: CdiSpec | None = None
    """The CDI file's content, to write it again after a reboot. None: there is nothing to edit."""

    @property
    def is_running(self) -> bool:
        """Return whether its preparation is complete, with nothing half done.

        It may date from the previous boot, see `Checkpoint.is_ready`.
        """
        return self.is_prepared and not self.is_undoing

    @property
    def own_cpus(self) -> CpuSet:
        """Return the CPUs that it has exclusively, given by name or out of groups.

        CPUs of a device with admin access are not included.
        """
        if self.cdi is None:
            return CpuSet()
        own = {cdi_device_name(self.uid, device.device) for device in self.devices if not device.is_shared}
        cpusets = [device.edits.cpuset for device in self.cdi.devices if device.name in own]
        return CpuSet.of(cpu for cpuset in cpusets if cpuset is not None for cpu in cpuset.cpus)

    def is_reserved_for(self, sandbox: Sandbox) -> bool:
        """Return whether the claim is reserved for the sandbox's pod."""
        return sandbox.uid in self.pods and sandbox.namespace == self.namespace

    def is_attached_to(self, sandbox: Sandbox) -> bool:
        """Return whether all devices of the claim are in this sandbox."""
        return self.attachment is not None and self.attachment.is_attached and self.attachment.sandbox.id == sandbox.id

    @property
    def claim(self) -> ClaimKey:
        """Return the claim as kubelet names it."""
        return ClaimKey(namespace=self.namespace, name=self.name, uid=self.uid)

    @property
    def key(self) -> str:
        """Its key in the file."""
        return f"{self.uid}/{self.device_class}"
