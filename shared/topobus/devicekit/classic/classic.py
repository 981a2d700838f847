"""What a classic DRA driver is: five calls that the controller makes when it allocates and
deallocates claims of the driver's classes.

A third party implements `ClassicDriver` and names a factory in the entry point group
`topobus.classic_drivers` (see `classic_registry`). The controller does all that is the same for
every driver: it watches classes, claims and PodSchedulingContexts, keeps the finalizer, writes
results and repeats what failed. The interface is that of Kubernetes 1.26 to 1.31
(k8s.io/dynamic-resource-allocation/controller, Driver) with awaitables and values.

All calls may be repeated, by this replica or by another one after a crash, also at the same time:
what `allocate` and `deallocate` do must be idempotent by the claim's uid. A call that takes longer
than the controller's setting `classic_call_s` is cancelled and repeated later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from topobus.formats.kubernetes.classic.classic import AllocationResult
from topobus.formats.messages.messages import ApiObject
from topobus.values.outcome import Reason, Refusal

__all__ = ["ClaimWork", "ClassicContext", "ClassicDriver"]


class ClaimWork(Struct, frozen=True, kw_only=True):
    """A claim to allocate, with its class and the parameters of both."""

    entry: str
    """The name under which the pod knows the claim (`spec.resourceClaims[].name`); empty for one
    that is allocated at once, without a pod."""
    claim: ApiObject
    """The ResourceClaim as stored: it has the driver's finalizer when `allocate` is called."""
    resource_class: ApiObject
    """Its ResourceClass; the wire's top-level fields are in `spec`."""
    class_parameters: Any = None
    """What `get_class_parameters` gave."""
    claim_parameters: Any = None
    """What `get_claim_parameters` gave."""


@runtime_checkable
class ClassicContext(Protocol):
    """What the controller offers a driver."""

    async def read_parameters(self, api_group: str, kind: str, namespace: str, name: str) -> ApiObject | None:
        """Read a parameters object from the store. None when there is none.

        An empty namespace means an object of the cluster.

        Errors: raises PeerUnavailable.
        """
        ...

    def nodes(self) -> tuple[str, ...]:
        """List the known nodes by name."""
        ...


@runtime_checkable
class ClassicDriver(Protocol):
    """One driver.

    Every method may raise PeerUnavailable (tried again later) and ContractError (an
    object that its user must correct).
    """

    name: str
    """`driverName` of its classes and of its allocations: a DNS name of at most 63 characters."""

    async def get_class_parameters(self, resource_class: ApiObject) -> Any:
        """Read and check what a class's `parametersRef` refers to.

        A class without one has defaults.

        Errors: raises ContractError when it is missing or wrong. Claims of the class then wait,
        with this error in their status.
        """
        ...

    async def get_claim_parameters(self, claim: ApiObject, resource_class: ApiObject, class_parameters: Any) -> Any:
        """Read and check what a claim's `parametersRef` refers to.

        A claim without one has defaults.

        Errors: raises ContractError, as above.
        """
        ...

    async def unsuitable_nodes(
        self, pod: ApiObject, claims: Sequence[ClaimWork], potential_nodes: Sequence[str]
    ) -> Mapping[str, Mapping[str, Reason]]:
        """Name the nodes on which the claims cannot be allocated now, with the reasons.

        It has no effect that others see: the answer is a forecast and binds nothing.

        Shapes: claims — all of the pod's claims of this driver that are not allocated yet, to be
        allocated together; result — entry to node to reason. An entry or a node that is absent is
        suitable; a node where the claims do not fit together is unsuitable for each of them.
        """
        ...

    async def allocate(self, claims: Sequence[ClaimWork], selected_node: str) -> Sequence[AllocationResult | Refusal]:
        """Allocate claims, all on the selected node, or one claim on any node when that is empty
        (allocation mode Immediate).

        A claim that has its resources already, from a call whose answer was lost, gets the same
        result. When it has them on another node than the selected one, they are deallocated first:
        the controller does not ask for a claim whose result is written.

        Shapes: one outcome per claim, in their order; one may be refused while the others are
        allocated.
        """
        ...

    async def deallocate(self, claim: ApiObject) -> Refusal | None:
        """Deallocate a claim, also one for which an `allocate` was interrupted.

        None when nothing is left.

        Errors: a Refusal when it cannot be deallocated yet (a container uses it). The claim gets
        that reason, and the call is repeated.
        """
        ...
