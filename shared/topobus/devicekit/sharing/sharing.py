"""How the containers of one claim share its devices: the strategy in a claim's opaque
configuration, read once for all drivers.

The claim has its devices alone either way: a strategy decides what its containers may do with them.
A driver that does not declare a strategy is never asked for it, and the claim is refused: nothing
is ignored silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from topobus.devicekit.driver import DeviceDriver, PrepareContext
from topobus.formats.kubernetes.classic.classic_parameters import (
    EXCLUSIVE,
    SHARING_KIND,
    SHARING_VERSION,
    TIME_SLICING,
    Sharing,
    check_sharing,
)
from topobus.formats.kubernetes.shape import check_names, read_as
from topobus.values.device import Device
from topobus.values.errors import ContractError
from topobus.values.outcome import Refusal, refuse

__all__ = ["read_sharing", "refuse_sharing", "sharing_of", "with_operators_sharing"]


def read_sharing(config: Sequence[Mapping[str, Any]]) -> Sharing | Refusal | None:
    """Find the strategy in opaque configurations. The last one wins, because claims come after
    classes.

    None when none is requested.

    >>> read_sharing([{"apiVersion": "topobus.dev/v1", "kind": "SharingParameters", "strategy": "MPS"}]).strategy
    'MPS'
    """
    entries = [entry for entry in config if entry.get("kind") == SHARING_KIND]
    if not entries:
        return None
    parameters = {key: value for key, value in entries[-1].items() if key not in ("apiVersion", "kind")}
    if entries[-1].get("apiVersion") != SHARING_VERSION:
        return refuse(
            "sharing-malformed",
            f"{SHARING_KIND}.apiVersion is {entries[-1].get('apiVersion')!r}, wanted {SHARING_VERSION!r}",
        )
    problems: list[Any] = []
    check_names(parameters, Sharing, SHARING_KIND, {}, problems)
    try:
        sharing = read_as(parameters, Sharing, where=SHARING_KIND)
    except ContractError as err:
        return refuse("sharing-malformed", err.message)
    problems.extend(check_sharing(sharing, SHARING_KIND))
    return refuse("sharing-malformed", "; ".join(str(problem) for problem in problems)) if problems else sharing


def sharing_of(devices: Sequence[Device], context: PrepareContext) -> Sharing | Refusal:
    """Find the one strategy for all of a driver's devices in a claim.

    Exclusive when none is requested.

    Errors: refuses a malformed one, and two that differ, because one process cannot apply both.
    """
    sharings: dict[str, Sharing] = {}
    for device in devices:
        sharing = read_sharing(context.config_of(device.name))
        if isinstance(sharing, Refusal):
            return sharing
        sharings[device.name] = sharing or Sharing()
    different = sorted({str(each_sharing) for each_sharing in sharings.values()})
    if len(different) > 1:
        named = ", ".join(f"{name}: {each_sharing.strategy}" for name, each_sharing in sorted(sharings.items()))
        return refuse("sharing-differs", f"devices of one claim are to be shared in different ways: {named}")
    return next(iter(sharings.values()), Sharing())


def with_operators_sharing(
    devices: Sequence[Device],
    config: tuple[dict[str, Any], ...],
    device_config: Mapping[str, tuple[dict[str, Any], ...]],
) -> dict[str, tuple[dict[str, Any], ...]]:
    """Put the operator's configuration of shared devices before that of classes and claims.

    The last one counts.

    Shapes: device_config — by device, in place of `config`, which is for all others; result — the
    same with shared devices.
    """
    configured = dict(device_config)
    for device in devices:
        sharing = device.sharing
        if sharing is None or not sharing.strategy:
            continue
        parameters: dict[str, Any] = {"apiVersion": SHARING_VERSION, "kind": SHARING_KIND, "strategy": sharing.strategy}
        if sharing.strategy == TIME_SLICING and sharing.time_slice:
            parameters["timeSlicingConfig"] = {"interval": sharing.time_slice}
        configured[device.name] = (parameters, *device_config.get(device.name, config))
    return configured


def refuse_sharing(driver: DeviceDriver, devices: Sequence[Device], context: PrepareContext) -> Refusal | None:
    """Refuse a sharing that a driver does not support.

    None when it does, or when none is requested.
    """
    sharing = sharing_of(devices, context)
    if isinstance(sharing, Refusal):
        return sharing
    if sharing.strategy == EXCLUSIVE:
        return None
    if sharing.strategy in driver.sharing_strategies:
        return None
    able = ", ".join((EXCLUSIVE, *sorted(driver.sharing_strategies)))
    message = f"driver {driver.name} cannot share devices by {sharing.strategy}: it knows {able}"
    return refuse("sharing-unsupported", message, driver=driver.name, strategy=sharing.strategy)
