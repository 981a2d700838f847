"""Ports for servers of tests and of `topobus up`."""

from __future__ import annotations

import socket
from pathlib import Path

from topobus.simulation.nats_server import free_port


def test_free_port_is_none_that_clients_get_when_a_server_wants_it() -> None:
    """A port from the clients' range can be taken by anybody's connection before the server is
    there, or between two of its lives.
    """
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(file.read_text().split()[0]) if file.exists() else 32_768
    ports = [free_port() for _ in range(50)]

    assert max(ports) < first
    for port in ports:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_free_port_leaves_out_a_port_when_somebody_listens_there() -> None:
    """Whoever listens keeps the port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()

        assert taken.getsockname()[1] not in {free_port() for _ in range(200)}
