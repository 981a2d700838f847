"""A law of MIG on demand: over any sequence of claims, what the controller allocates is what NVML
can make, and what it refuses NVML refuses, too.

The devices and counters are the driver's, the slices and the search the controller's, and each
instance is made and destroyed by the driver through the real pynvml on a libnvidia-ml that knows
placements and engines, and no counters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.fake_mig import MODELS, as_somebody
from support.fake_nvml import needs_gcc
from support.laws import examples
from support.mig_node import OWNER, MigNode, mig_node
from topobus.controller.state.inventory_slices import devices_of_class, slices_of_pool
from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.driver import HostServices, LongWork, PrepareContext
from topobus.devicekit.settings import PartitionSettings
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import Allocated, AllocationInput, ClaimToAllocate, DeviceId, Node, NoFit, Usage
from topobus.engine.cel.selector import CelCompiler
from topobus.formats.kubernetes.built_in_classes import built_in_class
from topobus.formats.kubernetes.limits import check_slice
from topobus.formats.kubernetes.resource import ClaimSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.gpu.mig.nvml_mig import read_mig, read_profiles
from topobus.gpu.mig.values import MigProfile
from topobus.values.device import Device, Inventory
from topobus.values.outcome import Refusal
from topobus.values.partitions import partitioned

pytestmark = needs_gcc

COMPILER = CelCompiler()
# Get an instance of a size, at a place or at any, or give one back.
ACTS = st.one_of(
    st.tuples(st.just("get"), st.integers(0, 6), st.one_of(st.none(), st.integers(0, 6))),
    st.tuples(st.just("get"), st.integers(0, 6), st.none()),
    st.tuples(st.just("give"), st.integers(0, 6), st.none()),
)


class _Claims:
    """Claims on one GPU."""

    def __init__(self, node: MigNode) -> None:
        self.node = node
        node.driver.configure(HostServices(partitions=PartitionSettings(on_demand=True)))
        devices = tuple(device for device in node.discover().values() if device.parent)
        good, sets, faults = partitioned(devices, node.discovery.counter_sets)
        assert faults == {}
        inventory = Inventory(node="n1", device_class="gpu", generation=1, devices=good, counter_sets=sets)
        self.slices = slices_of_pool("n1", [devices_of_class(inventory)])
        assert [problem for published in self.slices for problem in check_slice(published.spec)] == []
        self.devices = {device.name: device for device in good}
        self.held: dict[str, DeviceRecord] = {}
        with as_somebody(node.library.folder):
            self.profiles = read_profiles(pynvml, self._handle())

    def begin(self) -> None:
        """Begin a history: the GPU has no instance."""
        (self.node.library.folder / "mig-state").unlink(missing_ok=True)
        self.held = {}

    def get(self, number: int, place: int | None) -> None:
        """Have the controller allocate, and the driver make what it chose; or NVML confirm that it
        cannot be made.
        """
        profile = self.profiles[number % len(self.profiles)]
        start = None if place is None else profile.starts[place % len(profile.starts)]
        outcome = self._allocate(profile, start)
        if isinstance(outcome, Allocated):
            (granted,) = outcome.results[0].devices.results
            device = self.devices[granted.device]
            assert device.attributes["profile"] == profile.name
            assert start in (None, device.attributes["placement"])
            self._make(device)
            return
        assert isinstance(outcome, NoFit), outcome
        if start is None:
            assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(self._handle(), profile.id) == 0, (
                f"NVML has room for {profile.name}"
            )
        else:
            assert not self._can_make(profile, start), f"NVML can make {profile.name} at {start}"

    def give(self, number: int) -> None:
        """Give back what some claim has."""
        if self.held:
            name = sorted(self.held)[number % len(self.held)]
            self.node.driver.unprepare(self.node.tree, [self.devices[name]], self._context(name, self.held.pop(name)))

    def check(self) -> None:
        """What NVML has is what claims hold, no more and no less."""
        mig = read_mig(pynvml, self._handle(), self.profiles)
        names = {(profile.id, start): (profile.name, start) for profile in self.profiles for start in profile.starts}
        live = sorted(names[instance.profile or 0, instance.start or 0] for instance in mig.instances)
        assert live == sorted(
            (str(self._fact(name, "profile")), int(self._fact(name, "placement"))) for name in self.held
        )

    def _fact(self, name: str, attribute: str) -> Any:
        return self.devices[name].attributes[attribute]

    def _handle(self) -> Any:
        return pynvml.nvmlDeviceGetHandleByPciBusId(self.node.first)

    def _allocate(self, profile: MigProfile, start: int | None) -> object:
        attributes = 'device.attributes["topobus.dev"]'
        text = f'{attributes}.profile == "{profile.name}"' + (
            "" if start is None else f" && {attributes}.placement == {start}"
        )
        exactly = {"deviceClassName": "gpu", "count": 1, "selectors": [{"cel": {"expression": text}}]}
        spec = read_as({"devices": {"requests": [{"name": "r", "exactly": exactly}]}}, ClaimSpec, where="claim")
        usage = Usage({DeviceId("topobus.dev", "n1", name): "claim a/b" for name in self.held})
        asked = AllocationInput(
            node=Node("n1"),
            claims=(ClaimToAllocate("d/c", spec),),
            classes={"gpu": built_in_class("gpu")},
            slices=self.slices,
            usage=usage,
        )
        return allocate(asked, COMPILER)

    def _make(self, device: Device) -> None:
        record = self.held[device.name] = DeviceRecord()
        answer = self.node.driver.prepare(self.node.tree, [device], self._context(device.name, record))
        assert isinstance(answer, LongWork)
        edits = answer.work()
        assert not isinstance(edits, Refusal), f"the controller allocated what NVML cannot make: {edits}"

    def _context(self, name: str, record: DeviceRecord) -> PrepareContext:
        return PrepareContext(owner=OWNER, records={name: record})

    def _can_make(self, profile: MigProfile, start: int) -> bool:
        place = pynvml.c_nvmlGpuInstancePlacement_t(start, profile.size)
        try:
            instance = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(self._handle(), profile.id, pynvml.byref(place))
        except pynvml.NVMLError_InsufficientResources:
            return False
        pynvml.nvmlGpuInstanceDestroy(instance)
        return True


@pytest.mark.law
@pytest.mark.parametrize("model", sorted(MODELS))
def test_controller_allocates_what_nvml_can_make(tmp_path: Path, model: str) -> None:
    """250 histories for each model, 1,000 in all: A100 with 40 and 80 GB, H100, B200."""
    with mig_node(tmp_path, MODELS[model]) as node, as_somebody(node.library.folder):
        claims = _Claims(node)

        @settings(max_examples=examples(250), deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(acts=st.lists(ACTS, min_size=1, max_size=10))
        def run(acts: list[tuple[str, int, int | None]]) -> None:
            claims.begin()
            for act, number, place in acts:
                if act == "get":
                    claims.get(number, place)
                else:
                    claims.give(number)
            claims.check()

        run()
