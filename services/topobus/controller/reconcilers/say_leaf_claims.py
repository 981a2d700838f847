"""Says to each node with a server of its own which stand-alone claims are allocated on it, wherever the node's note says that it has others.

Flows in: the stored claims, the ledgers' copies, and the notes of the nodes' relays (`HELD_CLAIMS`). Flows out: asks to relays (`CLAIMS`), beside the reconcile rounds: one at
a time for a node, so many nodes at a time, and later and later where nobody answers or nothing changes by it. A node without a note has no server of its own, or a relay
of an older release, and is not asked. A claim counts as allocated for its users before its node has it. Source: docs/adr/0030 (addendum), 0040.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import NamedTuple

from topobus.contracts.catalogue import CLAIMS, HELD_CLAIMS
from topobus.contracts.codec import encode
from topobus.contracts.messages import ApiObject
from topobus.contracts.node_claim_messages import (
    ClaimDrop,
    ClaimPut,
    ClaimsReply,
    ClaimsRequest,
    HeldClaims,
    NodeClaim,
    place_of,
    version_of,
)
from topobus.controller.claims.leaf_claims import Difference, cut, difference_of, is_there, nodes_of
from topobus.controller.claims.stored import ObjectKey, Stored
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.protocol import ObjectStore
from topobus.domain.errors import ConfigError, ContractError, HardwareError, PeerUnavailable
from topobus.kubernetes.api.classic_handles import as_structured
from topobus.runtime.backoff import full_jitter
from topobus.runtime.bus import Change, ChangeKind
from topobus.runtime.logging import get_logger
from topobus.runtime.quiet import QuietLog
from topobus.runtime.service import Runtime

__all__ = ["LeafClaims"]

# Claims are allocated in bursts, and each replica sees the same difference: by then another one's words may be in the note.
_COLLECT_S = 0.1
# A node that is cut off is asked once in half a minute at most; what comes from it in the meantime has it asked at once.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
# Each is read anew at the store before it is asked for.
_MOST_DROPS = 64


class _Entry(NamedTuple):
    stored: Stored
    nodes: frozenset[str]
    version: str
    size_bytes: int


class LeafClaims:
    """What nodes with servers of their own have of the claims, and what they are to have.

    Args: is_whole — whether the copies are whole: before that a claim that is only not known yet would be taken away.
    """

    def __init__(
        self, runtime: Runtime, state: StandaloneState, store: ObjectStore, *, timeout_s: float, parallel: int, is_whole: Callable[[], bool]
    ) -> None:
        self._bus = runtime.bus
        self._clock = runtime.clock
        self._state = state
        self._store = store
        self._timeout_s = timeout_s
        self._is_whole = is_whole
        self._gate = asyncio.Semaphore(parallel)
        self._quiet = QuietLog(runtime.clock)
        self._changed = asyncio.Event()
        self._held: dict[str, Mapping[str, str]] = {}
        """By node: versions by place, as its note or its newest answer says."""
        self._known: dict[ObjectKey, _Entry] = {}
        self._wanted: dict[str, dict[str, ObjectKey]] = {}
        """By node: the claims that are allocated there, by place."""
        self._refused: dict[tuple[str, str], str] = {}
        """By node and place: the version that the node does not take."""
        self._asking: set[str] = set()
        self._due_at: dict[str, float] = {}
        self._attempts: Counter[str] = Counter()

    def wake(self) -> None:
        """Compare again: something changed."""
        self._changed.set()

    async def run(self) -> None:
        """Follow the notes and say what differs; for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(), name="held-claims")
            while True:
                await self._wait()
                if self._held and self._is_whole():
                    self._read_claims()
                    for node in self._due_nodes():
                        self._asking.add(node)
                        group.create_task(self._ask(node), name=f"claims-{node}")
                    # Each comparison looks at each claim: ten a second, however many changes there are.
                    await self._clock.sleep(_COLLECT_S)

    async def _wait(self) -> None:
        """Wait until something changed, or a node is due that is not being asked."""
        due_at = min((at for node, at in self._due_at.items() if node not in self._asking), default=None)
        try:
            async with self._clock.timeout(max(due_at - self._clock.monotonic(), 0.0) if due_at is not None else None):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    async def _follow(self) -> None:
        async with aclosing(self._bus.watch(HELD_CLAIMS)) as changes:
            async for change in changes:
                self._take(change)
                self._changed.set()

    def _take(self, change: Change[HeldClaims]) -> None:
        if change.kind is ChangeKind.RESET:
            self._held.clear()
            self._due_at.clear()
        elif change.kind is not ChangeKind.SNAPSHOT_END:
            node = change.parts["node"]
            # It speaks, so it is there: what was put off is tried at once.
            self._due_at.pop(node, None)
            self._attempts.pop(node, None)
            if change.kind is ChangeKind.PUT and change.value is not None:
                self._held[node] = change.value.versions
            else:
                self._held.pop(node, None)

    def _read_claims(self) -> None:
        """Bring the lists of claims by node in step with the copy. Cost: each claim is looked at, and read when it is another one than before."""
        claims = self._state.of_kind("resourceclaim")
        self._known = {key: self._read_claim(key, stored) for key, stored in claims.items()}
        self._wanted = {}
        for key, entry in self._known.items():
            for node in entry.nodes & self._held.keys():
                self._wanted.setdefault(node, {})[place_of(key.namespace, key.name)] = key
        if self._refused:
            self._refused = {at: version for at, version in self._refused.items() if at[1] in self._wanted.get(at[0], {})}

    def _read_claim(self, key: ObjectKey, stored: Stored) -> _Entry:
        entry = self._known.get(key)
        if entry is not None and entry.stored is stored and (entry.version or not entry.nodes & self._held.keys()):
            return entry
        nodes = _nodes_of(stored.value)
        if not nodes & self._held.keys():
            return _Entry(stored, nodes, "", 0)
        return _Entry(stored, nodes, version_of(stored.value, stored.revision), len(encode(stored.value)))

    def _due_nodes(self) -> list[str]:
        """Name the nodes to ask now; those that differ and are not due are asked later."""
        now = self._clock.monotonic()
        due: list[str] = []
        for node in sorted(self._held.keys() - self._asking):
            if not self._difference(node):
                self._due_at.pop(node, None)
                self._attempts.pop(node, None)
            elif now >= self._due_at.setdefault(node, now + full_jitter(0, least_s=_COLLECT_S)):
                due.append(node)
        return due

    def _difference(self, node: str) -> Difference:
        held = self._held.get(node, {})
        wanted: dict[str, str] = {}
        for place, key in self._wanted.get(node, {}).items():
            version = self._known[key].version
            if self._refused.get((node, place)) != version:
                wanted[place] = version
            elif place in held:
                wanted[place] = held[place]
        ledger = self._state.ledgers.get(node)
        prepared = [key for key, allocation in ledger.allocations.items() if allocation.is_prepared] if ledger is not None else []
        staying = [place for place in held.keys() - wanted.keys() if is_there(prepared, *_split(place))] if prepared else []
        return difference_of(wanted, held, staying)

    async def _ask(self, node: str) -> None:
        """Say to one node what differs now, as much as one request carries."""
        try:
            async with self._gate:
                difference = self._difference(node)
                request = await self._request(node, difference)
                if request.puts or request.drops:
                    reply = await self._bus.ask(CLAIMS, request, timeout_s=self._timeout_s, node=node)
                    self._take_reply(node, request, reply)
                if self._difference(node) == difference:
                    self._put_off(node)
                else:
                    self._attempts.pop(node, None)
                    self._due_at[node] = self._clock.monotonic()
        except (PeerUnavailable, ContractError, HardwareError, ConfigError) as err:
            self._put_off(node)
            self._quiet.info(
                "claims.unsaid", node, node=node, error=str(err), next_step="nothing to do: it is said again until the node has it"
            )
        finally:
            self._asking.discard(node)
            self._changed.set()

    def _put_off(self, node: str) -> None:
        pause_s = full_jitter(self._attempts[node], least_s=_FIRST_PAUSE_S, most_s=_LONGEST_PAUSE_S)
        self._attempts[node] += 1
        self._due_at[node] = self._clock.monotonic() + pause_s

    async def _request(self, node: str, difference: Difference) -> ClaimsRequest:
        replaced = dict(difference.puts)
        keys = {place: self._wanted[node][place] for place in replaced}
        puts = []
        for place in cut({place: self._known[key].size_bytes for place, key in keys.items()}, tuple(replaced)):
            key, entry = keys[place], self._known[keys[place]]
            claim = NodeClaim(
                node=node, namespace=key.namespace, name=key.name, uid=entry.stored.uid, version=entry.version, claim=entry.stored.value
            )
            puts.append(ClaimPut(claim=claim, replaces=replaced[place]))
        drops = []
        for place, version in difference.drops[:_MOST_DROPS]:
            namespace, name = _split(place)
            # The copy may be behind another replica's allocation: a claim goes when the store itself does not have it there.
            stored = await self._store.get(ObjectKey("resourceclaim", namespace, name))
            if stored is None or node not in _nodes_of(stored.value):
                drops.append(ClaimDrop(namespace=namespace, name=name, version=version))
        return ClaimsRequest(puts=tuple(puts), drops=tuple(drops))

    def _take_reply(self, node: str, request: ClaimsRequest, reply: ClaimsReply) -> None:
        if node in self._held:
            self._held[node] = reply.versions
        for put in request.puts:
            place = place_of(put.claim.namespace, put.claim.name)
            self._refused.pop((node, place), None)
            if place in reply.refused:
                self._refused[node, place] = put.claim.version
                get_logger().error("claim.refused-by-node", node=node, claim=place, error=reply.refused[place])
        get_logger().info("claims.said", node=node, written=len(request.puts), deleted=len(request.drops), kept=len(reply.kept))


def _nodes_of(claim: ApiObject) -> frozenset[str]:
    """Name the nodes on which a claim is allocated; a claim that nobody can read is on none."""
    if not claim.status.get("allocation"):
        return frozenset()
    try:
        return nodes_of(as_structured(claim))
    except ContractError:
        return frozenset()


def _split(place: str) -> tuple[str, str]:
    namespace, _, name = place.partition("/")
    return namespace, name
