"""Decides which CPUs each container of the node has: those of its claims exclusively, and for all
others the shared pool.

A claim's CPU is exclusive from the moment in which the claim is being prepared, before any
container of its pod exists, until it is unprepared. Containers that kubelet's own CPU manager
pinned keep what it gave them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from topobus.values.edits import Cpuset
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.outcome import Refusal, refuse
from topobus.values.request import Owner
from topobus.values.sandbox import Sandbox

__all__ = ["ContainerCpuset", "CpuDifference", "CpuOwnership", "cpuset_of", "refuse_demand"]


class CpuOwnership(Struct, frozen=True, kw_only=True):
    """The assignment of the node's CPUs."""

    online: CpuSet
    """All that the node has now."""
    owned: CpuSet | None = None
    """Those that Topobus may give. None: all."""
    claims: Mapping[str, Cpuset] = {}
    """CDI device name to its exclusive CPUs."""
    running: CpuSet = CpuSet()
    """Those of `claims` that containers may run on. Claims that are being undone are not
    included, because their containers have ended."""
    kubelet: CpuSet = CpuSet()
    """What kubelet's CPU manager gave to containers of its choice."""
    kubelet_may_give: CpuSet = CpuSet()
    """What it may give: with the static policy all but its reserved ones, else none."""

    @property
    def exclusive(self) -> CpuSet:
        """All exclusive CPUs of claims."""
        exclusive = CpuSet()
        for cpuset in self.claims.values():
            exclusive |= cpuset.cpus
        return exclusive

    @property
    def shared(self) -> CpuSet:
        """The pool of all containers that have no CPUs of their own."""
        return self.online - self.exclusive - self.kubelet


class ContainerCpuset(Struct, frozen=True, kw_only=True):
    """What one container gets."""

    cpus: CpuSet
    mems: NodeSet = NodeSet()
    """Empty: they stay unchanged."""
    is_exclusive: bool = False


class CpuDifference(Struct, frozen=True, kw_only=True):
    """A container that was found on CPUs other than its own, or on CPUs promised to others."""

    sandbox: Sandbox
    container: str
    has: CpuSet
    """The CPUs in the kernel's cpuset."""
    wanted: CpuSet
    claims: tuple[Owner, ...] = ()
    """Claims that had CPUs of `has` exclusively. Empty: only the container's own promise was
    broken."""
    sandboxes: tuple[Sandbox, ...] = ()
    """The sandboxes of `claims`, as far as they run."""
    shared: CpuSet = CpuSet()
    """CPUs of these claims on which it ran."""
    error: str = ""
    """Why it was not corrected at once. Empty: it was."""

    def __str__(self) -> str:
        text = f"container {self.container} of pod {self.sandbox} was found on CPUs {self.has}, wanted {self.wanted}"
        if self.claims:
            text += (
                f": {self.shared} belong to claim "
                f"{', '.join(f'{claim.namespace}/{claim.name}' for claim in self.claims)} alone"
            )
        return f"{text}; corrected" if not self.error else f"{text}; not corrected yet: {self.error}"


def cpuset_of(names: Iterable[str], given: CpuSet | None, ownership: CpuOwnership) -> ContainerCpuset | None:
    """Return the CPUs of a container. None when they are not decided here: it then keeps what it
    has.

    Shapes: names — its CDI devices; given — what kubelet requested when it created the container,
    None when it requested nothing.

    >>> ownership = CpuOwnership(online=CpuSet(0, 1, 2), claims={"claim-u-cpu-2": Cpuset(cpus=CpuSet(2), mems=NodeSet(0))})
    >>> cpuset_of(["claim-u-cpu-2"], None, ownership).cpus, cpuset_of([], None, ownership).cpus
    (CpuSet(2), CpuSet(0, 1))
    """  # noqa: E501
    brought = [ownership.claims[name] for name in names if name in ownership.claims]
    if brought:
        cpuset = brought[0]
        for other in brought[1:]:
            cpuset |= other
        if cpuset.with_shared:
            return ContainerCpuset(cpus=cpuset.cpus | ownership.shared, is_exclusive=True)
        return ContainerCpuset(cpus=cpuset.cpus, mems=cpuset.mems, is_exclusive=True)
    # kubelet's manager decides for the containers that it pins, as long as their CPUs are not
    # exclusive to a claim.
    shared = ownership.shared if given is None else given - ownership.exclusive
    return ContainerCpuset(cpus=shared) if shared else None


def refuse_demand(brought: Iterable[Cpuset], ownership: CpuOwnership) -> Refusal | None:
    """Refuse CPUs that a claim cannot have exclusively. None: it can have them.

    Shapes: ownership — without the claim. Errors: raises nothing; Refusal codes cpu-offline,
    cpu-not-ours, cpu-of-claim, cpu-of-kubelet, shared-pool-empty.
    """
    wanted = CpuSet()
    for cpuset in brought:
        wanted |= cpuset.cpus
    offline = wanted - ownership.online
    if offline:
        return _refuse(
            "cpu-offline",
            f"CPUs {offline} are not online on this node, which has {ownership.online}",
            cpus=offline,
            online=ownership.online,
        )
    foreign = wanted - ownership.owned if ownership.owned is not None else CpuSet()
    if foreign:
        message = f"CPUs {foreign} are not Topobus' to give: the gateway's setting cpus.owned is {ownership.owned}"
        return _refuse("cpu-not-ours", message, cpus=foreign, owned=ownership.owned)
    anothers = wanted & ownership.running
    if anothers:
        message = (
            f"CPUs {anothers} belong to another prepared claim on this node: the ledger was lost, or is older "
            "than the gateway's checkpoint, or the cpu service chose wrongly."
            " They are written to the ledger again while kubelet lists that claim's pod; end that pod, or create this "
            "claim again"
        )
        return _refuse("cpu-of-claim", message, cpus=anothers)
    taken = wanted & ownership.kubelet
    if taken:
        message = (
            f"CPUs {taken} were given to a container by kubelet's CPU manager: leave them out of the gateway's "
            "setting cpus.owned, or of what kubelet may give"
        )
        return _refuse("cpu-of-kubelet", message, cpus=taken)
    contradicted = wanted & ownership.kubelet_may_give
    if contradicted:
        owned = ownership.owned if ownership.owned is not None else "all"
        message = (
            f"CPUs {contradicted} are both sides' to give: the gateway's setting cpus.owned is {owned}, and "
            "kubelet's CPU manager, with policy static, may give"
            f" {ownership.kubelet_may_give}. Name in cpus.owned only what kubelet reserves (--reserved-cpus), "
            "or set its policy to none"
        )
        return _refuse(
            "cpu-of-kubelet", message, cpus=contradicted, owned=ownership.owned, kubelet=ownership.kubelet_may_give
        )
    if wanted and not ownership.shared - wanted:
        message = (
            f"CPUs {wanted} are the last of the shared pool ({ownership.shared}): all other containers of the "
            "node would have none"
        )
        return _refuse("shared-pool-empty", message, cpus=wanted, shared=ownership.shared)
    return None


def _refuse(code: str, message: str, **facts: CpuSet | None) -> Refusal:
    return refuse(code, message, **{name: str(ids) for name, ids in facts.items()})
