"""Writes a path matrix as text: the words of `nvidia-smi topo -m`, in as many blocks of columns as
the terminal needs, then the affinities, the names and the legend.

No line is wider than the width. What does not fit is folded, and nothing is left out. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from topobus.cli.render.listing import fold, hanging
from topobus.engine.drawing.path_matrix import MatrixDevice, PathMatrix

__all__ = ["matrix_lines"]

Column = Sequence[Sequence[str]]
"""Cells from the title down, each of one line or several."""

_GAP = "  "
_NOT_KNOWN = "N/A"
_STYLES = {"X": "faint", "NV": "ok", "PIX": "ok", "PXB": "ok", "SYS": "warn", "?": "warn"}
_AFFINITIES = ("CPU affinity", "NUMA affinity", "GPU NUMA ID")


def matrix_lines(matrix: PathMatrix, width: int) -> Iterable[Text]:
    """Write the matrix, no line wider than `width` except for a single wider name.

    Order: blocks of columns; the affinities beside the last block where there is room, else in
    blocks of their own; which device is which; the legend.
    """
    ids = [device.id for device in matrix.devices]
    head = max(map(len, ids))
    room = width - head
    words = [[[ids[place]], *([row[place]] for row in matrix.words)] for place in range(len(ids))]
    texts = zip(_AFFINITIES, zip(*map(_affinity, matrix.devices), strict=True), strict=True)
    affinities = [[[title], *(_folded(text, room - len(_GAP)) for text in column)] for title, column in texts]
    blocks = list(_blocks(words, room))
    if _size((*blocks[-1], *affinities)) <= room:
        blocks[-1] += affinities
    else:
        blocks += _blocks(affinities, room)
    for block in blocks:
        yield from _block(["", *ids], head, block)
        yield Text("")
    for device in matrix.devices:
        names = _GAP.join(part for part in (device.name, device.interface, device.model) if part)
        yield from hanging(Text(f"{device.id.ljust(head)}{_GAP}"), Text(names), width)
    yield Text("")
    for word, meaning in matrix.legend.items():
        yield from hanging(Text(f"{word:<4} = ", "faint"), Text(meaning, "faint"), width)


def _affinity(device: MatrixDevice) -> tuple[str, str, str]:
    own = str(device.gpu_numa_id) if device.gpu_numa_id is not None else _NOT_KNOWN
    return str(device.cpu_affinity) or _NOT_KNOWN, str(device.numa_affinity) or _NOT_KNOWN, own


def _folded(text: str, width: int) -> list[str]:
    return [line.plain for line in fold(Text(text), max(width, 1))]


def _width_of(column: Column) -> int:
    return max(len(line) for cell in column for line in cell)


def _size(columns: Iterable[Column]) -> int:
    return sum(len(_GAP) + _width_of(column) for column in columns)


def _blocks(columns: Iterable[Column], room: int) -> Iterable[list[Column]]:
    """Divide columns into blocks that fit. A block has at least one."""
    block: list[Column] = []
    for column in columns:
        if block and _size((*block, column)) > room:
            yield block
            block = []
        block.append(column)
    yield block


def _block(rows: Sequence[str], head: int, columns: Sequence[Column]) -> Iterable[Text]:
    sizes = list(map(_width_of, columns))
    for number, row in enumerate(rows):
        for height in range(max(len(column[number]) for column in columns)):
            line = Text((row if not height else "").ljust(head), "title" if not number else "name")
            for column, size in zip(columns, sizes, strict=True):
                cell = column[number][height] if height < len(column[number]) else ""
                line.append(_GAP)
                line.append(
                    cell.ljust(size),
                    "title" if not number else _STYLES.get("NV" if cell.startswith("NV") else cell, ""),
                )
            line.rstrip()
            line.no_wrap = True
            yield line
