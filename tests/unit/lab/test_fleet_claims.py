"""The claims of the fleet benchmark."""

from __future__ import annotations

from lab.fleet.fleet_claims import GPUS_OF_FOUR, fleet_claim


def test_claims_are_an_even_mixture() -> None:
    """Of four two want a pair, one a GPU with a NIC, one a single GPU: six GPUs."""
    requests = [fleet_claim(number).spec["devices"]["requests"] for number in range(4)]
    gpus = [
        request["exactly"]["count"]
        for each in requests
        for request in each
        if request["exactly"]["deviceClassName"] == "gpu.topobus.dev"
    ]

    assert sum(gpus) == GPUS_OF_FOUR
    assert [len(each) for each in requests] == [1, 1, 2, 1]
