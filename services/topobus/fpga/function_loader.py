"""Gives a region the function that a claim asks for: chooses the bitstream, programs it, and
recovers from a crash during programming.

A region that another process has open is never programmed, and one that has the function already is
left alone. The record of the device holds a step while a bitstream is written. If the region cannot
be proved whole afterwards, it is programmed again (with the blank function where the store has one
for it), or stays out of use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from topobus.devicekit.device_record import DeviceRecord, Step
from topobus.devicekit.driver import PrepareContext
from topobus.fpga.bitstreams.store import BitstreamStore, StoreEntry, load_image
from topobus.fpga.bitstreams.values import BitstreamForm
from topobus.fpga.config import FunctionSettings
from topobus.fpga.programmer import RegionUntouched
from topobus.fpga.region import Region
from topobus.process.logging import get_logger
from topobus.values.device import AttributeValue
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal, refuse

__all__ = ["FunctionLoader"]

_PROGRAM, _RESET, _BLANK = "program", "reset", "blank"
# A device has 32 attributes at most (resource.k8s.io), and the drivers use up to twenty.
_MOST_FITTING = 8

Look = Callable[[], Region]
"""Reads a region again."""


@dataclass(frozen=True)
class _Programmed:
    """What this process has programmed. Sysfs alone does not show it: two files may have one id,
    and xocl may still show the previous one.
    """

    digest: str
    function: str
    shown: str
    """What sysfs showed then. When it shows something else, another program has loaded that."""


class FunctionLoader:
    """The functions of one driver's regions."""

    def __init__(self, settings: FunctionSettings | None, *, can_program: bool = False) -> None:
        """Load from the store of these settings.

        `can_program` is False where nothing may be changed, for whatever reason.
        """
        self.settings = settings or FunctionSettings()
        self._store = BitstreamStore(self.settings.store)
        self.can_program = can_program
        self._programmed: dict[str, _Programmed] = {}
        self._turns: dict[str, int] = {}

    @property
    def left_out(self) -> tuple[str, ...]:
        """List the bitstreams that cannot be used, each with the reason."""
        return self._store.look().left_out

    def forget_absent(self, names: Collection[str]) -> None:
        """Forget what was programmed into devices that are not offered now.

        The user of such a device for passthrough may load another function, and sysfs may not show
        it.
        """
        # A copy, and no `del`: long work writes from its own thread.
        for name in list(self._programmed):
            if name not in names:
                self._programmed.pop(name, None)

    def turn(self, device: str) -> int:
        """Count the starts and ends of changes to a device.

        The number is odd while it is programmed or reset. Signs of its function (all ones, not
        ready) are no fault then.
        """
        return self._turns.get(device, 0)

    def was_quiet(self, device: str, since: int) -> bool:
        """Return whether nothing was done to a device between an earlier `turn` and now.

        Only then is a reading in between valid.
        """
        return since % 2 == 0 and self.turn(device) == since

    def attributes(self, region: Region) -> Mapping[str, AttributeValue]:
        """Return attributes for selectors: which function of the store is loaded, and which ones a
        claim can have.

        A claim can have those that are loaded, and those that fit where the region can be
        programmed.
        """
        entries = [
            entry for entry in self._store.look().entries if not entry.is_blank and not region.fits(entry.bitstream)
        ]
        loaded = {entry.name for entry in entries if self._has(region, entry, entries, None)}
        can_have = {entry.name for entry in entries} if self.can_program and not region.obstacle else loaded
        facts: dict[str, AttributeValue] = {f"fits_{name}": True for name in sorted(can_have)[:_MOST_FITTING]}
        if len(loaded) == 1:
            facts["function"] = next(iter(loaded))
        return facts

    def loaded(self, region: Region) -> str:
        """Return the id of the loaded function, as far as it is known."""
        programmed = self._remembered(region)
        return programmed.function if programmed is not None else region.shown

    def plan(self, region: Region, wanted: str, context: PrepareContext) -> StoreEntry | Refusal | None:
        """Choose the bitstream to program, or None when the region has the function."""
        entries = [entry for entry in self._store.look().entries if not entry.is_blank and _is_meant(entry, wanted)]
        facts = {"device": region.device, "function": wanted}
        if not entries:
            if wanted == self.loaded(region) and not region.fault:
                return None
            return refuse(
                "function-unknown",
                f"{region.device} has not function {wanted}, and the node's bitstream store has none of that "
                "name or id",
                **facts,
            )
        namespace = context.owner.namespace
        allowed = [entry for entry in entries if entry.is_for(namespace)]
        if not allowed:
            return refuse(
                "function-forbidden",
                f"function {wanted} is not for claims of namespace {namespace!r}",
                **facts,
                namespace=namespace,
            )
        misfits = {entry.digest: region.fits(entry.bitstream) for entry in allowed}
        fitting = [entry for entry in allowed if not misfits[entry.digest]]
        if not fitting:
            text = "; ".join(sorted(set(misfits.values())))
            return refuse("function-misfit", f"function {wanted} does not fit {region.device}: {text}", **facts)
        record = context.records.get(region.device)
        if any(self._has(region, entry, fitting, record) for entry in fitting):
            return None
        if len(fitting) > 1:
            text = ", ".join(f"{entry.name} (sha256:{entry.digest})" for entry in fitting)
            return refuse(
                "function-ambiguous",
                f"several bitstreams for {region.device} are function {wanted}: {text}; name one",
                **facts,
            )
        return self._refuse_programming(region, context, facts) or fitting[0]

    def load(self, look: Look, entry: StoreEntry, record: DeviceRecord) -> Refusal | None:
        """Program a region, and return None when it is done. Blocks as long as the card takes."""
        image = load_image(self._store.folder, entry)
        if isinstance(image, Refusal):
            return image
        region = look()
        facts = {"device": region.device, "function": entry.name, "digest": entry.digest}
        record.undone(_PROGRAM)
        record.intend(_PROGRAM, {"digest": entry.digest, "function": entry.bitstream.function, "was": region.shown})
        try:
            self._write(region, image)
        except RegionUntouched as err:
            record.undone(_PROGRAM)
            return refuse(
                "region-not-programmable",
                f"{region.device} cannot be programmed: {err.filename}: {err.strerror}",
                **facts,
            )
        except OSError as err:
            text = f"programming {region.device} with {entry.name} failed: {err.filename}: {err.strerror or err}"
            return refuse("programming-failed", text, **facts)
        after = look()
        why = self._why_not_loaded(after, entry, region.shown)
        if why:
            return refuse("programming-failed", f"{region.device} was programmed with {entry.name}, but {why}", **facts)
        self._programmed[region.device] = _Programmed(entry.digest, entry.bitstream.function, after.shown)
        record.done(_PROGRAM, {"digest": entry.digest})
        get_logger().info("region.programmed", device=region.device, function=entry.name, digest=entry.digest)
        return None

    def undo(self, look: Look, record: DeviceRecord) -> None:
        """Release what was programmed: the function stays for the next claim.

        Programming that a crash interrupted is repeated.

        Errors: raises HardwareError when the content of the region is unknown and it cannot be
        programmed again.
        """
        step = record.step(_PROGRAM)
        if step is not None and not step.is_done:
            self._mend(look, step)
        record.undone(_PROGRAM)

    def clean(self, look: Look, record: DeviceRecord) -> Refusal | None:
        """Reset the port, and load the blank function where the store has one for this region.

        None when it is clean.
        """
        region = look()
        facts = {"device": region.device}
        record.intend(_RESET)
        if region.reset is not None:
            try:
                self._while_under_way(region.device, region.reset)
            except OSError as err:
                text = f"the port of {region.device} cannot be reset: {err.filename}: {err.strerror or err}"
                return refuse("port-reset-failed", text, **facts, error=str(err.errno))
        blank = self._blank(region)
        if blank is not None and self.loaded(region) != blank.bitstream.function:
            refusal = self._blanked(look, blank, record)
            if refusal is not None:
                return refusal
        record.undone(_BLANK)
        record.undone(_RESET)
        return None

    def _blanked(self, look: Look, blank: StoreEntry, record: DeviceRecord) -> Refusal | None:
        record.intend(_BLANK, {"digest": blank.digest})
        why = self._program(look, blank)
        return refuse("blanking-failed", why, digest=blank.digest) if why else None

    def _mend(self, look: Look, step: Step) -> None:
        region = look()
        expected = {step.before.get("function"), step.before.get("was") if region.shows_at_once else None}
        if region.shown and not region.fault and region.shown in expected:
            return
        intended = self._store.look().find(str(step.before.get("digest")))
        entry = self._blank(region) or intended
        in_doubt = f"{region.device}: programming was cut off, and what is in its region is not known"
        if entry is None or region.fits(entry.bitstream):
            raise HardwareError(
                f"{in_doubt}; the bitstream store has neither the blank function for it nor the file that was "
                "being loaded"
            )
        if not self.can_program:
            raise HardwareError(f"{in_doubt}; nothing is programmed here (functions.program)")
        why = self._program(look, entry)
        if why:
            raise HardwareError(f"{in_doubt}; {why}")

    def _program(self, look: Look, entry: StoreEntry) -> str:
        """Program outside of a claim, and return why it was not done, or ""."""
        image = load_image(self._store.folder, entry)
        if isinstance(image, Refusal):
            return image.reasons[0].message
        region = look()
        try:
            self._write(region, image)
        except OSError as err:
            return f"{region.device} cannot be programmed with {entry.name}: {err.filename}: {err.strerror or err}"
        after = look()
        why = self._why_not_loaded(after, entry, region.shown)
        if not why:
            self._programmed[region.device] = _Programmed(entry.digest, entry.bitstream.function, after.shown)
        return why

    def _write(self, region: Region, image: bytes) -> None:
        self._while_under_way(region.device, lambda: region.program(image))

    def _while_under_way(self, device: str, act: Callable[[], None]) -> None:
        self._turns[device] = self.turn(device) + 1
        try:
            act()
        finally:
            self._turns[device] = self.turn(device) + 1

    def _refuse_programming(self, region: Region, context: PrepareContext, facts: dict[str, str]) -> Refusal | None:
        if region.device in context.looked_at or context.others.get(region.device):
            text = f"{region.device} has another function, and somebody else uses it: it is not programmed under them"
            return refuse("region-in-use", text, **facts)
        if region.obstacle:
            return refuse(
                "region-not-programmable", f"{region.device} cannot be programmed: {region.obstacle}", **facts
            )
        if not self.can_program:
            text = (
                f"{region.device} has another function, and nothing is programmed on this node (functions.program "
                "of the fpga service)"
            )
            return refuse("programming-off", text, **facts)
        return None

    def _has(self, region: Region, entry: StoreEntry, fitting: list[StoreEntry], record: DeviceRecord | None) -> bool:
        """Return whether a region has exactly this bitstream's function."""
        if region.fault:
            return False
        programmed = self._remembered(region)
        if programmed is not None:
            return programmed.digest == entry.digest
        step = record.step(_PROGRAM) if record is not None else None
        is_own = step is not None and step.is_done and step.after.get("digest") == entry.digest
        if is_own and (region.shown == entry.bitstream.function or not region.shows_at_once):
            return True
        # All OpenCL containers of one board package have one id, and so may two builds of one
        # function.
        is_distinct = entry.bitstream.form is not BitstreamForm.AOCX and not any(
            other.bitstream.function == entry.bitstream.function and other.digest != entry.digest for other in fitting
        )
        return is_distinct and region.shown == entry.bitstream.function

    def _remembered(self, region: Region) -> _Programmed | None:
        programmed = self._programmed.get(region.device)
        return programmed if programmed is not None and programmed.shown == region.shown else None

    def _blank(self, region: Region) -> StoreEntry | None:
        """Find the blank function of a region, the first by name of several."""
        if not self.can_program or region.obstacle:
            return None
        return next(
            (entry for entry in self._store.look().entries if entry.is_blank and not region.fits(entry.bitstream)), None
        )

    def _why_not_loaded(self, region: Region, entry: StoreEntry, was: str) -> str:
        if region.fault:
            return region.fault
        function = entry.bitstream.function
        if region.shown == function or (not region.shows_at_once and region.shown in ("", was)):
            return ""
        return f"its region shows function {region.shown or 'none'}, wanted {function}"


def _is_meant(entry: StoreEntry, wanted: str) -> bool:
    return wanted in (entry.name, entry.bitstream.function, f"sha256:{entry.digest}")
