"""Exit codes of `topobus` for scripts, and the errors that carry one.

Numbers from 64 up are those of sysexits.h. docs/reference/cli.md lists them.
"""

from __future__ import annotations

from enum import IntEnum

from topobus.values.errors import ConfigError, ContractError, HardwareError, PeerUnavailable, TopobusError

__all__ = ["ExitCode", "InputError", "NotFoundError", "UsageError", "code_of"]


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    """Done, or the answer is yes."""
    NO = 1
    """The answer is no: refused, not found, a check failed."""
    USAGE = 2
    """The command line cannot be used."""
    DATA = 65
    """A file or a message has a content that no contract accepts."""
    NO_INPUT = 66
    """A file is missing or unreadable."""
    UNAVAILABLE = 69
    """NATS or a service is not there, or did not answer in time."""
    INTERNAL = 70
    """A defect of Topobus."""
    HARDWARE = 74
    """The hardware tree is unreadable or contradictory."""
    CONFIG = 78
    """A setting cannot be used."""
    INTERRUPTED = 130
    """Stopped by Ctrl-C or SIGTERM before it was done."""


class UsageError(TopobusError):
    """Raised for an argument that can never work, whatever the system holds."""


class InputError(TopobusError):
    """Raised for a file that is missing or cannot be read."""


class NotFoundError(TopobusError):
    """Raised when a named thing does not exist. The answer is no."""


# The first match decides, so subclasses precede their parents.
_CODES: tuple[tuple[type[TopobusError], ExitCode], ...] = (
    (UsageError, ExitCode.USAGE),
    (InputError, ExitCode.NO_INPUT),
    (NotFoundError, ExitCode.NO),
    (ContractError, ExitCode.DATA),
    (PeerUnavailable, ExitCode.UNAVAILABLE),
    (HardwareError, ExitCode.HARDWARE),
    (ConfigError, ExitCode.CONFIG),
)


def code_of(error: TopobusError) -> ExitCode:
    """Return the exit code of an error. One without a code of its own is our defect.

    >>> code_of(PeerUnavailable("no NATS")).value
    69
    """
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.INTERNAL)
