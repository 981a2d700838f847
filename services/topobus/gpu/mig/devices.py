"""Makes devices of a GPU's instances: those that exist, and, where instances are made for claims,
each place at which one could be. Pure.

A device's name has the GPU, the profile and the place (`gpu-0000-18-00-0-mig-1g-10gb-3`). So an
instance of another size is another device, and a device is the same whether its instance was made
for a claim or beforehand.

The devices take from counters: each memory slice by its number, because placements are made of
them, the compute slices, the engines, and how many of a profile there may be, where that is less
than its places. NVML has no totals of the engines. A GPU has as many as its largest profile, and as
all instances that one profile may have together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from topobus.gpu.mig.values import MigCompute, MigGpu, MigInstance, MigProfile, MigShare
from topobus.values.counters import CounterSet, CounterUse
from topobus.values.device import AttributeValue, Device, DeviceRole
from topobus.values.names import to_dns_label

__all__ = [
    "MIG_TYPE",
    "counter_set",
    "gi_of",
    "is_blocked",
    "live_of",
    "place_names",
    "placed_devices",
    "possible_devices",
]

MIG_TYPE = "mig"
"""The attribute `type` of an instance, as NVIDIA's DRA driver has it."""
_ENGINES = {
    "multiprocessors": "multiprocessors",
    "copy-engines": "copy_engines",
    "decoders": "decoders",
    "encoders": "encoders",
    "jpeg-engines": "jpeg_engines",
    "ofa-engines": "ofa_engines",
}
_COMPUTE_SLICES = "compute-slices"


def placed_devices(gpu: Device, mig: MigGpu) -> list[Device]:
    """List the instances that exist as devices, by name."""
    devices = [
        msgspec.structs.replace(
            _device(
                gpu,
                _name(gpu, mig, instance, compute),
                compute.name,
                compute.share,
                uuid=compute.uuid,
                facts=_facts(mig, instance, compute),
            ),
            partition_of=gpu.name,
        )
        for instance in mig.instances
        for compute in instance.computes
    ]
    return sorted(devices, key=lambda device: device.name)


def possible_devices(gpu: Device, mig: MigGpu, foreign: Sequence[MigInstance]) -> list[Device]:
    """List each place of each profile as a device that takes from the GPU's counters, by name.

    A place that is not free beside the `foreign` instances is listed as well, and is unhealthy as
    long as they exist. They have taken their part of the counters already.
    """
    totals = counter_set(gpu, mig, foreign).counters
    devices: list[Device] = []
    for profile in mig.profiles:
        for start in profile.starts:
            facts: dict[str, AttributeValue] = {
                "placement": start,
                "memorySlices": profile.size,
                "computeSlices": profile.slices,
            }
            device = _device(
                gpu, _place_name(gpu, profile.name, start), profile.name, profile.share, uuid="", facts=facts
            )
            uses = _uses(mig, profile, start)
            consumes = tuple(
                CounterUse(counter_set=gpu.name, counter=counter, amount=min(amount, totals[counter]))
                for counter, amount in sorted(uses.items())
            )
            devices.append(msgspec.structs.replace(device, consumes=consumes))
    return sorted(devices, key=lambda device: device.name)


def place_names(gpu: Device, mig: MigGpu) -> Mapping[tuple[int | None, int | None], str]:
    """Name the device of each place: profile's id and first memory slice to name."""
    return {
        (profile.id, start): _place_name(gpu, profile.name, start)
        for profile in mig.profiles
        for start in profile.starts
    }


def counter_set(gpu: Device, mig: MigGpu, foreign: Sequence[MigInstance]) -> CounterSet:
    """Count what a GPU has for instances, less what `foreign` instances have."""
    totals = _totals(mig)
    for instance in foreign:
        for counter, amount in _taken(mig, instance).items():
            totals[counter] = max(totals.get(counter, 0) - amount, 0)
    return CounterSet(name=gpu.name, counters=dict(sorted(totals.items())))


def is_blocked(mig: MigGpu, device: Device, foreign: Sequence[MigInstance]) -> bool:
    """Return whether a possible instance does not fit beside the `foreign` ones."""
    profile = next((profile for profile in mig.profiles if profile.name == device.attributes.get("profile")), None)
    start = device.attributes.get("placement")
    if profile is None or not isinstance(start, int):
        return True
    taken: dict[str, int] = {}
    for instance in foreign:
        for counter, amount in _taken(mig, instance).items():
            taken[counter] = taken.get(counter, 0) + amount
    totals = _totals(mig)
    return any(
        amount + taken.get(counter, 0) > totals[counter] for counter, amount in _uses(mig, profile, start).items()
    )


def live_of(mig: MigGpu, device: Device) -> tuple[MigInstance, MigCompute | None] | None:
    """Find the instance at a device's place, of the device's profile, and the compute instance in
    it.

    The second is None while the instance has no compute instance.
    """
    for instance in mig.instances:
        for compute in instance.computes:
            if _name(device, mig, instance, compute, whole=device.parent) == device.name:
                return instance, compute
        profile = mig.profile(instance.profile)
        is_bare = profile is not None and instance.start is not None and not instance.computes
        if (
            profile is not None
            and is_bare
            and f"{device.parent}-{_suffix(profile.name, instance.start or 0)}" == device.name
        ):
            return instance, None
    return None


def gi_of(mig: MigGpu, names: Collection[Device]) -> Mapping[str, int]:
    """Find the GPU instance of each device that has one now."""
    return {device.name: live[0].id for device in names if (live := live_of(mig, device)) is not None}


def _device(
    gpu: Device, name: str, profile: str, share: MigShare, *, uuid: str, facts: Mapping[str, AttributeValue]
) -> Device:
    attributes = {key: value for key, value in gpu.attributes.items() if key not in ("index", "uuid")}
    # An instance that is made for each claim has another UUID each time, which would change the
    # slice.
    uuids: dict[str, AttributeValue] = {
        key: value for key, value in (("parentUUID", gpu.uuid), ("uuid", uuid)) if value
    }
    return msgspec.structs.replace(
        gpu,
        name=name,
        uuid=uuid,
        role=DeviceRole.COMPUTE,
        parent=gpu.name,
        # MIG instances have no NVLink (MIG User Guide, "Application Considerations").
        links=(),
        attributes={**attributes, "type": MIG_TYPE, "profile": profile, **uuids, **facts},
        capacity={
            "memory": share.memory_bytes,
            "multiprocessors": share.multiprocessors,
            "copyEngines": share.copy_engines,
            "decoders": share.decoders,
            "encoders": share.encoders,
            "jpegEngines": share.jpeg_engines,
            "ofaEngines": share.ofa_engines,
        },
    )


def _facts(mig: MigGpu, instance: MigInstance, compute: MigCompute) -> dict[str, AttributeValue]:
    profile = mig.profile(instance.profile)
    facts: dict[str, AttributeValue] = {"gpuInstance": instance.id, "computeInstance": compute.id}
    if instance.start is not None:
        facts |= {"placement": instance.start, "memorySlices": instance.size}
    if compute.slices or profile is not None:
        facts["computeSlices"] = compute.slices or (profile.slices if profile is not None else 0)
    return facts


def _name(gpu: Device, mig: MigGpu, instance: MigInstance, compute: MigCompute, *, whole: str = "") -> str:
    """Name an instance after its place.

    Where NVML does not publish the place, the name has the instance's number. The name of a part of
    an instance ends with the part's own place.
    """
    profile = mig.profile(instance.profile)
    is_whole = profile is None or compute.slices == profile.slices
    where = f"gi{instance.id}" if instance.start is None else str(instance.start)
    own = "" if is_whole and instance.start is not None and len(instance.computes) < 2 else f"-ci{compute.id}"
    if not is_whole and compute.start is not None:
        own = f"-c{compute.start}"
    return f"{whole or gpu.name}-{_suffix(compute.name, where)}{own}"


def _place_name(gpu: Device, profile: str, start: int) -> str:
    return f"{gpu.name}-{_suffix(profile, start)}"


def _suffix(profile: str, where: int | str) -> str:
    """Write a profile as a part of a name.

    `1g.10gb+me` has the media engines, `1g.12gb-me` leaves them out.

    >>> _suffix("1g.10gb+me", 3), _suffix("1g.12gb-me", 0)
    ('mig-1g-10gb-me-3', 'mig-1g-12gb-no-me-0')
    """
    text = profile.replace("-me", "-no-me").replace("+", "-").replace(".", "-")
    return to_dns_label(f"mig-{text}-{where}")


def _slice(number: int) -> str:
    return f"memory-slice-{number}"


def _counts_itself(profile: MigProfile) -> bool:
    return profile.count < len(profile.starts)


def _uses(mig: MigGpu, profile: MigProfile, start: int) -> dict[str, int]:
    uses = {_slice(number): 1 for number in range(start, start + profile.size)}
    uses[_COMPUTE_SLICES] = profile.slices
    uses.update((counter, getattr(profile.share, field)) for counter, field in _ENGINES.items())
    if _counts_itself(profile):
        uses[f"profile-{profile.id}"] = 1
    return {counter: amount for counter, amount in uses.items() if amount}


def _taken(mig: MigGpu, instance: MigInstance) -> dict[str, int]:
    profile = mig.profile(instance.profile)
    if profile is None or instance.start is None:
        # What it has is not known, so count all of the GPU as taken.
        return _totals(mig)
    return _uses(mig, profile, instance.start)


def _totals(mig: MigGpu) -> dict[str, int]:
    totals: dict[str, int] = {}
    for profile in mig.profiles:
        for start in profile.starts:
            totals |= {_slice(number): 1 for number in range(start, start + profile.size)}
        if _counts_itself(profile):
            totals[f"profile-{profile.id}"] = profile.count
        totals[_COMPUTE_SLICES] = max(totals.get(_COMPUTE_SLICES, 0), profile.slices, profile.slices * profile.count)
        for counter, field in _ENGINES.items():
            amount = getattr(profile.share, field)
            if amount:
                totals[counter] = max(totals.get(counter, 0), amount, amount * profile.count)
    return totals
