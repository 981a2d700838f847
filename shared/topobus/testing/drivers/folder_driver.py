"""A driver with everything that a driver may have, for cards that are folders: `ls` shows what a
crash leaves.

A card is a folder `sys/cards/<name>` below the tree's root, with the files `mac`, `mtu`, `image`,
and `dirt` where a user leaves it. To attach it is to set its MTU and to move the folder into the
sandbox's, as a network interface moves into a namespace. To prepare it with `{"image": …}` is to
program it (`{"is_slow": true}`: as long work). To clean it is to remove the dirt. It is the sample
of docs/how-to/write-a-driver.md, and the subject of the crash tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from topobus.devicekit.driver import DeviceDriver, DeviceRecord, Discovery, LongWork, PrepareContext
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.health import Dimension, HealthState, Observation
from topobus.values.machine import Machine
from topobus.values.outcome import Reason, Refusal
from topobus.values.sandbox import AttachedInterface, ContainerName, Sandbox

__all__ = ["CARDS", "FolderDriver", "make_card"]

CARDS = "sys/cards"
_LARGEST_MTU = 9216
_LONG_WORK_S = 30.0


def make_card(root: Path, name: str, mac: str = "02:00:00:00:00:01") -> Path:
    """Make a card, as its vendor delivers it, below a tree's root."""
    card = root / CARDS / name
    card.mkdir(parents=True)
    for file, text in (("mac", mac), ("mtu", "1500"), ("image", "factory")):
        (card / file).write_text(text, encoding="utf-8")
    return card


class FolderDriver(DeviceDriver):
    """Drives cards that are folders."""

    name = "folder"
    device_class = "nic"

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        """Find the cards that no sandbox has."""
        cards = tree.path(CARDS)
        folders = sorted(path for path in cards.iterdir() if path.is_dir()) if cards.is_dir() else []
        return Discovery(
            devices=[
                Device(
                    name=card.name,
                    device_class=self.device_class,
                    driver=self.name,
                    attributes={"mac": _read(card / "mac")},
                )
                for card in folders
            ]
        )

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Check whether the cards exist."""
        gone = Observation(dimension=Dimension.PRESENCE, state=HealthState.UNHEALTHY, reason="device-gone")
        return {device.name: (gone,) for device in devices if not (tree.path(CARDS) / device.name).is_dir()}

    def check(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> Refusal | None:
        """Refuse an MTU that no card has."""
        for device in devices:
            mtu = _setting(context, device, "mtu")
            if mtu and not 68 <= int(mtu) <= _LARGEST_MTU:
                text = f"mtu of {device.name} is {mtu}, wanted 68 to {_LARGEST_MTU}"
                return Refusal(reasons=(Reason(code="mtu", message=text, facts={"device": device.name}),))
        return None

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | LongWork | Refusal:
        """Program the cards that a claim wants programmed."""
        # A device in its owner's sandbox was programmed before, and is out of sight.
        present = [device for device in devices if device.name not in context.attached]
        images = {device.name: _read(_home(tree, device) / "image") for device in present}
        wanted = [device for device in present if _setting(context, device, "image") not in ("", images[device.name])]

        def program() -> Mapping[str, ContainerEdits]:
            for device in wanted:
                _program(_home(tree, device), _setting(context, device, "image"), context.records[device.name])
            return {
                device.name: ContainerEdits(env={f"CARD_{device.name.upper().replace('-', '_')}": "1"})
                for device in devices
            }

        if any(_setting(context, device, "is_slow") for device in wanted):
            names = ", ".join(device.name for device in wanted)
            return LongWork(limit_s=_LONG_WORK_S, what=f"programming {names}", work=program)
        return program()

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Restore the cards' images."""
        for device in devices:
            _undo(context.records.get(device.name), {"blank": partial(_restore, _home(tree, device), "image")})

    def adjust(
        self, tree: Tree, device: Device, context: PrepareContext, container: ContainerName
    ) -> ContainerEdits | Refusal:
        """Give the container its own name, in a variable of the card."""
        return ContainerEdits(env={f"CARD_USER_{device.name.upper().replace('-', '_')}": container.name})

    def to_attach(self, devices: Sequence[Device], context: PrepareContext) -> Sequence[str]:
        """Attach all cards."""
        return [device.name for device in devices]

    def attach(
        self, tree: Tree, device: Device, context: PrepareContext, sandbox: Sandbox, record: DeviceRecord
    ) -> AttachedInterface | Refusal | None:
        """Set the MTU and move the card."""
        card, inside = _home(tree, device), Path(sandbox.network_namespace)
        if not inside.is_dir():
            raise HardwareError(f"the sandbox's folder {inside} is not there")
        name = _setting(context, device, "name") or "net1"
        mtu = _read(card / "mtu")
        record.intend("mtu", {"mtu": mtu})
        (card / "mtu").write_text(_setting(context, device, "mtu") or mtu, encoding="utf-8")
        record.done("mtu")
        if (inside / name).exists():
            return Refusal(
                reasons=(Reason(code="name-taken", message=f"the sandbox has a {name} already", facts={"name": name}),)
            )
        record.intend("move", {"name": name})
        card.rename(inside / name)
        record.done("move")
        return AttachedInterface(name=name, mac=_read(inside / name / "mac"), mtu=int(_read(inside / name / "mtu")))

    def detach(self, tree: Tree, device: Device, sandbox: Sandbox | None, record: DeviceRecord) -> None:
        """Move the card back, and restore its MTU. Its place shows how far attach came."""
        card = _home(tree, device)

        def move_back(before: Mapping[str, object]) -> None:
            inside = (
                Path(record.sandbox.network_namespace) / str(before["name"]) if record.sandbox is not None else card
            )
            if not card.exists():
                inside.rename(card)

        _undo(record, {"move": move_back, "mtu": partial(_restore, card, "mtu")})

    def clean(self, tree: Tree, device: Device, record: DeviceRecord) -> Refusal | None:
        """Remove the dirt. Dirt that is `stuck` must be removed by hand."""
        dirt = _home(tree, device) / "dirt"
        if dirt.exists() and _read(dirt) == "stuck":
            return Refusal(reasons=(Reason(code="stuck", message=f"the dirt on {device.name} is stuck"),))
        record.intend("sweep")
        dirt.unlink(missing_ok=True)
        record.undone("sweep")
        return None


def _program(card: Path, image: str, record: DeviceRecord) -> None:
    record.intend("blank", {"image": _read(card / "image")})
    (card / "image").write_text("", encoding="utf-8")
    record.done("blank")
    (card / "image").write_text(image, encoding="utf-8")


def _undo(record: DeviceRecord | None, acts: Mapping[str, Callable[[Mapping[str, object]], None]]) -> None:
    for step in reversed(record.steps if record is not None else ()):
        acts[step.name](step.before)
        if record is not None:
            record.undone(step.name)


def _restore(card: Path, file: str, before: Mapping[str, object]) -> None:
    (card / file).write_text(str(before[file]), encoding="utf-8")


def _home(tree: Tree, device: Device) -> Path:
    return tree.path(CARDS) / device.name


def _setting(context: PrepareContext, device: Device, name: str) -> str:
    values = [str(part[name]) for part in context.config_of(device.name) if name in part]
    return values[-1] if values else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as err:
        raise HardwareError(f"{path}: cannot be read: {err}", path=str(path)) from err
