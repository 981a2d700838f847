"""Parses sets of CPUs and nodes as the kernel writes them: masks of hexadecimal words and lists of
ranges.

Old kernels offer masks only, Topobus' own recorded machines also lists. Where both exist they are
equal.
"""

from __future__ import annotations

from typing import TypeVar

from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.idset import CpuSet, IdSet

__all__ = ["parse_mask", "read_cpus", "read_ids"]

_Ids = TypeVar("_Ids", bound=IdSet)


def parse_mask(text: str) -> int:
    """Read a mask such as `00000001,0000ffff` (32-bit words, the highest first) as a bitset.

    Errors: raises ValueError that names the bad word.

    >>> bin(parse_mask("1,80000000"))
    '0b110000000000000000000000000000000'
    """
    bits = 0
    for word in text.strip().split(","):
        # A word left empty is a cleared one in some old kernels.
        bits = bits << 32 | (int(word, 16) if word.strip() else 0)
    if bits < 0:
        raise ValueError(f"not a mask: {text[:60]!r}")
    return bits


def read_cpus(tree: Tree, folder: str, mask: str, listed: str) -> CpuSet | None:
    """Read a CPU set from the mask file of a folder, else from its list file.

    None when it has neither.

    Errors: raises HardwareError for text that is neither.
    """
    text = tree.read(f"{folder}/{mask}")
    if text is not None:
        try:
            return CpuSet.from_bits(parse_mask(text))
        except ValueError as err:
            raise HardwareError(
                f"{folder}/{mask} under {tree.root}: got {text[:60]!r}, wanted a CPU mask", path=f"{folder}/{mask}"
            ) from err
    return read_ids(tree, f"{folder}/{listed}", CpuSet)


def read_ids(tree: Tree, path: str, kind: type[_Ids]) -> _Ids | None:
    """Read a list of CPUs or nodes such as `0-3,8`. None when absent.

    Errors: raises HardwareError for text that is no such list.
    """
    text = tree.read(path)
    if text is None:
        return None
    try:
        return kind.parse(text)
    except ValueError as err:
        raise HardwareError(
            f"{path} under {tree.root}: got {text[:60]!r}, wanted a list of ids", path=path, raw=text[:200]
        ) from err
