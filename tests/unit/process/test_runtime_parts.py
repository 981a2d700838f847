"""The small parts of the runtime: readiness, the endpoint, jitter, positions, and what must never
be installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import socket
import struct
import threading
from collections.abc import Sequence

import pytest
from nats.aio.msg import Msg
from prometheus_client import CollectorRegistry, Counter

from support.documented_images import SERVICES
from support.web_pages import page_of
from topobus.bus.feeds.feed import Place
from topobus.process import http
from topobus.process.backoff import full_jitter
from topobus.process.config import HttpSettings
from topobus.process.http import Endpoint
from topobus.process.readiness import Readiness
from topobus.simulation.nats_server import free_port
from topobus.values.errors import ConfigError, ContractError

# What a service is never ready without, besides NATS and its streams; a device service's machine
# and inventory are not listed here.
PARTS = {
    "console": ["page"],
    "controller": ["machines", "inventories", "ledgers"],
    "discovery": ["machine"],
    "gateway": ["inventories"],
    "relay": ["hub"],
    "topology": ["machine", "inventories", "ledger"],
}


def test_readiness_is_false_when_nobody_has_spoken() -> None:
    """A process in which no part vouched for anything is not ready."""
    assert not Readiness().is_ready


def test_readiness_is_false_when_an_awaited_part_has_not_spoken() -> None:
    """NATS is ready some time before a service says for the first time that it is not: in between
    nobody may take it for ready.
    """
    readiness = Readiness(("bus", "machine"))
    readiness.set("bus", is_ready=True)
    early = (readiness.is_ready, readiness.report())
    readiness.set("machine", is_ready=True)

    assert early == (False, {"bus": "ready", "machine": "starting"})
    assert readiness.is_ready


@pytest.mark.parametrize("service", SERVICES)
def test_service_awaits_its_own_parts_from_its_start_on(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each names what it is never ready without before it connects, so that no look at /readyz
    comes too early.
    """
    awaited: list[str] = []

    def started(*_arguments: object, parts: Sequence[str] = (), **_others: object) -> int:
        awaited.extend(parts)
        return 0

    monkeypatch.setattr("topobus.process.service.run", started)
    monkeypatch.setattr("sys.argv", [f"topobus-{service}", *(["--class", "npu"] if service == "device" else [])])
    with pytest.raises(SystemExit):
        importlib.import_module(f"topobus.{service}.main").main()

    assert awaited == PARTS.get(service, ["machine", "inventory"])


def test_readiness_names_the_part_when_one_of_two_is_not_ready() -> None:
    """One part that is not ready makes the process not ready, and the report says which and why."""
    readiness = Readiness()
    readiness.set("bus", is_ready=True)
    readiness.set("machine", is_ready=False, why="waiting for discovery")

    assert not readiness.is_ready
    assert readiness.report() == {"bus": "ready", "machine": "waiting for discovery"}


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(b"GET /healthz HT", id="within-the-request"),
        pytest.param(b"", id="before-it"),
        pytest.param(b"\xff\x00", id="after-garbage"),
    ],
)
def test_endpoint_writes_one_line_when_a_client_hangs_up(
    request_bytes: bytes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A client that resets its connection leaves no traceback, one line at most, and the next
    client is answered.
    """
    lines: list[tuple[str, str]] = []
    has_allocated_condition = threading.Event()

    class Log:
        def debug(self, event: str, **facts: str) -> None:
            lines.append((event, facts["error"]))
            has_allocated_condition.set()

        def error(self, event: str, **facts: str) -> None:
            raise AssertionError(f"{event}: a client that hangs up is no error of ours: {facts}")

    monkeypatch.setattr(http, "get_logger", Log)
    settings = HttpSettings(port=free_port())
    with Endpoint(settings, Readiness(), CollectorRegistry()):
        with socket.create_connection(("127.0.0.1", settings.port)) as client:
            client.sendall(request_bytes)
            # Closed with an RST instead of a FIN, as by a client that is killed.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert has_allocated_condition.wait(timeout=60)
        status, _ = page_of(settings.port, "/healthz")

    assert status == 200
    assert [event for event, _ in lines] == ["http.request-failed"]
    assert "ConnectionResetError" in lines[0][1]
    assert "Traceback" not in "".join(capfd.readouterr())


def test_endpoint_answers_probes_and_metrics_when_it_runs() -> None:
    """Alive at once, ready only when ready, metrics as Prometheus reads them, and a hint for any
    other path.
    """
    registry = CollectorRegistry()
    Counter("topobus_test_things_total", "Things", registry=registry).inc()
    readiness = Readiness()
    settings = HttpSettings(port=free_port())
    with Endpoint(settings, readiness, registry):
        assert page_of(settings.port, "/healthz") == (200, "ok\n")
        assert page_of(settings.port, "/readyz")[0] == 503
        readiness.set("bus", is_ready=True)
        assert page_of(settings.port, "/readyz")[0] == 200
        assert "topobus_test_things_total 1.0" in page_of(settings.port, "/metrics")[1]
        assert page_of(settings.port, "/")[0] == 404


def test_endpoint_is_a_config_error_when_the_port_is_taken() -> None:
    """A port in use is the operator's to mend, and named."""
    settings = HttpSettings(port=free_port())
    with (
        Endpoint(settings, Readiness(), CollectorRegistry()),
        pytest.raises(ConfigError, match=r"http\.port"),
        Endpoint(settings, Readiness(), CollectorRegistry()),
    ):
        pass


def test_jitter_is_spread_and_bounded_when_attempts_grow() -> None:
    """B6: waits differ between clients, grow with the attempts, and never exceed the limit."""
    late = [full_jitter(1000, most_s=5.0) for _ in range(200)]

    assert len(set(late)) > 100
    assert max(late) <= 5.0
    assert min(late) < 2.5 < max(late)
    assert max(full_jitter(0) for _ in range(200)) <= 0.1


@pytest.mark.parametrize(
    "reply",
    [
        "$JS.ACK.STREAM.consumer.1.42.7.1700000000123456789.3",
        "$JS.ACK._.HASH.STREAM.consumer.1.42.7.1700000000123456789.3",
        "$JS.ACK.hub.HASH.STREAM.consumer.1.42.7.1700000000123456789.3.token",
    ],
    ids=["old", "new", "new-with-token"],
)
def test_place_agrees_with_the_client_library_when_it_reads_either_form(reply: str) -> None:
    """B10: both forms of a delivery's reply subject give the same position, as nats-py itself
    understands them.
    """
    metadata = Msg(_client=None, subject="s", reply=reply, data=b"").metadata  # type: ignore[arg-type]  # only its reply is read

    place = Place.parse(reply)
    assert place == Place(consumer_sequence=7, sequence=42, time_ns=1700000000123456789, pending=3)
    assert (metadata.sequence.consumer, metadata.sequence.stream, metadata.num_pending) == (7, 42, 3)


@pytest.mark.parametrize("reply", ["", "_INBOX.x", "$JS.ACK.a.b.c.d.e.f.g", "$JS.ACK.S.c.1.2.3"])
def test_place_is_a_contract_error_when_the_message_is_no_delivery(reply: str) -> None:
    """Anything else is refused rather than read wrong."""
    with pytest.raises(ContractError, match="not a delivery"):
        Place.parse(reply)


def test_fast_header_parser_is_absent_when_topobus_is_installed() -> None:
    """B13: with nats-py's extra `fast-parse` header values become lists and replies fail.

    It must never come along.
    """
    assert importlib.util.find_spec("fast_mail_parser") is None
