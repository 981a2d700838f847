"""The contract of a classic DRA driver as a test suite: subclass `ClassicDriverContract`, define
how the driver is made and what it serves, and run pytest.

    class TestLicences(ClassicDriverContract):
        def make_driver(self, context: ClassicContext) -> ClassicDriver:
            return LicenceDriver(context, SERVER)

        def make_scene(self) -> ClassicScene:
            return ClassicScene(resource_class=..., parameters=(...), claims=(...), too_big=...)

Every promise that the controller relies on has a test here. A driver that passes survives a
controller that dies between any two of its calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import pytest
from msgspec import Struct

from topobus.devicekit.classic.classic import ClaimWork, ClassicContext, ClassicDriver
from topobus.formats.kubernetes.classic import classic
from topobus.formats.kubernetes.classic.classic_limits import check_status
from topobus.formats.kubernetes.objects import metadata_of
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError
from topobus.values.names import is_dns_subdomain
from topobus.values.outcome import Refusal

__all__ = ["ClassicDriverContract", "ClassicScene", "SceneContext"]

_POD = ApiObject(api_version="v1", kind="Pod", metadata={"name": "contract", "namespace": "default", "uid": "pod-uid"})


class ClassicScene(Struct, frozen=True, kw_only=True):
    """What the driver serves in the tests, all of it free."""

    resource_class: ApiObject
    parameters: tuple[ApiObject, ...] = ()
    """Parameters of the class and of the claims."""
    claims: tuple[ApiObject, ...]
    """At least two claims, each with a uid, that can be had together on every node of the scene."""
    too_big: ApiObject
    """A claim that cannot be had anywhere."""
    nodes: tuple[str, ...] = ("contract-node",)


class SceneContext:
    """What the controller offers a driver, from the objects of a scene."""

    def __init__(self, scene: ClassicScene) -> None:
        self._scene = scene

    async def read_parameters(self, api_group: str, kind: str, namespace: str, name: str) -> ApiObject | None:
        """Find parameters among the scene's."""
        for parameter in self._scene.parameters:
            metadata = metadata_of(parameter)
            if (parameter.api_version.partition("/")[0], parameter.kind, metadata.name) == (api_group, kind, name):
                return parameter if metadata.namespace in ("", namespace) else None
        return None

    def nodes(self) -> tuple[str, ...]:
        """Give the scene's nodes."""
        return self._scene.nodes


class ClassicDriverContract:
    """The suite.

    Override `make_driver` and `make_scene`, or the fixtures `scene` and `make` where
    making a driver needs an event loop.
    """

    def make_driver(self, context: ClassicContext) -> ClassicDriver:
        """Make a new driver, as its entry point does.

        A second one finds the results of the first one, as after a crash.
        """
        raise NotImplementedError("make_driver: return a new instance of your driver")

    def make_scene(self) -> ClassicScene:
        """Describe what the driver serves. Its resources are free."""
        raise NotImplementedError("make_scene: return a ClassicScene")

    @pytest.fixture
    def scene(self) -> ClassicScene:
        """Give the scene."""
        return self.make_scene()

    @pytest.fixture
    def make(self, scene: ClassicScene) -> Callable[[], ClassicDriver]:
        """Return a function that makes drivers with shared resources."""
        return lambda: self.make_driver(SceneContext(scene))

    @pytest.fixture
    def driver(self, make: Callable[[], ClassicDriver]) -> ClassicDriver:
        """Give a new driver."""
        return make()

    async def test_driver_has_a_name_that_a_class_can_have(self, driver: ClassicDriver, scene: ClassicScene) -> None:
        """A driver's name is a DNS name of at most 63 characters, the one of the scene's class."""
        assert is_dns_subdomain(driver.name)
        assert len(driver.name) <= 63
        assert scene.resource_class.spec["driverName"] == driver.name

    async def test_parameters_are_read_and_missing_ones_are_told(
        self, driver: ClassicDriver, scene: ClassicScene
    ) -> None:
        """A reference to a missing object is a ContractError that the user must correct, never a
        silent default.
        """
        await _works(driver, scene, scene.claims)
        reference = {"apiGroup": "nothing.example.com", "kind": "NothingParameters", "name": "nothing"}
        lost = msgspec.structs.replace(
            scene.resource_class, spec={**scene.resource_class.spec, "parametersRef": reference}
        )
        claim = msgspec.structs.replace(scene.claims[0], spec={**scene.claims[0].spec, "parametersRef": reference})
        of_class = await driver.get_class_parameters(scene.resource_class)

        with pytest.raises(ContractError):
            await driver.get_class_parameters(lost)
        with pytest.raises(ContractError):
            await driver.get_claim_parameters(claim, scene.resource_class, of_class)

    async def test_forecast_names_potential_nodes_only_and_changes_nothing(
        self, driver: ClassicDriver, scene: ClassicScene
    ) -> None:
        """A repeated forecast is the same.

        A claim that can be allocated is suitable everywhere, one that cannot is unsuitable
        everywhere, with a reason.
        """
        works = await _works(driver, scene, scene.claims)
        big = await _works(driver, scene, (scene.too_big,))

        for _ in range(2):
            reasons = await driver.unsuitable_nodes(_POD, works, scene.nodes)
            assert {entry: dict(found_reasons) for entry, found_reasons in reasons.items() if found_reasons} == {}
        refused = (await driver.unsuitable_nodes(_POD, big, scene.nodes)).get(big[0].entry, {})
        assert set(refused) == set(scene.nodes)
        assert all(reason.code and reason.message for reason in refused.values())

    async def test_allocation_is_what_can_be_written(self, driver: ClassicDriver, scene: ClassicScene) -> None:
        """There is one outcome for each claim, in their order, within the limits of the API, with
        handles for this driver.
        """
        works = await _works(driver, scene, scene.claims)

        outcomes = await driver.allocate(works, scene.nodes[0])

        assert len(outcomes) == len(works)
        for outcome in outcomes:
            assert isinstance(outcome, classic.AllocationResult)
            assert check_status(classic.ClaimStatus(driver_name=driver.name, allocation=outcome)) == []
            assert {handle.driver_name for handle in outcome.resource_handles} <= {driver.name, ""}

    async def test_allocation_is_the_same_when_it_is_repeated(
        self, driver: ClassicDriver, make: Callable[[], ClassicDriver], scene: ClassicScene
    ) -> None:
        """A claim has its resources once, also when this replica repeats the call, several make it
        at once, or one that was started after a crash does.
        """
        works = await _works(driver, scene, scene.claims)
        first = await driver.allocate(works, scene.nodes[0])

        assert await driver.allocate(works, scene.nodes[0]) == first
        assert await asyncio.gather(*(driver.allocate(works, scene.nodes[0]) for _ in range(3))) == [first] * 3
        assert await make().allocate(works, scene.nodes[0]) == first

    async def test_claim_is_refused_when_it_cannot_be_had_and_its_neighbours_are_not(
        self, driver: ClassicDriver, scene: ClassicScene
    ) -> None:
        """A refusal is a value with reasons, not an exception."""
        (big,) = await _works(driver, scene, (scene.too_big,))
        (small,) = await _works(driver, scene, scene.claims[:1])

        (refused,) = await driver.allocate([big], scene.nodes[0])
        (given,) = await driver.allocate([small], scene.nodes[0])

        assert isinstance(refused, Refusal)
        assert refused.reasons
        assert isinstance(given, classic.AllocationResult)

    async def test_claim_is_allocated_without_a_node_or_refused_with_a_reason(
        self, driver: ClassicDriver, scene: ClassicScene
    ) -> None:
        """Allocation mode Immediate names no node, and a driver that does not support it
        refuses.
        """
        (work,) = await _works(driver, scene, scene.claims[:1])

        (outcome,) = await driver.allocate([work], "")

        assert isinstance(outcome, classic.AllocationResult) or outcome.reasons

    async def test_deallocation_may_be_repeated_and_frees_for_another_try(
        self, driver: ClassicDriver, scene: ClassicScene
    ) -> None:
        """A claim that was never allocated has nothing to deallocate.

        One that was can be allocated again, with a new attempt.
        """
        works = await _works(driver, scene, scene.claims)
        assert await driver.deallocate(works[0].claim) is None
        for number in (1, 2):
            (outcome,) = await driver.allocate([_attempt(works[0], number)], scene.nodes[0])
            assert isinstance(outcome, classic.AllocationResult)
            allocated = msgspec.structs.replace(
                works[0].claim, status={"driverName": driver.name, "allocation": msgspec.to_builtins(outcome)}
            )

            assert await driver.deallocate(allocated) is None
            assert await driver.deallocate(allocated) is None

    async def test_half_an_allocation_is_given_back_when_nobody_wrote_it_down(
        self, driver: ClassicDriver, scene: ClassicScene
    ) -> None:
        """A claim without an allocation in its status may still have resources: only the driver can
        know.
        """
        (work,) = await _works(driver, scene, scene.claims[:1])
        await driver.allocate([work], scene.nodes[0])

        assert await driver.deallocate(work.claim) is None
        others = await _works(driver, scene, scene.claims)
        again = await driver.allocate([_attempt(claim_work, 2) for claim_work in others], scene.nodes[0])
        assert all(isinstance(result, classic.AllocationResult) for result in again)


async def _works(driver: ClassicDriver, scene: ClassicScene, claims: Sequence[ApiObject]) -> list[ClaimWork]:
    """Collect what the controller passes to a driver."""
    of_class = await driver.get_class_parameters(scene.resource_class)
    return [
        _attempt(
            ClaimWork(
                entry=metadata_of(claim).name,
                claim=claim,
                resource_class=scene.resource_class,
                class_parameters=of_class,
                claim_parameters=await driver.get_claim_parameters(claim, scene.resource_class, of_class),
            ),
            1,
        )
        for claim in claims
    ]


def _attempt(work: ClaimWork, number: int) -> ClaimWork:
    """Write finalizer and attempt, as the controller does before it asks for an allocation."""
    finalizer = classic.deletion_protection(str(work.resource_class.spec["driverName"]))
    notes = {classic.CLASSIC_ATTEMPT_ANNOTATION: f'{{"number":{number}}}'}
    metadata = {**work.claim.metadata, "finalizers": [finalizer], "annotations": notes}
    return msgspec.structs.replace(work, claim=msgspec.structs.replace(work.claim, metadata=metadata))
