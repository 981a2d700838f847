"""Keeps the hub's copies of this node's states equal to what the node's own server has, one key
after the other. Each write names the sequence that it replaces.

The values of the node's server arrive by `keep`, `reset` and `note_whole`. A failure is raised to
the caller, which tries again. After a write without an answer, the state of its key at the hub
counts as unknown.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from topobus.bus.failures import AmbiguousWrite
from topobus.bus.streams.uplink import Acknowledged, HubEntry, HubRefused, Uplink
from topobus.formats.messages.catalogue import RELAY
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.nouns import State
from topobus.formats.messages.relay_messages import NodeRelay
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.relay.hub_link import HubLink
from topobus.relay.rules.copies import Copy, Step, digest_of, next_step
from topobus.relay.rules.positions import with_key, without_key
from topobus.values.errors import ContractError

__all__ = ["HubCopies", "Key"]


class Key(Struct, frozen=True, order=True):
    """One key of one state."""

    noun: str
    key: str

    def __str__(self) -> str:
        return f"{self.noun}/{self.key}"


class HubCopies:
    """The hub's copies of one node's states."""

    def __init__(
        self, states: tuple[State[Any], ...], link: HubLink, uplink: Uplink, runtime: Runtime, *, forget_after_s: float
    ) -> None:
        self._states = {state.name: state for state in states}
        self._link = link
        self._uplink = uplink
        self._runtime = runtime
        self._forget_after_s = forget_after_s
        self._kept: dict[Key, bytes | None] = {}
        self._written_by: dict[Key, str] = {}
        self._whole_since: dict[str, float] = {}
        """By state: the time since which the complete contents of the node's server are known."""
        self._copies: dict[Key, Copy] = {}
        self._refused: dict[Key, str] = {}
        """Digests of the values that the hub refuses. They are sent again when they change, or
        after the connection was lost."""
        self._newest: Key | None = None
        """The key that the hub acknowledged last."""
        self._rotation = 0
        self._note_key = Key(RELAY.name, RELAY.key(node=runtime.node))
        self._node = runtime.node

    # The node's server.

    def keep(self, state: State[Any], key: str, data: bytes | None, written_by: str) -> None:
        """Record a value of the node's server, and the release that wrote it.

        None: it was deleted there.
        """
        self._kept[Key(state.name, key)] = data
        self._written_by[Key(state.name, key)] = written_by
        self._link.wake.set()

    def reset(self, state: State[Any]) -> None:
        """Forget all values of a state, because the node's store is another one."""
        self._whole_since.pop(state.name, None)
        self._kept = {key: data for key, data in self._kept.items() if key.noun != state.name}
        self._written_by = {key: release for key, release in self._written_by.items() if key.noun != state.name}

    def note_whole(self, state: State[Any]) -> None:
        """Record that all present values of a state have been received."""
        self._whole_since[state.name] = self._runtime.clock.monotonic()
        self._link.wake.set()

    @property
    def waiting(self) -> int:
        """How many keys the hub is known to lack."""
        return sum(1 for key in self._wanted() if self._is_open(key))

    @property
    def is_note_written(self) -> bool:
        """Return whether the hub has the present note."""
        copy = self._copies.get(self._note_key)
        return copy is not None and copy.digest == self._digest(self._note_key, encode(self._link.note))

    # The hub.

    async def read_note(self) -> bool:
        """Compare the note with the hub's copy of it, and adopt that copy.

        True when the hub has another note than it acknowledged last.
        """
        copy = self._copies.get(self._note_key)
        if copy is not None and await self._uplink.sequence_at_hub(RELAY, node=self._node) == copy.sequence:
            return False
        entry = await self._uplink.value_at_hub(RELAY, node=self._node)
        self._copies[self._note_key] = Copy(sequence=entry.sequence, digest=_digest_of_entry(entry), is_certain=False)
        if entry.is_there and entry.data == encode(self._link.note):
            return False
        note = NodeRelay(node=self._node)
        if entry.is_there:
            try:
                note = decode(entry.data, NodeRelay, where=str(self._note_key))
                RELAY.check_place(note, {"node": self._node})
            except ContractError as err:
                get_logger().warning(
                    "note.misread", error=str(err), effect="all events that are stored here are sent again"
                )
                note = NodeRelay(node=self._node)
        # Keys that are known here and missing in an older note: the hub may still have them.
        for key in (
            *self._link.note.keys,
            *(str(key) for key in self._kept if key != self._note_key and self._is_listed(key)),
        ):
            note = with_key(note, key)
        self._link.note = note
        return True

    def doubt(self) -> None:
        """Mark all copies as uncertain until their sequences are read: the connection was lost."""
        self._copies = {
            key: Copy(sequence=copy.sequence, digest=copy.digest, is_certain=False)
            for key, copy in self._copies.items()
        }
        self._refused.clear()

    async def settle(self) -> None:
        """Write all that the hub does not have."""
        for key in self._wanted():
            await self._settle_key(key)

    async def write_note(self) -> None:
        """Write the note if the hub has another one.

        Errors: raises AmbiguousWrite when the hub's note is not the one that it acknowledged.
        """
        while True:
            data = encode(self._link.note)
            copy = self._copies.get(self._note_key)
            if copy is None:
                raise AmbiguousWrite("what the hub has noted of this node is not known")
            if copy.digest == self._digest(self._note_key, data):
                return
            await self._write(self._note_key, data, copy.sequence)

    async def look(self) -> bool:
        """Compare the sequences of two keys: the one acknowledged last, and the next in rotation.

        False when the hub has another sequence than it acknowledged.
        """
        turn = sorted(self._copies)
        self._rotation += 1
        for key in (
            dict.fromkeys((self._newest or self._note_key, *turn[self._rotation % len(turn) :][:1])) if turn else ()
        ):
            copy = self._copies.get(key)
            state, parts = self._place(key)
            if copy is not None and await self._uplink.sequence_at_hub(state, **parts) != copy.sequence:
                return False
        return True

    # A single key.

    def _release_of(self, key: Key) -> str:
        """Name the release that wrote a value. The note is written by this relay."""
        return self._runtime.bus.release if key == self._note_key else self._written_by.get(key, "")

    def _digest(self, key: Key, data: bytes | None) -> str:
        return digest_of(data, self._release_of(key))

    def _wanted(self) -> list[Key]:
        """Return the keys to check: the node's present and deleted ones, and others of the hub."""
        listed = [Key(*text.split("/", 1)) for text in self._link.note.keys]
        return sorted({*self._kept, *(key for key in listed if self._is_wanted(key))})

    def _is_wanted(self, key: Key) -> bool:
        """Return whether it is known what the hub should have for a key. When the node's store is
        lost during a request, neither a value nor a deletion is known.
        """
        return key in self._kept or (str(key) in self._link.note.keys and self._is_forgotten(key))

    def _is_forgotten(self, key: Key) -> bool:
        """Return whether a key has been absent from the node for so long that it is deleted."""
        since = self._whole_since.get(key.noun)
        return (
            key.noun in self._states
            and since is not None
            and self._runtime.clock.monotonic() - since >= self._forget_after_s
        )

    def _is_open(self, key: Key) -> bool:
        digest = self._digest(key, self._kept.get(key))
        return self._refused.get(key) != digest and next_step(digest, self._copies.get(key)) is not Step.NOTHING

    def _is_listed(self, key: Key) -> bool:
        """Return whether a node may have several keys of this kind, which the note must list."""
        return len(self._states[key.noun].parts) > 1

    def _place(self, key: Key) -> tuple[State[Any], dict[str, str]]:
        state = RELAY if key.noun == RELAY.name else self._states[key.noun]
        return state, state.parse_key(key.key)

    async def _settle_key(self, key: Key) -> None:
        state, parts = self._place(key)
        while self._is_wanted(key) and self._is_open(key):
            data = self._kept.get(key)
            digest = self._digest(key, data)
            copy = self._copies.get(key)
            step = next_step(digest, copy)
            if step is Step.READ or copy is None:
                entry = await self._uplink.value_at_hub(state, **parts)
                self._copies[key] = Copy(sequence=entry.sequence, digest=_digest_of_entry(entry), is_certain=False)
            elif step is Step.COMPARE:
                if await self._uplink.sequence_at_hub(state, **parts) == copy.sequence:
                    self._copies[key] = Copy(sequence=copy.sequence, digest=copy.digest, is_certain=True)
                    self._link.said.labels(state.name, "compared").inc()
                else:
                    del self._copies[key]
            else:
                try:
                    if self._is_listed(key) and data is not None and str(key) not in self._link.note.keys:
                        self._link.change_note(lambda note: with_key(note, str(key)))
                        await self.write_note()
                    await self._write(key, data, copy.sequence)
                except HubRefused as err:
                    self._refused[key] = digest
                    self._link.said.labels(state.name, "refused").inc()
                    get_logger().error("state.refused", key=str(key), error=err.message, next_step=err.next_step)
        if (
            self._is_wanted(key)
            and self._is_listed(key)
            and self._kept.get(key) is None
            and str(key) in self._link.note.keys
        ):
            self._link.change_note(lambda note: without_key(note, str(key)))

    async def _write(self, key: Key, data: bytes | None, expected: int) -> None:
        state, parts = self._place(key)
        # Until the write is answered, the hub's copy is unknown.
        self._copies.pop(key, None)
        try:
            outcome = await self._uplink.write(state, data, expected, written_by=self._release_of(key), **parts)
        except HubRefused:
            self._copies[key] = Copy(sequence=expected, digest="refused", is_certain=False)
            raise
        if isinstance(outcome, Acknowledged):
            self._copies[key] = Copy(sequence=outcome.sequence, digest=self._digest(key, data), is_certain=True)
            self._newest = key
            self._link.said.labels(state.name, "written").inc()
            return
        self._link.said.labels(state.name, "overtaken").inc()
        if key == self._note_key:
            # An earlier write of ours arrived after all, or the hub is another one.
            raise AmbiguousWrite("the hub has another note of this node than it acknowledged")


def _digest_of_entry(entry: HubEntry) -> str:
    return digest_of(entry.data if entry.is_there else None, entry.written_by)
