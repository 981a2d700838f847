"""Asks NVML about the instances of a GPU, and makes and destroys them.

NVML lists GPU instances to root alone. A caller without that right sees those that have a compute
instance, without their place. Nothing here changes the MIG mode of a GPU, which is the operator's.
Source: NVML API reference, "Multi Instance GPU Management"; the functions that need a privileged
user are marked there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref, c_uint
from typing import Any

import msgspec

from topobus.gpu.mig.values import MigCompute, MigGpu, MigInstance, MigProfile, MigShare

__all__ = ["destroy_instance", "make_compute_instance", "make_gpu_instance", "read_mig", "read_profiles"]

_MIB = 1 << 20
# The buffer for a list of instances: more than the slices of any GPU.
_MOST_INSTANCES = 64


def read_profiles(library: Any, handle: Any) -> tuple[MigProfile, ...]:
    """Ask for the sizes that a GPU knows, by id. Empty for a GPU without MIG."""
    profiles: list[MigProfile] = []
    for index in range(library.NVML_GPU_INSTANCE_PROFILE_COUNT):
        info = _asked(library, library.nvmlDeviceGetGpuInstanceProfileInfo, handle, index)
        if info is None:
            continue
        places = _placements(library, handle, int(info.id))
        share = MigShare(
            memory_bytes=int(info.memorySizeMB) * _MIB,
            multiprocessors=int(info.multiprocessorCount),
            copy_engines=int(info.copyEngineCount),
            decoders=int(info.decoderCount),
            encoders=int(info.encoderCount),
            jpeg_engines=int(info.jpegCount),
            ofa_engines=int(info.ofaCount),
        )
        profiles.append(
            MigProfile(
                id=int(info.id),
                name=_profile_name(_text(info.name)),
                slices=int(info.sliceCount),
                count=int(info.instanceCount),
                share=share,
                size=places[0][1] if places else 0,
                starts=tuple(start for start, _ in places),
            )
        )
    return tuple(sorted(profiles, key=lambda profile: profile.id))


def read_mig(library: Any, handle: Any, profiles: Sequence[MigProfile]) -> MigGpu:
    """Ask a GPU in MIG mode for its instances.

    Shapes: profiles — its answer to `read_profiles`.
    Errors: raises NVMLError when it does not answer at all.
    """
    instances: dict[int, MigInstance] = {}
    for gi, compute in _devices(library, handle):
        instance = instances.get(gi) or _placed(library, handle, gi)
        instances[gi] = msgspec.structs.replace(instance, computes=(*instance.computes, compute))
    for profile in profiles:
        for gi in _list(library, library.c_nvmlGpuInstance_t, library.nvmlDeviceGetGpuInstances, handle, profile.id):
            info = _asked(library, library.nvmlGpuInstanceGetInfo, gi)
            if info is not None:
                instances.setdefault(int(info.id), _instance_of(info))
    ordered = (
        msgspec.structs.replace(instances[gi], computes=_sorted(instances[gi].computes)) for gi in sorted(instances)
    )
    return MigGpu(profiles=tuple(profiles), instances=tuple(ordered))


def make_gpu_instance(library: Any, handle: Any, profile: MigProfile, start: int) -> int:
    """Make a GPU instance at a place, and return its id.

    Errors: raises NVMLError, with INSUFFICIENT_RESOURCES where the place is taken.
    """
    place = library.c_nvmlGpuInstancePlacement_t(start, profile.size)
    instance = library.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile.id, byref(place))
    return int(library.nvmlGpuInstanceGetInfo(instance).id)


def make_compute_instance(library: Any, handle: Any, gi: int, slices: int) -> MigCompute:
    """Make a compute instance that fills a GPU instance.

    Errors: raises NVMLError, also when no profile fills it.
    """
    instance = library.nvmlDeviceGetGpuInstanceById(handle, gi)
    for index in range(library.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        shared = library.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
        info = _asked(library, library.nvmlGpuInstanceGetComputeInstanceProfileInfo, instance, index, shared)
        if info is not None and int(info.sliceCount) == slices:
            compute = library.nvmlGpuInstanceCreateComputeInstance(instance, info.id)
            made = library.nvmlComputeInstanceGetInfo(compute)
            return MigCompute(
                id=int(made.id),
                uuid=str(library.nvmlDeviceGetUUID(made.device)),
                slices=slices,
                start=int(made.placement.start),
            )
    raise library.NVMLError(library.NVML_ERROR_NOT_SUPPORTED)


def destroy_instance(library: Any, handle: Any, gi: int) -> None:
    """Destroy a GPU instance with all compute instances in it.

    An instance that is gone already is no error.

    Errors: raises NVMLError, with IN_USE while a program uses it.
    """
    try:
        instance = library.nvmlDeviceGetGpuInstanceById(handle, gi)
        for compute in _computes(library, instance):
            library.nvmlComputeInstanceDestroy(compute)
        library.nvmlGpuInstanceDestroy(instance)
    except library.NVMLError as err:
        if err.value != library.NVML_ERROR_NOT_FOUND:
            raise


def _computes(library: Any, instance: Any) -> list[Any]:
    computes: list[Any] = []
    for index in range(library.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        shared = library.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
        info = _asked(library, library.nvmlGpuInstanceGetComputeInstanceProfileInfo, instance, index, shared)
        if info is not None:
            computes += _list(
                library, library.c_nvmlComputeInstance_t, library.nvmlGpuInstanceGetComputeInstances, instance, info.id
            )
    return computes


def _devices(library: Any, handle: Any) -> list[tuple[int, MigCompute]]:
    """List the MIG devices, which needs no privilege: the GPU instance's id and the compute
    instance.
    """
    seen: list[tuple[int, MigCompute]] = []
    for index in range(library.nvmlDeviceGetMaxMigDeviceCount(handle)):
        device = _asked(library, library.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if device is None:
            # The numbers may have gaps.
            continue
        gi, ci = library.nvmlDeviceGetGpuInstanceId(device), library.nvmlDeviceGetComputeInstanceId(device)
        attributes = library.nvmlDeviceGetAttributes(device)
        share = MigShare(
            memory_bytes=int(attributes.memorySizeMB) * _MIB,
            multiprocessors=int(attributes.multiprocessorCount),
            copy_engines=int(attributes.sharedCopyEngineCount),
            decoders=int(attributes.sharedDecoderCount),
            encoders=int(attributes.sharedEncoderCount),
            jpeg_engines=int(attributes.sharedJpegCount),
            ofa_engines=int(attributes.sharedOfaCount),
        )
        compute = MigCompute(
            id=int(ci),
            uuid=str(library.nvmlDeviceGetUUID(device)),
            slices=int(attributes.computeInstanceSliceCount),
            start=_compute_start(library, handle, gi, ci),
            share=share,
            name=_profile_name(str(library.nvmlDeviceGetName(device))),
        )
        seen.append((int(gi), compute))
    return seen


def _placed(library: Any, handle: Any, gi: int) -> MigInstance:
    instance = _asked(library, library.nvmlDeviceGetGpuInstanceById, handle, gi)
    info = None if instance is None else _asked(library, library.nvmlGpuInstanceGetInfo, instance)
    return MigInstance(id=gi) if info is None else _instance_of(info)


def _instance_of(info: Any) -> MigInstance:
    return MigInstance(
        id=int(info.id), profile=int(info.profileId), start=int(info.placement.start), size=int(info.placement.size)
    )


def _compute_start(library: Any, handle: Any, gi: int, ci: int) -> int | None:
    instance = _asked(library, library.nvmlDeviceGetGpuInstanceById, handle, gi)
    compute = None if instance is None else _asked(library, library.nvmlGpuInstanceGetComputeInstanceById, instance, ci)
    info = None if compute is None else _asked(library, library.nvmlComputeInstanceGetInfo, compute)
    return None if info is None else int(info.placement.start)


def _placements(library: Any, handle: Any, profile: int) -> list[tuple[int, int]]:
    count = c_uint(0)
    if (
        _asked(library, library.nvmlDeviceGetGpuInstancePossiblePlacements, handle, profile, None, byref(count)) is None
        or not count.value
    ):
        return []
    places = (library.c_nvmlGpuInstancePlacement_t * count.value)()
    if (
        _asked(library, library.nvmlDeviceGetGpuInstancePossiblePlacements, handle, profile, places, byref(count))
        is None
    ):
        return []
    return sorted((int(place.start), int(place.size)) for place in places[: count.value])


def _list(library: Any, kind: Any, ask: Callable[..., Any], owner: Any, profile: int) -> list[Any]:
    handles, count = (kind * _MOST_INSTANCES)(), c_uint(_MOST_INSTANCES)
    if _asked(library, ask, owner, profile, handles, byref(count)) is None:
        return []
    return list(handles[: count.value])


def _sorted(computes: Sequence[MigCompute]) -> tuple[MigCompute, ...]:
    return tuple(sorted(computes, key=lambda compute: compute.id))


def _asked(library: Any, ask: Callable[..., Any], *arguments: Any) -> Any | None:
    """Ask for what may be unknown, not supported, gone meanwhile, or for root alone, and return
    None then.

    Errors: raises NVMLError for all else, such as a session that is no longer valid.
    """
    ordinary = (
        library.NVML_ERROR_NOT_SUPPORTED,
        library.NVML_ERROR_INVALID_ARGUMENT,
        library.NVML_ERROR_NOT_FOUND,
        library.NVML_ERROR_NO_PERMISSION,
        library.NVML_ERROR_FUNCTION_NOT_FOUND,
    )
    try:
        return ask(*arguments)
    except library.NVMLError as err:
        if err.value in ordinary:
            return None
        raise


def _profile_name(text: str) -> str:
    """Take the profile's name: NVML writes `MIG 1g.10gb`, and a device's name ends with it."""
    return text.rpartition("MIG ")[2].strip()


def _text(raw: Any) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)
