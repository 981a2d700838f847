"""Errors of the bus that the domain does not have."""

from __future__ import annotations

from topobus.values.errors import PeerUnavailable

__all__ = ["AmbiguousWrite", "ConnectionLost", "JetStreamError", "NobodyThere", "StoreFull"]


class AmbiguousWrite(PeerUnavailable):
    """Raised when a write was sent and not confirmed: it is neither done nor undone, and may still
    happen.

    Read again.
    """


class ConnectionLost(PeerUnavailable):
    """Raised when the connection went away while an answer was awaited: the peer may or may not
    have acted.
    """


class NobodyThere(PeerUnavailable):
    """Raised when the server reports that a subject has no listener: surely nothing was done."""


class StoreFull(PeerUnavailable):
    """Raised when a write was refused because there is no room. Surely nothing was done, and a
    retry fails until room is made.
    """


class JetStreamError(Exception):
    """Raised when JetStream answers with an error of its own. It never leaves the bus as it is.

    Codes: https://github.com/nats-io/nats-server/blob/main/server/errors.json.
    """

    # A compare-and-set lost: wrong last sequence, for any stream and (10164) for a
    # stream with constant sequences.
    CONFLICTS = frozenset({10071, 10164})
    STREAM_NOT_FOUND = 10059
    CONSUMER_NOT_FOUND = 10014
    MESSAGE_NOT_FOUND = 10037
    STREAM_NAME_IN_USE = 10058
    # Another stream has one of its subjects. Or the same stream was made just now: the server
    # checks names before subjects, and unlocks in between.
    SUBJECTS_OVERLAP = 10065
    # The stream has no store: its folder cannot be written, or another process is making the same
    # stream at this moment, as with names and subjects above.
    NO_STORE = 10049
    # All streams together may take more than the server has.
    NO_ROOM_FOR_STREAM = 10047
    TOO_MANY_CONSUMERS = 10026
    # The store as a whole is full (503, and yet it does not pass by itself), or (10077) this
    # stream's own bound is reached.
    _STORE_FULL = 10023
    _NOT_STORED = 10077
    # No leader yet; too few servers for the copies, as in the first seconds of a cluster
    # whose members have not all met.
    _WAITING = frozenset({10163, 10005})

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} (JetStream {err_code})")
        self.code = code
        self.err_code = err_code
        self.description = description

    @property
    def is_temporary(self) -> bool:
        """Return whether the same request may work soon: JetStream is starting (503), or waits for
        others of its cluster.
        """
        return (self.code == 503 and not self.is_full) or self.err_code in self._WAITING

    @property
    def lacks_consumers(self) -> bool:
        """Return whether the stream has as many consumers as it may have."""
        return self.err_code == self.TOO_MANY_CONSUMERS

    @property
    def is_full(self) -> bool:
        """Say whether there is no room: in the whole store, or in this stream."""
        return self.err_code == self._STORE_FULL or (
            self.err_code == self._NOT_STORED and "maximum" in self.description
        )

    def refusal(self, what: str, stream: str) -> PeerUnavailable:
        """Return the error that a writer raises to its own askers: that there is no room, where,
        and who can make some; or JetStream's text alone.

        Shapes: what — begins the sentence, as `cannot write topobus_ledgers/n1`.
        """
        if not self.is_full:
            return PeerUnavailable(f"{what}: {self}", stream=stream)
        if self.err_code == self._STORE_FULL:
            message, step = (
                f"{what}: the NATS server's store is full ({self})",
                "give it more room: disk, and max_file_store",
            )
        else:
            message, step = (
                f"{what}: stream {stream} is full ({self})",
                f"raise its bound (nats stream edit {stream} --max-bytes …)",
            )
        return StoreFull(message, next_step=f"{step}; `topobus doctor` reports what is full", stream=stream)
