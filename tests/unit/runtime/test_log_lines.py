"""Log lines: one JSON object each on standard error, with the process's context, whoever writes them."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap


def _run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, timeout=60)


def test_logs_are_json_with_context_when_they_do_not_go_to_a_terminal() -> None:
    """Our lines and a library's have the same shape; standard output stays free for what a command prints."""
    done = _run(
        """
        import logging
        from topobus.runtime.config import LogSettings
        from topobus.runtime.logging import get_logger, setup_logging
        setup_logging(LogSettings(), service="gpu", node="n1")
        get_logger().info("device.found", device="gpu-0")
        get_logger().debug("not.shown")
        logging.getLogger("nats").warning("from a library")
        try:
            raise KeyError("x")
        except KeyError:
            get_logger().exception("ask.failed")
        """
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]

    assert done.stdout == ""
    assert [(line["event"], line["level"]) for line in lines] == [
        ("device.found", "info"),
        ("from a library", "warning"),
        ("ask.failed", "error"),
    ]
    assert all((line["service"], line["node"]) == ("gpu", "n1") and line["ts"].endswith("Z") for line in lines)
    assert lines[0]["device"] == "gpu-0"
    assert lines[2]["exception"][0]["exc_type"] == "KeyError"


def test_logs_stay_off_standard_output_when_nobody_configured_them() -> None:
    """A program that uses the runtime as a library (the CLI) finds warnings on standard error and nothing on standard output."""
    done = _run(
        """
        from topobus.runtime.logging import get_logger
        get_logger().info("not.shown")
        get_logger().warning("bus.lost", url="x")
        """
    )

    assert done.stdout == ""
    assert "bus.lost" in done.stderr
    assert "not.shown" not in done.stderr


def test_logger_leaves_local_variables_out_when_an_exception_is_logged() -> None:
    """A traceback names its frames and not what stood in them: a password must not reach the log, and the line stays short."""
    done = _run(
        """
        from topobus.runtime.config import LogSettings
        from topobus.runtime.logging import get_logger, setup_logging
        setup_logging(LogSettings(format="json"), service="gpu", node="n1")
        password = "-".join(("correct", "horse"))
        try:
            raise ValueError(len(password))
        except ValueError:
            get_logger().exception("service.crashed")
        """
    )

    assert "ValueError" in done.stderr
    assert "correct-horse" not in done.stderr
