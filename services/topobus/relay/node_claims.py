"""Keeps the stand-alone claims that are allocated on this node, as the controller says them, and notes for the hub which ones there are.

Flows in: the controller's requests, which come over the link, and the node's own bucket, read as it is. Flows out: that bucket, of which this process is the only writer,
and the note (`HELD_CLAIMS`), which crosses as every other state does. Nothing is read at the hub: a node that is cut off has what it had. What the controller wants is
its own to compare with the note. Source: docs/adr/0030 (addendum), 0040.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from topobus.contracts.catalogue import CLAIMS, HELD_CLAIMS, LEDGER, NODE_CLAIM
from topobus.contracts.node_claim_messages import ClaimsReply, ClaimsRequest, HeldClaims, NodeClaim, place_of
from topobus.domain.errors import ContractError, PeerUnavailable
from topobus.relay.core.node_claims import HeldClaim, objection_to, prepared_claims, steps_of
from topobus.relay.hub_link import HubLink
from topobus.relay.metrics import CLAIMS_WRITTEN
from topobus.runtime.backoff import full_jitter
from topobus.runtime.bus import Change, ChangeKind, Conflict
from topobus.runtime.failures import AmbiguousWrite
from topobus.runtime.logging import get_logger
from topobus.runtime.service import Runtime

__all__ = ["NodeClaims"]

# Characters of a reason: the controller logs it.
_MAX_WHY = 500


class NodeClaims:
    """The claims of one node."""

    def __init__(self, runtime: Runtime, link: HubLink) -> None:
        self._runtime = runtime
        self._link = link
        self._bus = runtime.bus
        self._node = runtime.node
        self._held: dict[str, HeldClaim] = {}
        self._deleted: dict[str, int] = {}
        """By place: the revision that was deleted here, until the watch has told of it."""
        self._noted: HeldClaims | None = None
        self._noted_revision = 0
        self._is_whole = False
        self._changed = asyncio.Event()
        link.on_join = self._changed.set
        self._turn = asyncio.Lock()
        self._written = CLAIMS_WRITTEN.register(runtime.registry)

    async def run(self) -> None:
        """Follow the bucket, answer the controller, and keep the note; for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._note_claims(), name="note-claims")
            is_answering = False
            tasks.create_task(self._guard_note(), name="guard-note")
            async with aclosing(self._bus.watch_to_write(NODE_CLAIM, node=self._node)) as changes:
                async for change in changes:
                    self._take(change)
                    if self._is_whole and not is_answering:
                        # Not before: what the bucket has decides what a request changes.
                        is_answering = True
                        await self._bus.answer(CLAIMS, self._answer, node=self._node)

    def _take(self, change: Change[NodeClaim]) -> None:
        if change.kind is ChangeKind.RESET:
            self._is_whole = False
            self._held.clear()
            self._deleted.clear()
            self._noted, self._noted_revision = None, 0
            return
        if change.kind is ChangeKind.SNAPSHOT_END:
            self._is_whole = True
        else:
            place = place_of(change.parts["namespace"], change.parts["name"])
            present = self._held.get(place)
            if change.revision <= max(present.revision if present is not None else 0, self._deleted.get(place, 0)):
                # What was done here is newer.
                return
            self._deleted.pop(place, None)
            if change.kind is ChangeKind.UNREADABLE:
                # As if there were none, but it is written over at its revision: the controller says it again, since the note does not name it.
                self._held[place] = HeldClaim(revision=change.revision, uid=present.uid if present is not None else "", version="")
            elif change.kind is ChangeKind.PUT and change.value is not None:
                self._held[place] = HeldClaim(revision=change.revision, uid=change.value.uid, version=change.value.version)
            else:
                self._held.pop(place, None)
        self._changed.set()

    async def _answer(self, request: ClaimsRequest) -> ClaimsReply:
        """Do what a request says, and tell what there is then.

        Errors: raises PeerUnavailable while it is not known what there is, and when the node's server takes nothing: what was written until then stays, and the next
        request goes on from there.
        """
        async with self._turn:
            if not self._is_whole:
                raise PeerUnavailable("the relay is reading its node's claims anew", retry_after_s=1.0)
            prepared = frozenset[str]()
            if request.drops:
                ledger = await self._bus.get(LEDGER, node=self._node)
                prepared = prepared_claims(ledger.value if ledger is not None else None)
            steps = steps_of(request, self._held, prepared)
            refused: dict[str, str] = {}
            for claim in steps.puts:
                why = objection_to(claim, self._node) or await self._put(claim)
                if why:
                    refused[place_of(claim.namespace, claim.name)] = why[:_MAX_WHY]
            for namespace, name in steps.drops:
                await self._drop(namespace, name)
            if steps.puts or steps.drops or steps.kept:
                written = len(steps.puts) - len(refused)
                get_logger().info("claims.taken", written=written, deleted=len(steps.drops), kept=len(steps.kept), refused=len(refused))
            return ClaimsReply(versions=self._versions(), kept=steps.kept, refused=refused)

    async def _put(self, claim: NodeClaim) -> str:
        """Write a claim; gives why it cannot be stored, empty when it is."""
        place = place_of(claim.namespace, claim.name)
        present = self._held.get(place)
        revision = present.revision if present is not None else 0
        try:
            written = await self._bus.compare_and_set(
                NODE_CLAIM, claim, revision, node=self._node, namespace=claim.namespace, name=claim.name
            )
        except ContractError as err:
            return err.message
        if isinstance(written, Conflict):
            raise AmbiguousWrite(f"claim {place}: the node's bucket has another value than the relay knows; the watch brings it")
        self._held[place] = HeldClaim(revision=written.revision, uid=claim.uid, version=claim.version)
        self._written.labels("written").inc()
        self._changed.set()
        return ""

    async def _drop(self, namespace: str, name: str) -> None:
        place = place_of(namespace, name)
        parts = {"node": self._node, "namespace": namespace, "name": name}
        if await self._bus.compare_and_delete(NODE_CLAIM, self._held[place].revision, **parts) is not None:
            raise AmbiguousWrite(f"claim {place}: the node's bucket has another value than the relay knows; the watch brings it")
        self._deleted[place] = self._held.pop(place).revision
        self._written.labels("deleted").inc()
        self._changed.set()

    def _versions(self) -> dict[str, str]:
        return {place: held.version for place, held in sorted(self._held.items()) if held.version}

    async def _guard_note(self) -> None:
        """See that the note stands there as it was written: what somebody else writes there is written over."""
        async with aclosing(self._bus.watch_to_write(HELD_CLAIMS, node=self._node)) as changes:
            async for change in changes:
                is_other = change.kind is ChangeKind.UNREADABLE or change.kind is ChangeKind.DELETE
                if change.revision > self._noted_revision and (is_other or (change.kind is ChangeKind.PUT and change.value != self._noted)):
                    self._noted = None
                    self._changed.set()

    async def _note_claims(self) -> None:
        """Write the note whenever there is something else than it says, and again after a cut and after the node's store was lost."""
        attempt = 0
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not self._is_whole:
                continue
            note = HeldClaims(node=self._node, versions=self._versions(), joined_at=self._link.joined_at)
            if note == self._noted:
                continue
            try:
                self._noted_revision = await self._bus.put(HELD_CLAIMS, note, node=self._node)
            except (PeerUnavailable, ContractError) as err:
                get_logger().warning("claims.note-unwritten", error=str(err))
                await self._runtime.clock.sleep(full_jitter(attempt, least_s=0.5))
                attempt += 1
                self._changed.set()
            else:
                attempt = 0
                self._noted = note
