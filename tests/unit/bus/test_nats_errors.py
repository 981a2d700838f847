"""What is said of a NATS server that does not let us in, and what ends the wait for it."""

from __future__ import annotations

import nats.errors
import pytest

from topobus.bus.connection.nats_errors import error_text, next_step


@pytest.mark.parametrize(
    ("err", "text"),
    [
        (TimeoutError(), "no answer in time"),
        (nats.errors.TimeoutError(), "nats: timeout"),
        (ExceptionGroup("several", [TimeoutError()]), "no answer in time"),
        (ConnectionRefusedError(111, "Connect call failed"), "[Errno 111] Connect call failed"),
        (ValueError(), "ValueError"),
    ],
)
def test_error_text_says_what_happened_when_the_error_has_no_text(err: Exception, text: str) -> None:
    """A name that nobody resolves ends in an error without a text, and its class's name tells
    nobody anything.
    """
    assert error_text(err) == text


@pytest.mark.parametrize(
    ("error", "setting"),
    [
        ("no answer in time", "TOPOBUS_ALL__NATS__URL"),
        ("[Errno 111] Connect call failed ('127.0.0.1', 4222)", "TOPOBUS_ALL__NATS__URL"),
        ("[Errno -2] Name or service not known", "TOPOBUS_ALL__NATS__URL"),
        ("nats: 'Authorization Violation'", "nats.password_file"),
        ("nats: 'user authentication expired'", "nats.password_file"),
        ("the certificate of the server at nats:4222 expired on 2026-10-19", "nats.tls_ca_file"),
    ],
)
def test_next_step_names_the_setting_that_ends_the_wait(error: str, setting: str) -> None:
    """Where nobody answers it is the address.

    Who is refused needs another login, and who is not trusted another authority.
    """
    assert setting in next_step(error)
