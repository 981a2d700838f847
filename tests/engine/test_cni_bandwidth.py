"""A limit of 10 Mbit/s measured with real packets, to a pod and from it.

Takes a quarter of a minute, so not in `make test`: that asserts the kernel's rate.
"""

from __future__ import annotations

import socket
import threading
import time

import pytest

from engine.engine import say
from integration.nic.conftest import Node, bundle, node
from support.net_namespaces import Namespace
from topobus.nic.cni.pod_values import pod_values
from topobus.values.device import Device
from topobus.values.sandbox import Sandbox

__all__ = ["bundle", "node"]

pytestmark = pytest.mark.engine

_BITS = 10_000_000
# The counter has the headers of a merged packet once, the bucket those of each packet: of
# 10 Mbit/s on the wire 9.56 to 9.6 are counted. What passes at once at the beginning (50 ms
# of the rate) is over after this.
_WARM_UP_S = 1.0
_MEASURE_S = 5.0


def measure(node: Node, sender: Namespace, receiver: Namespace, address: str, interface: str) -> float:
    """Send as fast as TCP can, and read the receiver's counter twice; bits a second on the wire."""
    listener = receiver.call(lambda: socket.create_server(("", 0)))
    port = listener.getsockname()[1]
    stop = threading.Event()

    def send() -> None:
        with sender.call(lambda: socket.create_connection((address, port), timeout=30)) as connection:
            connection.settimeout(30)
            while not stop.is_set():
                connection.sendall(b"x" * 16384)

    def receive() -> None:
        with listener, listener.accept()[0] as connection:
            while connection.recv(1 << 20):
                pass

    threads = [threading.Thread(target=work) for work in (receive, send)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(_WARM_UP_S)
        first, begun = received(receiver, interface), time.monotonic()
        time.sleep(_MEASURE_S)
        last, ended = received(receiver, interface), time.monotonic()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return (last - first) * 8 / (ended - begun)


def received(namespace: Namespace, interface: str) -> int:
    """Read an interface's counter of bytes."""
    return int(namespace.json("-statistics", "link", "show", interface)[0]["stats64"]["rx"]["bytes"])


def test_rate_holds_within_5_percent_when_a_pod_is_limited(node: Node) -> None:
    """Both annotations say 10M; what the wire carries is that, in both directions."""
    rates = {"kubernetes.io/ingress-bandwidth": "10M", "kubernetes.io/egress-bandwidth": "10M"}
    pod = Sandbox(id="s", uid="u", namespace="default", name="p", annotations=rates)
    values = pod_values(pod, Device(name="nic-0", device_class="nic"))
    assert isinstance(values, dict)
    network = {"type": "bridge", "bridge": "tb0", "isGateway": True, "ipam": node.host_local()}
    node.add(
        node.chain(network, {"type": "bandwidth", "capabilities": {"bandwidth": True}}),
        node.target(runtime_values=values),
    )

    to_pod = measure(node, node.host, node.pod, "10.99.0.2", "net1")
    from_pod = measure(node, node.pod, node.host, "10.99.0.1", "tb0")

    say(f"to the pod {to_pod / 1e6:.3f} Mbit/s, from it {from_pod / 1e6:.3f} Mbit/s, wanted {_BITS / 1e6:g}")
    assert to_pod == pytest.approx(_BITS, rel=0.05)
    assert from_pod == pytest.approx(_BITS, rel=0.05)
