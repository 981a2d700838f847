"""The gateway's requests to the node plane: placement and ledger changes go to topology, preparation goes to the device services.

Every request has a deadline of the gateway's own. The caller chooses the operation id and repeats it on a retry, so a repeated request
gets the first answer and changes nothing a second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from topobus.contracts.catalogue import ADOPT, PREFER, PREPARE, RELEASE, UNPREPARE
from topobus.contracts.messages import (
    Adopted,
    AdoptRequest,
    PreferRequest,
    Prepared,
    PrepareReply,
    PrepareRequest,
    ReleaseRequest,
    UnprepareRequest,
)
from topobus.domain.errors import TopobusError
from topobus.domain.outcome import MemoryBlock, Reason, Refusal
from topobus.domain.request import Owner
from topobus.gateway.config import DeadlineSettings
from topobus.gateway.core.edit_limits import EditRights, host_paths, refuse_forbidden
from topobus.gateway.core.preference import fall_back, is_legal, plugin_choices
from topobus.gateway.links import real_paths, with_real_folders
from topobus.gateway.reconcile.ledger_drift import LedgerDrift
from topobus.runtime.bus import Bus, Held
from topobus.runtime.logging import get_logger

__all__ = ["NodeAsks", "Preference", "contradicted"]

Preference = Callable[[Sequence[str], Sequence[str], int], Awaitable[tuple[str, ...] | None]]
"""Chooses out of what is available, with what must be included, so many; None is no opinion."""


class NodeAsks:
    """Asks of one node."""

    def __init__(self, bus: Bus, node: str, deadlines: DeadlineSettings, rights: Callable[[str], EditRights]) -> None:
        """Ask over a bus; `rights` tells what a class's devices may bring into a container."""
        self._rights = rights
        self._bus = bus
        self._node = node
        self._deadlines = deadlines
        self.preferences: dict[str, Preference] = {}
        """By class: who has a choice of his own."""
        self.disagreements = LedgerDrift(bus, node)
        """Where everybody is told of what kubelet and the ledger see differently."""

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
        """Choose devices: topology's choice when it comes in time and is a legal one, else by name. Never an error.

        A class with a preference of its own (somebody else's plugin) is asked first; what it leaves open is topology's again, as kubelet fills up a choice
        that is too short.
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

    async def adopt(
        self,
        op_id: str,
        owner: Owner,
        devices: Mapping[str, tuple[str, ...]],
        *,
        shared: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        is_shared: bool = False,
        is_prepared: bool = False,
        memory: tuple[MemoryBlock, ...] = (),
        container: str = "",
        user: Owner | None = None,
    ) -> Adopted | Refusal:
        """Write into the ledger what has been decided elsewhere; `shared` names those devices of which the owner has a share, `user` who uses them."""
        request = AdoptRequest(
            op_id=op_id,
            owner=owner,
            devices=dict(devices),
            shared=dict(shared),
            is_shared=is_shared,
            is_prepared=is_prepared,
            memory=memory,
            container=container,
            user=user,
        )
        reply = await self._bus.ask(ADOPT, request, timeout_s=self._deadlines.adopt_s, node=self._node)
        return reply.result

    async def name_user(self, op_id: str, owner: Owner, devices: Mapping[str, tuple[str, ...]], *, decision_id: str, user: Owner) -> None:
        """Tell the ledger which pod uses what an owner holds by this decision."""
        request = AdoptRequest(op_id=op_id, owner=owner, devices=dict(devices), user=user, decision_id=decision_id)
        await self._bus.ask(ADOPT, request, timeout_s=self._deadlines.adopt_s, node=self._node)

    async def release(
        self, op_id: str, owner: Owner, *, is_undone: bool = False, keeps_devices: bool = False, only: str = ""
    ) -> Refusal | None:
        """Let go of all that an owner holds, or of its preparation alone; None is done. Refused only for a claim that is prepared.

        `only` is the decision whose holding is meant: what the owner was given since stays.
        """
        request = ReleaseRequest(op_id=op_id, owner=owner, is_undone=is_undone, keeps_devices=keeps_devices, decision_id=only)
        reply = await self._bus.ask(RELEASE, request, timeout_s=self._deadlines.adopt_s, node=self._node)
        return reply.refusal

    async def prepare(
        self,
        op_id: str,
        owner: Owner,
        device_class: str,
        names: Sequence[str],
        config: Mapping[str, tuple[dict[str, Any], ...]] = MappingProxyType({}),
        looked_at: Sequence[str] = (),
        tolerated: Sequence[str] = (),
        answers: list[Held[PrepareReply]] | None = None,
    ) -> Prepared | Refusal:
        """Have devices made ready, each with its configuration; `looked_at` are those of admin access.

        Refused, too, when the answer has anything that devices of this class may not bring into a container, and when two answers came that say different
        things. Who takes the answer itself into `answers` looks for the latter by `contradicted`, when all is done that must be done before kubelet hears of it.
        """
        given = [config.get(name, ()) for name in names]
        # The same for all is said once, which device services of before know, too.
        is_alike = all(parameters == given[0] for parameters in given)
        request = PrepareRequest(
            op_id=op_id,
            owner=owner,
            devices=tuple(sorted(names)),
            config=given[0] if given and is_alike else (),
            device_config={} if is_alike else dict(zip(names, given, strict=True)),
            looked_at=tuple(sorted(looked_at)),
            tolerated=tuple(sorted(tolerated)),
        )
        answer = await self._bus.ask_held(PREPARE, request, timeout_s=self._deadlines.prepare_s, node=self._node, device_class=device_class)
        if isinstance(answer.reply.result, Refusal):
            return answer.reply.result
        refusal = await self.refuse_forbidden(device_class, answer.reply.result)
        if answers is not None:
            answers.append(answer)
        return refusal or contradicted(device_class, () if answers is not None else (answer,)) or answer.reply.result

    async def refuse_forbidden(self, device_class: str, prepared: Prepared) -> Refusal | None:
        """Look at an answer of `prepare`, whoever gave it: this is the last place before kubelet and a container runtime do it. None is all allowed."""
        rights = self._rights(device_class)
        paths = host_paths(prepared)
        leads_to: dict[str, str] = {}
        if paths:
            leads_to, rights = await asyncio.to_thread(lambda: (real_paths(paths), with_real_folders(rights)))
        refusal = refuse_forbidden(device_class, prepared, rights, leads_to)
        if refusal is not None:
            get_logger().error(
                "edits.forbidden",
                device_class=device_class,
                reasons=[reason.message for reason in refusal.reasons],
                next_step=f"if the driver needs this, allow it: TOPOBUS_GATEWAY__EDITS (class {device_class}); if not, find out who answered",
            )
        return refusal

    async def unprepare(self, op_id: str, owner: Owner, device_class: str, names: Sequence[str]) -> Refusal | None:
        """Undo prepare; None is done."""
        request = UnprepareRequest(op_id=op_id, owner=owner, devices=tuple(sorted(names)))
        reply = await self._bus.ask(UNPREPARE, request, timeout_s=self._deadlines.prepare_s, node=self._node, device_class=device_class)
        return reply.refusal


def contradicted(device_class: str, answers: Iterable[Held[PrepareReply]]) -> Refusal | None:
    """Refuse what two have answered differently: nobody can tell which of them is the device service. None: each was answered in one way."""
    if not any(answer.has_rival for answer in answers):
        return None
    text = (
        f"two answers came from {device_class} services of this node, and they differ: another service runs, or somebody answers in its place;"
        " keys for answers tell them apart (docs/how-to/secure-nats.md)"
    )
    return Refusal(reasons=(Reason(code="answers-differ", message=text, facts={"device_class": device_class}),))
