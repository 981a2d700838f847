"""Writes a path matrix as text: the words of `nvidia-smi topo -m`, in as many blocks of columns as the terminal needs, then the affinities, the names and the legend. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from topobus.domain.path_matrix import MatrixDevice, PathMatrix

__all__ = ["matrix_lines"]

_GAP = "  "
_NOT_TOLD = "N/A"
_STYLES = {"X": "faint", "NV": "ok", "PIX": "ok", "PXB": "ok", "SYS": "warn", "?": "warn"}
_AFFINITIES = ("CPU affinity", "NUMA affinity", "GPU NUMA ID")


def matrix_lines(matrix: PathMatrix, width: int) -> Iterable[Text]:
    """Write the matrix, no line wider than `width` but for one name or list of CPUs that is.

    Order: blocks of columns; the affinities beside the last block where there is room, else in a block of their own; which device is which; the legend.
    """
    ids = [device.id for device in matrix.devices]
    head = max(map(len, ids))
    columns = [[ids[place], *(row[place] for row in matrix.words)] for place in range(len(ids))]
    sizes = [max(map(len, column)) for column in columns]
    affinities = [[title, *texts] for title, texts in zip(_AFFINITIES, zip(*map(_affinity, matrix.devices), strict=True), strict=True)]
    affinity_sizes = [max(map(len, column)) for column in affinities]
    blocks = _blocks(sizes, width - head)
    for number, block in enumerate(blocks):
        used = head + sum(sizes[place] + len(_GAP) for place in block)
        has_all = number == len(blocks) - 1 and used + sum(size + len(_GAP) for size in affinity_sizes) <= width
        yield from _block(
            ["", *ids],
            head,
            [columns[place] for place in block] + (affinities if has_all else []),
            [sizes[place] for place in block] + (affinity_sizes if has_all else []),
        )
        yield Text("")
        if number == len(blocks) - 1 and not has_all:
            yield from _block(["", *ids], head, affinities, affinity_sizes)
            yield Text("")
    for device in matrix.devices:
        parts = [device.id.ljust(head), device.name, device.model]
        yield _fit(Text(_GAP.join(part for part in parts if part)), width)
    yield Text("")
    for word, meaning in matrix.legend.items():
        yield _fit(Text(f"{word:<4} = {meaning}", "faint"), width)


def _affinity(device: MatrixDevice) -> tuple[str, str, str]:
    own = str(device.gpu_numa_id) if device.gpu_numa_id is not None else _NOT_TOLD
    return str(device.cpu_affinity) or _NOT_TOLD, str(device.numa_affinity) or _NOT_TOLD, own


def _blocks(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Part columns into blocks that fit; a block has at least one."""
    blocks: list[list[int]] = [[]]
    left = room
    for place, size in enumerate(sizes):
        need = size + len(_GAP)
        if blocks[-1] and need > left:
            blocks.append([])
            left = room
        blocks[-1].append(place)
        left -= need
    return blocks


def _block(rows: Sequence[str], head: int, columns: Sequence[Sequence[str]], sizes: Sequence[int]) -> Iterable[Text]:
    for number, row in enumerate(rows):
        line = Text(row.ljust(head), "title" if not number else "name")
        for column, size in zip(columns, sizes, strict=True):
            cell = column[number]
            line.append(_GAP)
            line.append(cell.ljust(size), "title" if not number else _STYLES.get("NV" if cell.startswith("NV") else cell, ""))
        line.rstrip()
        line.no_wrap = True
        yield line


def _fit(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line
