"""The invariant of every ledger: no device and no CPU is held by two owners, except by share, and
no replica of a shared device by two.

Each transition that takes something calls it before its ledger can be stored, and so does the
reader of a ledger that another process may have written.
"""

from __future__ import annotations

from topobus.values.errors import InvariantError
from topobus.values.idset import CpuSet
from topobus.values.ledger import Ledger

__all__ = ["check_holders"]


def check_holders(ledger: Ledger) -> None:
    """Make sure that nothing is held twice, except by share.

    Errors: raises InvariantError that names the device and both owners. This is our own bug, never
            a user's.
    """
    holders: dict[tuple[str, str], tuple[str, bool]] = {}
    replicas: dict[tuple[str, str, int], str] = {}
    # As numbers: a set for each holding of a node's pods would be most of an adoption.
    bits_of_all = 0
    for key, allocation in ledger.allocations.items():
        bits = 0
        for holding in allocation.holdings:
            bits |= holding.cpus.bits
            for device_class, names in holding.devices.items():
                shares = holding.shared.get(device_class, ())
                for name in names:
                    by_share = name in shares
                    other, is_other_share = holders.setdefault((device_class, name), (key, by_share))
                    if other != key and not (by_share and is_other_share):
                        raise InvariantError(
                            f"ledger of {ledger.node}: {device_class} {name} is held by {other} and by {key}"
                        )
            for device_class, held in holding.shares.items():
                for name, share in held.items():
                    for number in share.replicas:
                        other = replicas.setdefault((device_class, name, number), key)
                        if other != key:
                            text = (
                                f"ledger of {ledger.node}: replica {number} of {device_class} {name} is held by "
                                f"{other} and by {key}"
                            )
                            raise InvariantError(text)
        if bits & bits_of_all:
            twice = CpuSet.from_bits(bits & bits_of_all)
            raise InvariantError(f"ledger of {ledger.node}: CPUs {twice} are held by {key} and by another owner")
        bits_of_all |= bits
