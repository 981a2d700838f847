"""The gateway's requests to the node's services: placement and ledger changes go to topology,
preparation goes to the device services.

Every request has a deadline of the gateway's own. The caller chooses the operation id and repeats
it on a retry, so a repeated request gets the first answer and changes nothing a second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from msgspec import structs

from topobus.bus.bus import Bus
from topobus.formats.messages.adjust_messages import Adjusted, AdjustRequest
from topobus.formats.messages.catalogue import ADJUST, ADOPT, ATTACH, DETACH, PREFER, PREPARE, RELEASE, UNPREPARE
from topobus.formats.messages.messages import (
    Adopted,
    AdoptRequest,
    PreferRequest,
    Prepared,
    PrepareRequest,
    ReleaseRequest,
    UnprepareRequest,
)
from topobus.formats.messages.sandbox_messages import Accepted, Attached, AttachRequest, DetachRequest
from topobus.gateway.config import DeadlineSettings
from topobus.gateway.containers.rules.edit_limits import EditRights, host_paths, node_paths, refuse_forbidden
from topobus.gateway.device_plugins.rules.preference import fall_back, is_legal, plugin_choices
from topobus.gateway.links import groups_of_nodes, in_memory, real_paths, with_own_hook, with_real_folders
from topobus.gateway.reconcile.ledger_drift import LedgerDrift
from topobus.process.logging import get_logger
from topobus.process.tracing import annotate
from topobus.values.errors import PeerUnavailable, TopobusError
from topobus.values.idset import CpuSet
from topobus.values.outcome import Refusal
from topobus.values.request import Owner
from topobus.values.sandbox import ContainerName, Sandbox

__all__ = ["NodeAsks", "Preference", "StillAtWork", "configured"]

Preference = Callable[[Sequence[str], Sequence[str], int], Awaitable[tuple[str, ...] | None]]
"""Chooses a number of devices from those available, with those that must be included. None is no
opinion."""


# Answers whose edits were checked and allowed: those of the containers that start now, each of some
# KiB.
_ALLOWED_LIMIT = 32
_ALL_CPUS = CpuSet.of(range(CpuSet.MAX_ID + 1))


class StillAtWork(PeerUnavailable):
    """Raised when a device service works on a request and needs longer. The same request is
    repeated after `retry_after_s`.
    """


class NodeAsks:
    """The requests of one node."""

    def __init__(
        self,
        bus: Bus,
        node: str,
        deadlines: DeadlineSettings,
        rights: Callable[[str], EditRights],
        owned_cpus: CpuSet | None,
    ) -> None:
        """`rights` returns what a class's devices may bring into a container, and `owned_cpus` are
        the CPUs that may be chosen from groups (None: all).
        """
        self._rights = rights
        self.owned_cpus = owned_cpus
        self._bus = bus
        self._node = node
        self._deadlines = deadlines
        self._allowed: dict[tuple[str, ...], tuple[EditRights, dict[str, str], frozenset[int] | None, Prepared]] = {}
        """By class and devices: the newest answer of `prepare` that was allowed, by which
        rights, and where its paths led. The same answer need not be checked again."""
        self.preferences: dict[str, Preference] = {}
        """By class, for classes with a choice of their own."""
        self.disagreements = LedgerDrift(bus, node)
        """Publishes the disagreements between kubelet and the ledger."""

    async def prefer(
        self,
        device_class: str,
        available: Sequence[str],
        must_include: Sequence[str],
        size: int,
        *,
        withheld: Collection[str] = (),
        is_from_end: bool = False,
    ) -> tuple[str, ...]:
        """Choose devices: topology's choice when it comes in time and is a legal one, else by name.

        It never fails. A class with a preference of its own (another vendor's plugin) is asked
        first. Topology chooses what the preference leaves open, as kubelet completes a choice that
        is too short.
        """
        if device_class in self.preferences:
            choices = plugin_choices(available, must_include, size, withheld=withheld, is_from_end=is_from_end)
            vendor_choice: tuple[str, ...] = ()
            for offered in choices:
                vendor_choice = await self.preferences[device_class](offered, must_include, size) or ()
                if not vendor_choice or set(vendor_choice) <= set(choices[-1]):
                    break
            kept = [
                *must_include,
                *(
                    device_name
                    for device_name in dict.fromkeys(vendor_choice)
                    if device_name in available and device_name not in must_include
                ),
            ][:size]
            if is_legal(kept, available, must_include, size):
                return tuple(sorted(kept))
            must_include = kept if set(must_include) <= set(kept) else must_include
        request = PreferRequest(
            device_class=device_class,
            available=tuple(sorted(available)),
            must_include=tuple(sorted(must_include)),
            size=size,
            withheld=tuple(sorted(withheld)),
            is_from_end=is_from_end,
        )
        why = "the choice is not one of those asked for"
        try:
            reply = await self._bus.ask(PREFER, request, timeout_s=self._deadlines.prefer_s, node=self._node)
            if is_legal(reply.devices, available, must_include, size):
                return tuple(sorted(reply.devices))
        except TopobusError as err:
            why = str(err)
        chosen = fall_back(available, must_include, size, withheld=withheld, is_from_end=is_from_end)
        get_logger().warning("preference.fell-back", device_class=device_class, size=size, chosen=list(chosen), why=why)
        return chosen

    async def adopt(self, request: AdoptRequest, *, but_cpus: CpuSet | None = None) -> Adopted | Refusal:
        """Record in the ledger what has been decided elsewhere.

        CPUs of groups are chosen from the request's `owned_cpus` (None: from all that may be
        given), and none from `but_cpus`.
        """
        choosable = request.owned_cpus if request.owned_cpus is not None else self.owned_cpus
        if but_cpus:
            choosable = (choosable if choosable is not None else _ALL_CPUS) - but_cpus
        request = structs.replace(request, owned_cpus=choosable if request.group_cpus else None)
        reply = await self._bus.ask(ADOPT, request, timeout_s=self._deadlines.adopt_s, node=self._node)
        if isinstance(reply.result, Adopted):
            annotate(decision_id=reply.result.decision_id, owner=request.owner.key)
        return reply.result

    async def name_pods(
        self, op_id: str, owner: Owner, *, decision_id: str, pods: tuple[Owner, ...], container: str = ""
    ) -> None:
        """Record in the ledger which pods, and which one container, use what an owner holds by this
        decision.
        """
        request = AdoptRequest(
            op_id=op_id, owner=owner, devices={}, pods=pods, container=container, names_pods_of=decision_id
        )
        await self._bus.ask(ADOPT, request, timeout_s=self._deadlines.adopt_s, node=self._node)

    async def release(
        self, op_id: str, owner: Owner, *, is_undone: bool = False, keeps_devices: bool = False, only: str = ""
    ) -> Refusal | None:
        """Release all that an owner holds, or only its preparation. None: it is done.

        Refused only for a claim that is prepared. `only` is the decision whose holding is meant:
        what the owner was given since stays.
        """
        request = ReleaseRequest(
            op_id=op_id, owner=owner, is_undone=is_undone, keeps_devices=keeps_devices, decision_id=only
        )
        reply = await self._bus.ask(RELEASE, request, timeout_s=self._deadlines.adopt_s, node=self._node)
        return reply.refusal

    async def prepare(self, device_class: str, request: PrepareRequest) -> Prepared | Refusal:
        """Have devices made ready.

        Also refused when the answer has anything that devices of this class may not bring into a
        container.
        Errors: raises StillAtWork while the device service needs longer.
        """
        reply = await self._bus.ask(
            PREPARE, request, timeout_s=self._deadlines.prepare_s, node=self._node, device_class=device_class
        )
        if isinstance(reply.result, Refusal):
            return reply.result
        if isinstance(reply.result, Accepted):
            accepted = reply.result
            raise StillAtWork(
                f"the {device_class} service is still at work ({accepted.what or 'it does not report at what'}), "
                f"for at most {accepted.limit_s:g} s more",
                retry_after_s=accepted.retry_after_s,
            )
        return await self.refuse_forbidden(device_class, reply.result) or reply.result

    async def refuse_forbidden(self, device_class: str, prepared: Prepared) -> Refusal | None:
        """Check an answer of `prepare` from any source. This is the last check before kubelet and a
        container runtime apply it. None: all of it is allowed.
        """
        rights = with_own_hook(device_class, self._rights(device_class))
        paths = host_paths(prepared)
        # A thread for paths that may lie on a disk. The nodes of most devices are in memory, where
        # a check takes less time than a thread.
        others = sorted({*paths}.difference(in_memory(paths)))
        leads_to = await asyncio.to_thread(real_paths, others) if others else {}
        groups = groups_of_nodes(node_paths(prepared))
        seen = (rights, leads_to, groups, prepared)
        place = (device_class, *sorted(prepared.edits))
        if self._allowed.get(place) == seen:
            # The same answer, with paths that lead to the same targets, was allowed the last time.
            return None
        refusal = refuse_forbidden(device_class, prepared, rights, leads_to, groups)
        if refusal is None:
            self._note_allowed(place, seen)
        elif paths:
            # Folders of the rights may themselves be links. Following them only allows more, so
            # what is allowed without them is allowed.
            rights = await asyncio.to_thread(with_real_folders, rights)
            refusal = refuse_forbidden(device_class, prepared, rights, leads_to, groups)
        if refusal is not None:
            get_logger().error(
                "edits.forbidden",
                device_class=device_class,
                reasons=[reason.message for reason in refusal.reasons],
                next_step=f"if the driver needs this, allow it: TOPOBUS_GATEWAY__EDITS (class {device_class}); if not, "
                "find out who answered",
            )
        return refusal

    def _note_allowed(
        self, place: tuple[str, ...], seen: tuple[EditRights, dict[str, str], frozenset[int] | None, Prepared]
    ) -> None:
        self._allowed.pop(place, None)
        self._allowed[place] = seen
        if len(self._allowed) > _ALLOWED_LIMIT:
            del self._allowed[next(iter(self._allowed))]

    async def attach(
        self,
        op_id: str,
        owner: Owner,
        device_class: str,
        names: Sequence[str],
        sandbox: Sandbox,
        config: Mapping[str, tuple[dict[str, Any], ...]],
    ) -> Attached | Refusal | Accepted:
        """Have prepared devices brought into a pod's sandbox.

        A repeated request for the same sandbox gets the same answer.
        """
        common, by_device = configured(names, config)
        request = AttachRequest(
            op_id=op_id,
            owner=owner,
            devices=tuple(sorted(names)),
            sandbox=sandbox,
            config=common,
            device_config=by_device,
        )
        reply = await self._bus.ask(
            ATTACH, request, timeout_s=self._deadlines.prepare_s, node=self._node, device_class=device_class
        )
        return reply.result

    async def detach(
        self, op_id: str, owner: Owner, device_class: str, names: Sequence[str], sandbox: Sandbox
    ) -> Refusal | None:
        """Undo attach. None: it is done."""
        request = DetachRequest(op_id=op_id, owner=owner, devices=tuple(sorted(names)), sandbox=sandbox)
        reply = await self._bus.ask(
            DETACH, request, timeout_s=self._deadlines.prepare_s, node=self._node, device_class=device_class
        )
        return reply.refusal

    async def adjust(
        self,
        op_id: str,
        owner: Owner,
        device_class: str,
        names: Sequence[str],
        container: ContainerName,
        config: Mapping[str, tuple[dict[str, Any], ...]],
        timeout_s: float,
    ) -> Adjusted | Refusal:
        """Read what one container gets of its devices.

        Also refused when it has anything that devices of this class may not bring.
        """
        common, by_device = configured(names, config)
        request = AdjustRequest(
            op_id=op_id, owner=owner, devices=tuple(names), container=container, config=common, device_config=by_device
        )
        reply = await self._bus.ask(ADJUST, request, timeout_s=timeout_s, node=self._node, device_class=device_class)
        if isinstance(reply.result, Refusal):
            return reply.result
        return await self.refuse_forbidden(device_class, Prepared(edits=reply.result.edits)) or reply.result

    async def unprepare(self, op_id: str, owner: Owner, device_class: str, names: Sequence[str]) -> Refusal | None:
        """Undo prepare. None: it is done."""
        request = UnprepareRequest(op_id=op_id, owner=owner, devices=tuple(sorted(names)))
        reply = await self._bus.ask(
            UNPREPARE, request, timeout_s=self._deadlines.prepare_s, node=self._node, device_class=device_class
        )
        return reply.refusal


def configured(
    names: Sequence[str], config: Mapping[str, tuple[dict[str, Any], ...]]
) -> tuple[tuple[dict[str, Any], ...], dict[str, tuple[dict[str, Any], ...]]]:
    """Return the configuration once when it is the same for all devices, else by device."""
    given = [config.get(name, ()) for name in names]
    is_alike = all(parameters == given[0] for parameters in given)
    return (given[0] if given else (), {}) if is_alike else ((), dict(zip(names, given, strict=True)))
