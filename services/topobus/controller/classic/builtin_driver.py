"""The built-in classic driver, one instance for each device class: it allocates whole devices of
the nodes' inventories.

It places and releases through requests to the nodes. Its node state is the node's ledger, which
also holds structured claims, pods and device plugins: a device that the ledger refuses is not
allocated, whatever was chosen here. A claim that the ledger already holds devices for gets those
devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from topobus.controller.classic.rules import classic_lifecycle
from topobus.controller.classic.rules.device_choice import (
    LONGEST_EXPRESSION,
    choose,
    structured_claim,
    structured_class,
)
from topobus.controller.commit.ledger_releases import UnderWay
from topobus.controller.commit.node_ledgers import NodeLedgers
from topobus.controller.commit.refusal_backoff import RefusalBackoff
from topobus.controller.config import ControllerSettings
from topobus.controller.state.standalone_state import StandaloneState
from topobus.devicekit.classic.classic import ClaimWork, ClassicContext
from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.allocation.node_selectors import selector_matches
from topobus.engine.allocation.values import DeviceId, node_of
from topobus.engine.cel.selector import CelCompiler
from topobus.engine.claims.lifecycle import owner_of
from topobus.engine.claims.objects import Claim
from topobus.formats.kubernetes.classic import classic_parameters as parameters
from topobus.formats.kubernetes.classic.classic import AllocationResult, ClassParametersReference, ParametersReference
from topobus.formats.kubernetes.classic.classic_handles import device_handles, only_node, write_handle
from topobus.formats.kubernetes.classic.classic_limits import check_classic
from topobus.formats.kubernetes.objects import CLAIM_PARAMETERS, CLASS_PARAMETERS, metadata_of, name_of
from topobus.formats.kubernetes.resource import Wire
from topobus.formats.kubernetes.shape import read_as, refuse_problems
from topobus.formats.messages import catalogue
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.messages import ApiObject, PlaceRequest
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.values.dra_names import DRIVER, class_of_device, group_of_class, pool_of_class
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.ledger import Ledger
from topobus.values.outcome import Placement, Reason, Refusal, refuse
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, PodRequest, Policy

__all__ = ["BuiltinDriver"]

P = TypeVar("P", bound=Wire)


class BuiltinDriver:
    """The classic driver of one device class."""

    def __init__(
        self,
        device_class: str,
        settings: ControllerSettings,
        runtime: Runtime,
        state: StandaloneState,
        context: ClassicContext,
    ) -> None:
        self.name = group_of_class(device_class)
        self._class = device_class
        self._group = parameters.group_of_class(device_class)
        self._bus = runtime.bus
        self._ledgers = NodeLedgers(runtime.bus, state, settings.ask_timeout_s)
        self._state = state
        self._context = context
        self._compiler = CelCompiler(LONGEST_EXPRESSION)
        self._refusals: RefusalBackoff[DeviceId] = RefusalBackoff(runtime.clock, settings.retry_s)

    async def get_class_parameters(self, resource_class: ApiObject) -> parameters.DeviceClassParameters:
        """Read a class's parameters. A class without a reference gets the defaults."""
        reference = classic_lifecycle.read_class(resource_class).parameters_ref
        kind = parameters.DeviceClassParameters
        return await self._parameters(resource_class, reference, CLASS_PARAMETERS, "", kind) if reference else kind()

    async def get_claim_parameters(
        self, claim: ApiObject, resource_class: ApiObject, class_parameters: Any
    ) -> parameters.ClaimParameters:
        """Read a claim's parameters. A claim without a reference gets one device."""
        reference = classic_lifecycle.read_claim(claim).parameters_ref
        namespace = metadata_of(claim).namespace or "default"
        kind = parameters.ClaimParameters
        return await self._parameters(claim, reference, CLAIM_PARAMETERS, namespace, kind) if reference else kind()

    async def unsuitable_nodes(
        self, pod: ApiObject, claims: Sequence[ClaimWork], potential_nodes: Sequence[str]
    ) -> Mapping[str, Mapping[str, Reason]]:
        """Choose on each node for all claims together.

        A node where that fails is unsuitable for each of them.
        """
        reasons: dict[str, dict[str, Reason]] = {claim.entry: {} for claim in claims}
        for node in potential_nodes:
            chosen = self._choose(node, [claim for claim in claims if self._holding(claim.claim) != node])
            if isinstance(chosen, Refusal):
                why = Reason(
                    code=chosen.reasons[0].code, message=summarize(chosen.reasons), facts=chosen.reasons[0].facts
                )
                for claim in claims:
                    reasons[claim.entry][node] = why
        return reasons

    async def allocate(self, claims: Sequence[ClaimWork], selected_node: str) -> Sequence[AllocationResult | Refusal]:
        """Choose for all claims together, and place each in the node's ledger.

        A claim keeps what the node's ledger already holds for it.
        """
        results: dict[int, AllocationResult | Refusal] = {}
        open_claims: list[int] = []
        for index, claim in enumerate(claims):
            refusal = await self._leave_others(claim.claim, selected_node)
            held = await self._held(claim, selected_node)
            if refusal is not None:
                results[index] = refusal
            elif held is not None:
                results[index] = held
            else:
                open_claims.append(index)
        wanted = [claims[index] for index in open_claims]
        node, chosen = self._find(wanted, selected_node)
        for number, index in enumerate(open_claims):
            results[index] = (
                chosen if isinstance(chosen, Refusal) else await self._place(claims[index], node, chosen[number])
            )
        return [results[index] for index in range(len(claims))]

    async def deallocate(self, claim: ApiObject) -> Refusal | None:
        """Release the claim on every node that may hold something of it.

        A claim that is prepared is refused and keeps its devices.
        """
        nodes = self._nodes_of(claim)
        if not nodes:
            # An attempt on any node may have no recorded answer: only the ledgers themselves show
            # what it holds.
            owner = owner_of(claim)
            attempts = classic_lifecycle.attempt_of(claim).number
            ledgers = await self._bus.list(catalogue.LEDGER) if attempts and not claim.status.get("allocation") else ()
            nodes = tuple(ledger.value.node for ledger in ledgers if owner.key in ledger.value.allocations)
        for node in nodes:
            refusal = await self._release(owner_of(claim), node)
            if refusal is not None:
                return refusal
        self._refusals.drop(lambda asker: asker == metadata_of(claim).uid)
        return None

    async def tidy(self, claim: ApiObject) -> None:
        """Release what an allocated claim holds on other nodes: two replicas may have tried two
        nodes, and only one result was written.
        """
        nodes = self._state.stock.nodes_holding(owner_of(claim).key)
        if len(nodes) > 1:
            kept = {handle.node for _, handle in device_handles(classic_lifecycle.status_of(claim), name_of(claim))}
            for node in nodes if kept else ():
                if node not in kept:
                    get_logger().info("claim.tidied", claim=name_of(claim), node=node)
                    await self._release(owner_of(claim), node)

    async def _parameters(
        self,
        claim: ApiObject,
        reference: ParametersReference | ClassParametersReference,
        wanted: str,
        namespace: str,
        kind: type[P],
    ) -> P:
        """Read the object that a reference names.

        Errors: raises ContractError that names the referenced kind and the wanted one.
        """
        where = f"{name_of(claim)}: parametersRef"
        if (reference.api_group, reference.kind) != (self._group, wanted):
            raise ContractError(
                f"{where}: got {reference.kind or 'no kind'} of group {reference.api_group!r}: driver "
                f"{self.name} wants {wanted} of {self._group}"
            )
        api_object = await self._context.read_parameters(reference.api_group, reference.kind, namespace, reference.name)
        if api_object is None:
            shown = f"{namespace}/{reference.name}" if namespace else reference.name
            raise ContractError(f"{where}: there is no {wanted} {shown} of {self._group}")
        refuse_problems(check_classic(api_object), name_of(api_object))
        return read_as(api_object.spec, kind, where=f"{name_of(api_object)}: spec")

    def _find(
        self, claims: Sequence[ClaimWork], selected_node: str
    ) -> tuple[str, tuple[tuple[str, ...], ...] | Refusal]:
        """Choose on the selected node, or else on the first suitable node, by name, that the class
        allows.
        """
        if not claims:
            return selected_node, ()
        if selected_node:
            return selected_node, self._choose(selected_node, claims)
        refusals: list[Reason] = []
        for node in self._state.nodes():
            chosen = self._choose(node, claims)
            if not isinstance(chosen, Refusal):
                return node, chosen
            refusals.extend(chosen.reasons)
        nothing = Reason(code="no-node", message="no node has published a machine or an inventory yet")
        return "", Refusal(reasons=tuple(refusals) or (nothing,))

    def _choose(self, node: str, claims: Sequence[ClaimWork]) -> tuple[tuple[str, ...], ...] | Refusal:
        if not claims:
            return ()
        if node not in self._state.ledgers:
            message = f"node {node} is not ready: its topology has written no ledger"
            return refuse("node-not-ready", message, node=node)
        for claim in claims:
            if not claim.resource_class.spec.get("suitableNodes"):
                continue
            suitable = classic_lifecycle.read_class(claim.resource_class).suitable_nodes
            if suitable is None or not selector_matches(suitable, node_of(node)):
                message = f"node {node}: {name_of(claim.resource_class)} does not have it among its suitableNodes"
                return refuse("node-not-suitable", message, node=node)
        excluded = {
            device: why
            for claim in claims
            for device, why in self._refusals.refused(metadata_of(claim.claim).uid).items()
        }
        names = [metadata_of(claim.resource_class).name for claim in claims]
        classes = {
            name: structured_class(self._class, claim.class_parameters.selector)
            for name, claim in zip(names, claims, strict=True)
        }
        wanted = [
            (
                Claim(claim.claim),
                structured_claim(name, claim.claim_parameters.count, claim.claim_parameters.selector),
            )
            for name, claim in zip(names, claims, strict=True)
        ]
        given = self._state.input_for(node, wanted, excluded=excluded)
        return choose(given, self._class, classes, self._compiler)

    async def _place(self, claim_work: ClaimWork, node: str, devices: tuple[str, ...]) -> AllocationResult | Refusal:
        """Place the devices in the node's ledger for the claim, and return the ledger's answer."""
        owner = owner_of(claim_work.claim)
        uid = owner.uid
        request = PodRequest(
            owner=owner,
            containers=(
                ContainerRequest(
                    name="", devices=(DeviceRequest(device_class=self._class, count=len(devices), names=devices),)
                ),
            ),
            policy=Policy.NONE,
        )
        digest = hashlib.sha256("/".join((node, *devices)).encode()).hexdigest()[:12]
        op_id = f"classic-{uid}-{classic_lifecycle.attempt_of(claim_work.claim).number}-{digest}-{self._refusals.count(uid)}"  # noqa: E501
        ids = [DeviceId(DRIVER, pool_of_class(node, self._class), device) for device in devices]
        try:
            reply = await self._ledgers.place(node, PlaceRequest(op_id=op_id, pod=request))
        except PeerUnavailable as err:
            # Neither done nor undone. The claim may be placed elsewhere, for no result is written.
            # What it holds here is released once the node answers again.
            ids = list(self._state.devices_of(node))
            self._refusals.add(uid, ids, f"it did not answer: {err.message}")
            raise
        if isinstance(reply.result, Placement):
            self._refusals.drop(lambda asker: asker == uid)
            return self._result(claim_work, node, devices)
        # Another replica may have placed other devices here. A claim holds devices once, so those
        # are the claim's.
        ledger = await self._ledgers.read(node)
        held = self._held_in(ledger, owner) if ledger is not None else ()
        if held:
            return self._result(claim_work, node, held)
        why = summarize(reply.result.reasons)
        get_logger().info("claim.refused", claim=name_of(claim_work.claim), node=node, op_id=op_id, why=why)
        self._refusals.add(uid, ids, why)
        return reply.result

    async def _held(self, claim_work: ClaimWork, selected_node: str) -> AllocationResult | None:
        """Return what the claim holds already from an attempt whose result was never written."""
        owner = owner_of(claim_work.claim)
        for node in (selected_node,) if selected_node else self._state.stock.nodes_holding(owner.key):
            ledger = self._state.ledgers.get(node)
            held = self._held_in(ledger, owner) if ledger is not None else ()
            if held and len(held) == claim_work.claim_parameters.count:
                return self._result(claim_work, node, held)
            if held:
                # Its parameters changed between two attempts. No result was published, so the old
                # devices are released.
                await self._release(owner, node)
        return None

    async def _leave_others(self, claim: ApiObject, selected_node: str) -> Refusal | None:
        """Release what the claim holds on other nodes than the selected one, for the scheduler may
        have selected another node before a result was written.
        """
        owner = owner_of(claim)
        for node in self._state.stock.nodes_holding(owner.key) if selected_node else ():
            if node != selected_node:
                refusal = await self._release(owner, node)
                if refusal is not None:
                    return refusal
        return None

    async def _release(self, owner: Owner, node: str) -> Refusal | None:
        """Release a claim on one node.

        The ledger is read first: its sequence makes a release after a later placement another
        operation.
        """
        ledger = await self._ledgers.read(node)
        if ledger is None or owner.key not in ledger.allocations:
            return None
        answer = await self._ledgers.release_on(node, owner, f"release-{owner.uid}-classic-{ledger.sequence}")
        if isinstance(answer, UnderWay):
            raise PeerUnavailable(f"node {node} has not released {owner} yet")
        return answer

    def _result(self, claim_work: ClaimWork, node: str, devices: tuple[str, ...]) -> AllocationResult:
        sharing = claim_work.claim_parameters.sharing or claim_work.class_parameters.sharing
        return AllocationResult(
            resource_handles=(write_handle(self.name, node, devices, _config(sharing)),),
            available_on_nodes=only_node(node),
            shareable=claim_work.class_parameters.shareable,
        )

    def _held_in(self, ledger: Ledger, owner: Owner) -> tuple[str, ...]:
        held = self._ledgers.devices_held(ledger, owner)
        return tuple(sorted(device_id.device for device_id in held if self._is_mine(device_id)))

    def _is_mine(self, device_id: DeviceId) -> bool:
        return class_of_device(device_id.driver, device_id.device) == self._class

    def _holding(self, claim: ApiObject) -> str:
        """Name the node on which a claim holds devices already. Empty when there is none."""
        return next(iter(self._state.stock.nodes_holding(owner_of(claim).key)), "")

    def _nodes_of(self, claim: ApiObject) -> tuple[str, ...]:
        """Name the nodes that may hold something of a claim: by the ledgers, by its attempt, by its
        allocation.
        """
        nodes = set(self._state.stock.nodes_holding(owner_of(claim).key))
        try:
            nodes.add(classic_lifecycle.attempt_of(claim).node)
            nodes |= {handle.node for _, handle in device_handles(classic_lifecycle.status_of(claim), name_of(claim))}
        except ContractError:
            pass  # a claim that cannot be read must be deletable, and the ledgers record what it holds
        return tuple(sorted(nodes - {""}))


def _config(sharing: parameters.Sharing | None) -> tuple[dict[str, Any], ...]:
    """Pass the sharing strategy to the node as opaque configuration. Empty when none was
    requested.
    """
    if sharing is None:
        return ()
    body = decode(encode(sharing), dict[str, Any], where="sharing") | {"strategy": sharing.strategy}
    return (msgspec.to_builtins({"apiVersion": parameters.SHARING_VERSION, "kind": parameters.SHARING_KIND, **body}),)
