"""How silent services are shown: which, since when, and what follows.

Silence is no fault: devices are Unknown, and holders keep what they hold. The alignment that each
node's topology publishes names the silent services. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import structs

from topobus.console.rules.node_drawing import View
from topobus.engine.health.silence import SERVICE_SILENT, TOPOLOGY, unheard
from topobus.values.device import Inventory
from topobus.values.timestamps import short_time

__all__ = ["API_SERVER", "silence_view", "with_silence"]

API_SERVER = "API server"


def with_silence(inventories: Mapping[str, Inventory], silent: Mapping[str, str]) -> dict[str, Inventory]:
    """Return the inventories by class, with the devices of silent services as Unknown and a warning
    with the reason.
    """
    shown = {}
    for device_class, inventory in sorted(inventories.items()):
        since = silent.get(device_class)
        if since is None:
            shown[device_class] = inventory
        else:
            warning = (
                f"{SERVICE_SILENT}: no answer since {short_time(since)}; its devices are unknown, and new pods "
                "get none of them"
            )
            shown[device_class] = structs.replace(
                unheard(inventory, since=since), warnings=(warning, *inventory.warnings)
            )
    return shown


def silence_view(node: str, what: str, since: str, classes: Iterable[str], trouble: str = "") -> View:
    """Return the entry of a silent service, with what follows from its silence.

    Shapes: trouble — what is known of the reason.
    """
    if what == API_SERVER:
        follows = f"claims and pods are shown as they last were: {trouble}"
    elif what == TOPOLOGY:
        follows = (
            "what is shown of this node may be old, and no pod gets devices there "
            f"({', '.join(sorted(classes)) or 'none'}); running pods continue"
        )
    else:
        follows = "its devices are Unknown and new pods get none of them; what is held stays held"
    return {"node": node, "service": what, "state": "silent", "since": since, "message": follows}
