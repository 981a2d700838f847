"""The metrics of the gateway, for Prometheus.

Labels are bounded: methods, classes, resources of the settings, outcomes.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import monotonic

from prometheus_client import CollectorRegistry, Counter

from topobus.gateway.claims.claim_key import ClaimFailed
from topobus.process.metric_descriptors import CounterDescriptor, GaugeDescriptor, HistogramDescriptor
from topobus.values.errors import PeerUnavailable

__all__ = ["DISAGREEMENTS", "CallMetrics", "ClaimMetrics", "CpusetMetrics"]

# In seconds: from a call that only reads memory to kubelet's longest deadline.
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 45.0)
_CLASS = "a device class, a resource of the settings, or the DRA driver"
_OUTCOMES = ("refused", "unavailable", "timeout", "unwritable", "failed")

CALL_SECONDS = HistogramDescriptor(
    name="topobus_gateway_call_seconds",
    meaning="kubelet's calls, of the device-plugin API and of DRA.",
    labels={
        "method": "a method of kubelet's APIs",
        "class": _CLASS,
        "outcome": ("ok", "refused", "unavailable", "failed", "cancelled", "crashed"),
    },
    buckets=_BUCKETS,
)
DEVICES_LEFT_OUT = GaugeDescriptor(
    name="topobus_gateway_devices_left_out",
    meaning="Devices that did not fit into kubelet's largest message.",
    labels={"resource": "a resource of this node"},
)
CLAIMS_PREPARED = GaugeDescriptor(
    name="topobus_gateway_claims_prepared",
    meaning="Claims with devices of the class that are prepared on this node now.",
    labels={"class": _CLASS},
)
CLAIM_PREPARES = CounterDescriptor(
    name="topobus_gateway_claim_prepares_total",
    meaning="Claims that kubelet asked to prepare, by outcome.",
    labels={"outcome": ("prepared", *_OUTCOMES)},
)
CLAIM_UNPREPARES = CounterDescriptor(
    name="topobus_gateway_claim_unprepares_total",
    meaning="Claims that kubelet asked to unprepare, by outcome. After `unavailable` kubelet may continue, and the "
    "claim is unprepared later.",
    labels={"outcome": ("unprepared", *_OUTCOMES)},
)
CLAIM_PREPARE_SECONDS = HistogramDescriptor(
    name="topobus_gateway_claim_prepare_seconds",
    meaning="How long one claim took to prepare, with all tries, whatever the outcome.",
    buckets=_BUCKETS,
)
CDI_WRITE_SECONDS = HistogramDescriptor(
    name="topobus_gateway_cdi_write_seconds",
    meaning="How long a claim's CDI file took to be on disk.",
    labels={"outcome": ("written", "failed")},
    buckets=_BUCKETS,
)

CPUSET_DIFFERENCES = CounterDescriptor(
    name="topobus_gateway_cpuset_differences_total",
    meaning="Containers that the kernel had on other CPUs than was promised; `shared`: on CPUs that a claim has for "
    "itself.",
    labels={"kind": ("shared", "own")},
)

DISAGREEMENTS = GaugeDescriptor(
    name="topobus_gateway_disagreements",
    meaning="Devices and CPUs that kubelet and the ledger give to different owners now, seen at two looks in a row.",
)


class CallMetrics:
    """How long calls of kubelet took, and how they ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls_s = CALL_SECONDS.register(registry)
        self.left_out = DEVICES_LEFT_OUT.register(registry)


class CpusetMetrics:
    """How often promises of CPUs were broken."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.differences = CPUSET_DIFFERENCES.register(registry)


class ClaimMetrics:
    """What happened to claims on this node."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.prepares = CLAIM_PREPARES.register(registry)
        self.unprepares = CLAIM_UNPREPARES.register(registry)
        self.prepare_s = CLAIM_PREPARE_SECONDS.register(registry)
        self.cdi_write_s = CDI_WRITE_SECONDS.register(registry)
        self._prepared = CLAIMS_PREPARED.register(registry)
        self._classes: set[str] = set()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count and time the preparation of one claim. Errors are passed on."""
        began_s = monotonic()
        try:
            with _counted(self.prepares, "prepared"):
                yield
        finally:
            self.prepare_s.observe(monotonic() - began_s)

    @contextmanager
    def unpreparing(self) -> Iterator[None]:
        """Count the undoing of one claim. Errors are passed on."""
        with _counted(self.unprepares, "unprepared"):
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Time the write of a claim's CDI files. Errors are passed on."""
        began_s, outcome = monotonic(), "failed"
        try:
            yield
            outcome = "written"
        finally:
            self.cdi_write_s.labels(outcome).observe(monotonic() - began_s)

    def set_prepared(self, classes: Iterable[str]) -> None:
        """Count the prepared claims by class. `classes` has the class of each claim."""
        counts = Count(classes)
        self._classes |= counts.keys()
        for device_class in self._classes:
            self._prepared.labels(device_class).set(counts[device_class])


@contextmanager
def _counted(counter: Counter, done: str) -> Iterator[None]:
    """Count how a block ends. A cancelled block is not counted."""
    try:
        yield
    except ClaimFailed:
        counter.labels("refused").inc()
        raise
    except PeerUnavailable:
        counter.labels("unavailable").inc()
        raise
    except TimeoutError:
        # Before OSError, because it is a subclass of it.
        counter.labels("timeout").inc()
        raise
    except OSError:
        counter.labels("unwritable").inc()
        raise
    except Exception:
        counter.labels("failed").inc()
        raise
    counter.labels(done).inc()
