"""Describes metrics: name, kind, meaning and labels, declared once. `docs/reference/metrics.md` and
the checks of deploy/monitoring are made from them.

A service's metrics are constants in its metrics module, and a registry gets them only from there.
Names follow Prometheus: `topobus_<service>_<noun>_<unit>`, with `_total` for counters only. A
device class is a label. Labels are bounded: either all values are listed, or a text names their
bound. Never a uid, pod or claim name, except in the readings of devices (`is_per_device`), which
have one series for each device, and name its holder.

A process that exports no metrics (a command of `topobus`) has no registry, and prometheus_client, a
tenth of such a command's imports, is not loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.metrics_core import Metric

__all__ = [
    "CounterDescriptor",
    "GaugeDescriptor",
    "HistogramDescriptor",
    "LabelValues",
    "MetricDescriptor",
]

LabelValues = str | tuple[str, ...]
"""All values that a label has, or a text that names what bounds them."""

_Counts = TypeVar("_Counts", bound="Counter | Histogram")
_NAME = re.compile(r"topobus_[a-z]+(_[a-z]+)*")
_LABEL = re.compile(r"[a-z][a-z_]*")
_UNBOUNDED = frozenset({"uid", "pod", "claim", "namespace", "name"})


class _Uncounted:
    """A metric of a process that has no registry: accepts every count, and keeps nothing."""

    def labels(self, *_values: str) -> Self:
        return self

    def inc(self, _amount: float = 1) -> None:
        pass

    dec = set = observe = inc


_UNCOUNTED: Any = _Uncounted()


@dataclass(frozen=True, kw_only=True)
class MetricDescriptor:
    """One metric. Errors: raises ValueError for a name or a label that breaks the conventions."""

    name: str
    meaning: str
    labels: Mapping[str, LabelValues] = field(default_factory=dict)
    is_per_device: bool = False
    """It has a line for each device, so its lines are bounded by the devices whoever holds them,
    and it may name the holder."""
    kind: ClassVar[str]
    """The Prometheus name of the type."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"metric {self.name}: wanted topobus_<service>_<noun>_<unit|total> in small letters")
        if self.name.endswith("_total") != isinstance(self, CounterDescriptor):
            raise ValueError(f"metric {self.name}: _total ends the names of counters, and of nothing else")
        for label in self.labels:
            if not _LABEL.fullmatch(label) or (label in _UNBOUNDED and not self.is_per_device):
                raise ValueError(
                    f"metric {self.name}: label {label!r} is not allowed: its values have no bound, or it is misspelt"
                )

    def _begun(self, counts: _Counts) -> _Counts:
        """Begin each line at 0 where all values of all labels are listed.

        Prometheus' increase() and rate() do not see a count that is above 0 when its line is new,
        so an alert would miss the first failure.
        """
        values = [values for values in self.labels.values() if isinstance(values, tuple)]
        if values and len(values) == len(self.labels):
            for line in product(*values):
                counts.labels(*line)
        return counts

    def family(self) -> Metric:
        """Make it without a line, for a collector that writes its lines at each scrape."""
        from prometheus_client.metrics_core import Metric

        return Metric(self.name.removesuffix("_total"), self.meaning, self.kind)


@dataclass(frozen=True, kw_only=True)
class CounterDescriptor(MetricDescriptor):
    """A number that only rises while the process lives."""

    kind: ClassVar[str] = "counter"

    def register(self, registry: CollectorRegistry | None) -> Counter:
        """Make it in a registry. Without one it counts nothing.

        Errors: raises ValueError when the registry has it already.
        """
        if registry is None:
            return cast("Counter", _UNCOUNTED)
        from prometheus_client import Counter

        return self._begun(Counter(self.name, self.meaning, tuple(self.labels), registry=registry))


@dataclass(frozen=True, kw_only=True)
class GaugeDescriptor(MetricDescriptor):
    """A number that rises and falls."""

    kind: ClassVar[str] = "gauge"

    def register(self, registry: CollectorRegistry | None) -> Gauge:
        """Make it in a registry. Without one it counts nothing.

        Errors: raises ValueError when the registry has it already.
        """
        if registry is None:
            return cast("Gauge", _UNCOUNTED)
        from prometheus_client import Gauge

        return Gauge(self.name, self.meaning, tuple(self.labels), registry=registry)


@dataclass(frozen=True, kw_only=True)
class HistogramDescriptor(MetricDescriptor):
    """Counts of observed values by upper bound."""

    buckets: tuple[float, ...]

    kind: ClassVar[str] = "histogram"

    def register(self, registry: CollectorRegistry | None) -> Histogram:
        """Make it in a registry. Without one it counts nothing.

        Errors: raises ValueError when the registry has it already.
        """
        if registry is None:
            return cast("Histogram", _UNCOUNTED)
        from prometheus_client import Histogram

        return self._begun(
            Histogram(self.name, self.meaning, tuple(self.labels), registry=registry, buckets=self.buckets)
        )
