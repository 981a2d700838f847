"""The few errors of Topobus. Each class names who must act.

An answer that a caller expects is a value (see `outcome`), never one of these. Facts are
attributes. The message contains what, where, got, wanted.
"""

__all__ = [
    "ConfigError",
    "ContractError",
    "HardwareError",
    "InvariantError",
    "PeerUnavailable",
    "TopobusError",
    "UnderWay",
]


class TopobusError(Exception):
    """Root of all errors that Topobus raises on purpose.

    Args:
        message: what went wrong, where, what was found and what was wanted.
        next_step: one sentence for the person who reads it. Empty when there is nothing to do.
        facts: the numbers and names behind the message, for logs.
    """

    def __init__(self, message: str, *, next_step: str = "", **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step
        self.facts = facts

    def __str__(self) -> str:
        return f"{self.message} ({self.next_step})" if self.next_step else self.message


class ConfigError(TopobusError):
    """Raised when an operator's setting cannot be used. The process exits with 78 (EX_CONFIG)."""


class ContractError(TopobusError):
    """Raised for bytes that no contract accepts.

    The message is terminated, a sample kept, the event counted.
    """


class HardwareError(TopobusError):
    """Raised when the hardware's report is unreadable or contradictory, or when a driver fails."""


class PeerUnavailable(TopobusError):
    """Raised when a peer did not answer in time or is not there.

    The caller may try again after `retry_after_s`.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0, next_step: str = "", **facts: object) -> None:
        super().__init__(message, next_step=next_step, **facts)
        self.retry_after_s = retry_after_s


class UnderWay(PeerUnavailable):
    """Raised when a peer still does what was asked; the same request gets its result later."""


class InvariantError(TopobusError):
    """Raised when Topobus broke an invariant of its own. The process crashes instead of
    continuing.
    """
