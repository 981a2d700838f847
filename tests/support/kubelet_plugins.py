"""The shipped recording plugin and driver under the names that tests use."""

from topobus.testing.kubelet.recorder import Record, device
from topobus.testing.kubelet.recorder import RecordingDriver as TrivialDriver
from topobus.testing.kubelet.recorder import RecordingPlugin as TrivialPlugin

__all__ = ["Record", "TrivialDriver", "TrivialPlugin", "device"]
