"""A third party's classic driver, as its package would have it: seats of floating licences, served
to any node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from topobus.devicekit.classic.classic import ClaimWork, ClassicContext
from topobus.formats.kubernetes.classic.classic import AllocationResult, ResourceHandle
from topobus.formats.kubernetes.objects import metadata_of, name_of
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError
from topobus.values.outcome import Reason, Refusal

GROUP = "licence.example.com"


class LicenceServer:
    """What the driver hands out; it outlives every controller."""

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self.taken: dict[str, int] = {}

    @property
    def free(self) -> int:
        """Seats that are free."""
        return self.seats - sum(self.taken.values())


SERVER = LicenceServer(4)


class LicenceDriver:
    """Classes name nothing; claims ask for seats by LicenceParameters `{seats: 2}`."""

    name = "licence.example.com"

    def __init__(self, context: ClassicContext, server: LicenceServer | None = None) -> None:
        self._context = context
        self._server = server or SERVER

    async def get_class_parameters(self, resource_class: ApiObject) -> None:
        """Take classes without parameters only."""
        if resource_class.spec.get("parametersRef"):
            raise ContractError(
                f"{name_of(resource_class)}: parametersRef: driver {self.name} knows no parameters of a class"
            )

    async def get_claim_parameters(self, claim: ApiObject, resource_class: ApiObject, class_parameters: Any) -> int:
        """Read how many seats; one without parameters."""
        reference = claim.spec.get("parametersRef")
        if reference is None:
            return 1
        namespace = metadata_of(claim).namespace
        parameters = await self._context.read_parameters(
            reference.get("apiGroup", ""), reference["kind"], namespace, reference["name"]
        )
        seats = (
            parameters.spec.get("seats") if parameters is not None and parameters.kind == "LicenceParameters" else None
        )
        if not isinstance(seats, int) or seats < 1:
            raise ContractError(
                f"{name_of(claim)}: parametersRef: wanted LicenceParameters of {GROUP} with seats of at least 1"
            )
        return seats

    async def unsuitable_nodes(
        self, pod: ApiObject, claims: Sequence[ClaimWork], potential_nodes: Sequence[str]
    ) -> Mapping[str, Mapping[str, Reason]]:
        """Seats are the same everywhere."""
        wanted = sum(
            claim.claim_parameters for claim in claims if metadata_of(claim.claim).uid not in self._server.taken
        )
        if wanted <= self._server.free:
            return {}
        return {claim.entry: dict.fromkeys(potential_nodes, self._none(wanted)) for claim in claims}

    async def allocate(self, claims: Sequence[ClaimWork], selected_node: str) -> Sequence[AllocationResult | Refusal]:
        """Take seats, once for each claim."""
        outcomes: list[AllocationResult | Refusal] = []
        for claim in claims:
            uid = metadata_of(claim.claim).uid
            if uid not in self._server.taken and claim.claim_parameters > self._server.free:
                outcomes.append(Refusal(reasons=(self._none(claim.claim_parameters),)))
                continue
            self._server.taken.setdefault(uid, claim.claim_parameters)
            handle = ResourceHandle(driver_name=self.name, data=f"seats={self._server.taken[uid]}")
            outcomes.append(AllocationResult(resource_handles=(handle,), shareable=True))
        return outcomes

    async def deallocate(self, claim: ApiObject) -> Refusal | None:
        """Give the seats back."""
        self._server.taken.pop(metadata_of(claim).uid, None)
        return None

    def _none(self, wanted: int) -> Reason:
        return Reason(
            code="too-few-seats", message=f"{wanted} seats wanted, {self._server.free} free", facts={"wanted": wanted}
        )


def broken(context: ClassicContext) -> LicenceDriver:
    """Fail as a module of a vendor's may."""
    raise OSError("no licence file")


class Half:
    """Lacks most of a driver."""

    name = "half.example.com"

    def __init__(self, context: ClassicContext) -> None: ...


class OursByName(LicenceDriver):
    """Claims a name that is not its own."""

    name = "gpu.topobus.dev"
