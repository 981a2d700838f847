"""Sharing strategies in opaque configuration: read strictly, refused by name where a driver does
not know them.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.toy_driver import ToyDriver
from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.sharing.sharing import read_sharing, refuse_sharing, sharing_of
from topobus.formats.kubernetes.classic.classic_parameters import MpsConfig, Sharing
from topobus.values.device import Device
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

OWNER = Owner(kind=OwnerKind.CLAIM, name="c", uid="u")
DEVICES = (Device(name="a", device_class="gpu"), Device(name="b", device_class="gpu"))


def _config(**fields: Any) -> dict[str, Any]:
    return {"apiVersion": "topobus.dev/v1", "kind": "SharingParameters", **fields}


class _Sharer(ToyDriver):
    sharing_strategies = frozenset({"MPS"})


def test_sharing_is_the_claims_when_class_and_claim_have_one() -> None:
    """Class configurations come first, so the last word is the claim's.

    Other kinds are not sharing's.
    """
    sharing = read_sharing(
        [
            _config(strategy="TimeSlicing"),
            _config(strategy="MPS", mpsConfig={"defaultActiveThreadPercentage": 20}),
            {"kind": "AlignmentParameters"},
        ]
    )

    assert sharing == Sharing(strategy="MPS", mps_config=MpsConfig(default_active_thread_percentage=20))
    assert read_sharing([{"kind": "AlignmentParameters"}]) is None


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (_config(strategy="Sometimes"), "got 'Sometimes', wanted one of Exclusive, TimeSlicing, MPS"),
        (_config(strategy="MPS") | {"apiVersion": "v9"}, "apiVersion is 'v9'"),
        (_config(stratgy="MPS"), 'unknown field, did you mean "strategy"?'),
        (_config(strategy=["MPS"]), "Expected `str`"),
        (_config(strategy="MPS", mpsConfig={"defaultActiveThreadPercentage": 101}), "got 101, wanted 1 to 100"),
    ],
)
def test_sharing_is_refused_when_it_cannot_be_read(config: dict[str, Any], wanted: str) -> None:
    """A typing error never shares a device otherwise than its user meant."""
    refusal = read_sharing([config])

    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].code == "sharing-malformed"
    assert wanted in refusal.reasons[0].message


def test_sharing_is_refused_when_devices_of_a_claim_differ() -> None:
    """One process cannot keep to two strategies."""
    context = PrepareContext(
        owner=OWNER, config=(_config(strategy="MPS"),), device_config={"b": (_config(strategy="TimeSlicing"),)}
    )

    refusal = sharing_of(DEVICES, context)

    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].code == "sharing-differs"


@pytest.mark.parametrize(
    ("driver", "strategy", "code"),
    [
        (ToyDriver("toy", count=1), "MPS", "sharing-unsupported"),
        (ToyDriver("toy", count=1), "Exclusive", ""),
        (_Sharer("toy", count=1), "MPS", ""),
        (_Sharer("toy", count=1), "TimeSlicing", "sharing-unsupported"),
    ],
)
def test_sharing_is_refused_when_the_driver_does_not_know_it(driver: ToyDriver, strategy: str, code: str) -> None:
    """A driver says what it knows; nothing that it does not know is ignored."""
    refusal = refuse_sharing(driver, DEVICES, PrepareContext(owner=OWNER, config=(_config(strategy=strategy),)))

    assert (refusal.reasons[0].code if refusal is not None else "") == code
