"""Log lines: one JSON object each on standard error, with the process's context, whoever writes
them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap


def _run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, timeout=60
    )


def test_logs_are_json_with_context_when_they_do_not_go_to_a_terminal() -> None:
    """Our lines and a library's have the same shape.

    Standard output stays free for what a command prints.
    """
    done = _run(
        """
        import logging
        from topobus.process.config import LogSettings
        from topobus.process.logging import get_logger, setup_logging
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


def test_line_is_cut_when_its_facts_are_a_callers_own_texts() -> None:
    """A name, a list, a mapping or an error's text of hundreds of kilobytes: each line stays below
    16 KiB or so, says how much there was, and keeps its head.
    """
    done = _run(
        """
        from topobus.process.config import LogSettings
        from topobus.process.logging import get_logger, setup_logging
        setup_logging(LogSettings(format="json"), service="gateway", node="n1")
        long = "x" * 200_000
        get_logger().warning("claim.prepare-failed", claim=long, error=long)
        get_logger().warning("many", ids=[long] * 1000, by_id={f"{number}{long}": long for number in range(100)}, number=1 << 100_000)
        get_logger().warning("odd", thing=type("T", (), {"__repr__": lambda self: long})(), names={"b"}, pair=(1, None, 2.5, True))
        get_logger().warning("short", claim="default/c", devices=["gpu-0", "gpu-1"], count=3)
        try:
            raise ValueError(long)
        except ValueError:
            get_logger().exception("ask.failed", noun="prepare")
        """  # noqa: E501
    )
    lines = done.stderr.splitlines()
    said = [json.loads(line) for line in lines]

    assert max(map(len, lines)) < 18_000
    assert [line["event"] for line in said] == ["claim.prepare-failed", "many", "odd", "short", "ask.failed"]
    assert all((line["service"], line["node"]) == ("gateway", "n1") for line in said)
    assert said[0]["claim"] == said[0]["error"] == "x" * 2000 + "... (200000 letters)"
    assert said[1]["ids"][-1] == "... 992 more"
    assert said[2]["pair"] == [1, None, 2.5, True]
    assert (said[3]["claim"], said[3]["devices"], said[3]["count"]) == ("default/c", ["gpu-0", "gpu-1"], 3)
    assert said[4]["exception"][0]["exc_value"].endswith("(200000 letters)")


def test_logger_loads_what_makes_lines_when_the_first_one_is_written() -> None:
    """A command that logs nothing does not pay for structlog.

    Whichever task writes the first line, all lines carry the process's context.
    """
    done = _run(
        """
        import asyncio, sys
        from topobus.process.config import LogSettings
        from topobus.process.logging import get_logger, setup_logging
        setup_logging(LogSettings(level="warning"), service="cli", node="n1")
        logger = get_logger()
        logger.info("bus.connected", url="x")
        logger.debug("not.shown")
        print("structlog" in sys.modules)
        async def write():
            logger.warning("in.task")
        asyncio.run(write())
        logger.warning("outside")
        get_logger().info("not.shown")
        """
    )

    assert done.stdout == "False\n"
    assert [(line["event"], line["service"], line["node"]) for line in map(json.loads, done.stderr.splitlines())] == [
        ("in.task", "cli", "n1"),
        ("outside", "cli", "n1"),
    ]


def test_logs_stay_off_standard_output_when_nobody_configured_them() -> None:
    """A program that uses the runtime as a library (the CLI) finds warnings on standard error and
    nothing on standard output.
    """
    done = _run(
        """
        from topobus.process.logging import get_logger
        get_logger().info("not.shown")
        get_logger().warning("bus.lost", url="x")
        """
    )

    assert done.stdout == ""
    assert "bus.lost" in done.stderr
    assert "not.shown" not in done.stderr


def test_logger_leaves_local_variables_out_when_an_exception_is_logged() -> None:
    """A traceback names its frames and not what stood in them: a password must not reach the log,
    and the line stays short.
    """
    done = _run(
        """
        from topobus.process.config import LogSettings
        from topobus.process.logging import get_logger, setup_logging
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


def test_traceback_for_people_has_no_local_variables_when_structlog_was_imported_before_us() -> None:
    """Whoever imports structlog first brings rich along, whose tracebacks show every frame's
    variables, and take seconds in a large service.
    """
    done = _run(
        """
        import structlog
        from topobus.process.logging import get_logger, setup_logging
        from topobus.process.config import LogSettings
        def fail(password):
            raise KeyError("x")
        for configure in (lambda: None, lambda: setup_logging(LogSettings(format="console"))):
            configure()
            try:
                fail("hunter2")
            except KeyError:
                get_logger().exception("ask.failed")
        """
    )

    assert done.stderr.count("KeyError: 'x'") == 2
    assert "hunter2" not in done.stderr.replace('fail("hunter2")', "")
