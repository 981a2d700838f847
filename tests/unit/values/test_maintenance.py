"""What an operation says of itself."""

import pytest

from topobus.values.maintenance import DeviceOperation, DeviceVerb


@pytest.mark.parametrize(
    ("why", "is_draining", "expected"),
    [
        ("", False, "maintain gpu-0 by ada"),
        ("fan", False, "maintain gpu-0 by ada (fan)"),
        ("fan", True, "maintain --drain gpu-0 by ada (fan)"),
    ],
)
def test_operation_says_its_drain_and_reason_only_when_it_has_them(
    *, why: str, is_draining: bool, expected: str
) -> None:
    """A line about an operation holds the verb, the device, who asked, and what else there is."""
    operation = DeviceOperation(
        device_class="gpu", device="gpu-0", verb=DeviceVerb.MAINTAIN, why=why, who="ada", is_draining=is_draining
    )

    assert operation.text == expected


def test_device_must_be_free_for_what_acts_on_the_hardware() -> None:
    """Decisions that only say who may have it leave its owners alone."""
    assert [verb.value for verb in DeviceVerb if verb.needs_no_owner] == ["reset", "rebind", "burn-in"]
