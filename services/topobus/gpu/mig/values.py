"""A GPU's MIG profiles with their placements, and its instances, as NVML lists them. Frozen values.

A GPU instance takes consecutive memory slices and the engines of its profile. A program uses a
compute instance in it, which has a UUID of its own.
Source: NVML API reference, "Multi Instance GPU Management".
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["LiveInstance", "MigCompute", "MigGpu", "MigInstance", "MigProfile", "MigShare"]


class MigShare(Struct, frozen=True, kw_only=True):
    """The part of a GPU that one instance has."""

    memory_bytes: int = 0
    multiprocessors: int = 0
    copy_engines: int = 0
    decoders: int = 0
    encoders: int = 0
    jpeg_engines: int = 0
    ofa_engines: int = 0


class MigProfile(Struct, frozen=True, kw_only=True):
    """One size in which a GPU instance can be made."""

    id: int
    name: str
    """`1g.10gb`, `1g.10gb+me`."""
    slices: int
    """Compute slices."""
    count: int
    """How many of this size the GPU can have at once, when it has nothing else."""
    share: MigShare
    size: int = 0
    """Memory slices."""
    starts: tuple[int, ...] = ()
    """Memory slices at which one may begin."""


class MigCompute(Struct, frozen=True, kw_only=True):
    """A compute instance."""

    id: int
    uuid: str
    slices: int = 0
    start: int | None = None
    """Its first compute slice within the GPU instance; None where NVML does not report it, which
    it does to root only."""
    share: MigShare = MigShare()
    name: str = ""
    """`1g.10gb`, or `1c.3g.40gb` where it is a part of its GPU instance."""


class MigInstance(Struct, frozen=True, kw_only=True):
    """A GPU instance that exists."""

    id: int
    profile: int | None = None
    """Its profile's id; this and the place are None where NVML does not report them."""
    start: int | None = None
    size: int = 0
    computes: tuple[MigCompute, ...] = ()


class MigGpu(Struct, frozen=True, kw_only=True):
    """The state of MIG on one GPU."""

    profiles: tuple[MigProfile, ...] = ()
    """By id."""
    instances: tuple[MigInstance, ...] = ()
    """By id, those without a compute instance too, where NVML lists them."""
    fault: str = ""
    """Why it could not be asked; empty: it was."""

    def profile(self, number: int | None) -> MigProfile | None:
        """Find a profile by its id."""
        return next((profile for profile in self.profiles if profile.id == number), None)


class LiveInstance(Struct, frozen=True, kw_only=True):
    """The instance behind a device, as it is now."""

    gi: int
    ci: int
    uuid: str
