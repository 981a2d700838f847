"""A bounded view into a file or a buffer: every read is checked against its end, so that a hostile
length neither reads elsewhere nor allocates.

No read is larger than the caller's own bound.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["ByteWindow", "UnreadableBitstream"]


class UnreadableBitstream(ValueError):
    """A file that does not follow its format. The message names the place and what was wanted
    there.
    """


@dataclass(frozen=True)
class ByteWindow:
    """`size` bytes from `start` on."""

    read_at: Callable[[int, int], bytes]
    """Reads at most so many bytes at an offset of the whole: `read_at(size, offset)`, as os.pread
    does."""
    size: int
    start: int = 0

    @classmethod
    def of_bytes(cls, content: bytes) -> ByteWindow:
        """View a buffer."""
        return cls(lambda size, offset: content[offset : offset + size], len(content))

    @classmethod
    def of_file(cls, descriptor: int) -> ByteWindow:
        """View an open file, which must stay open while the window is used."""
        return cls(lambda size, offset: os.pread(descriptor, size, offset), os.fstat(descriptor).st_size)

    def read(self, offset: int, size: int, what: str) -> bytes:
        """Read a part.

        Errors: raises UnreadableBitstream when the part is not wholly inside, or the file has
        become shorter.
        """
        part = self.window(offset, size, what)
        data = self.read_at(part.size, part.start)
        if len(data) != part.size:
            raise UnreadableBitstream(f"{what}: got {len(data)} bytes, wanted {part.size}")
        return data

    def window(self, offset: int, size: int, what: str) -> ByteWindow:
        """Return a part as a window of its own.

        Errors: raises UnreadableBitstream when the part is not wholly inside.
        """
        if offset < 0 or size < 0 or offset + size > self.size:
            raise UnreadableBitstream(f"{what}: bytes {offset} to {offset + size} are outside of its {self.size} bytes")
        return ByteWindow(self.read_at, size, self.start + offset)
