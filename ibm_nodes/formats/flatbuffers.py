"""Tables of a flatbuffer, as far as Arrow's frozen metadata (File.fbs, Message.fbs) needs them.

pyarrow reads that metadata too, but gives no offsets away, and reads a record batch at a time.
"""

import struct
from typing import NamedTuple


class Table(NamedTuple):
    """A table at a position of the data."""

    data: bytes | bytearray | memoryview
    position: int

    @classmethod
    def root(cls, data: bytes | bytearray | memoryview, position: int = 0) -> "Table":
        """Gives the table that a flatbuffer which begins at the position is about."""
        return cls(data, position + struct.unpack_from("<I", data, position)[0])

    def field(self, number: int) -> int:
        """Gives where a field lies, or 0 where it has its default."""
        table = self.position - int(struct.unpack_from("<i", self.data, self.position)[0])
        slot = 4 + 2 * number
        (size,) = struct.unpack_from("<H", self.data, table)
        offset: int = struct.unpack_from("<H", self.data, table + slot)[0] if slot < size else 0
        return self.position + offset if offset else 0

    def table(self, number: int) -> "Table | None":
        """Gives the table that a field refers to."""
        at = self.field(number)
        return Table.root(self.data, at) if at else None

    def vector(self, number: int) -> tuple[int, int]:
        """Gives where the elements of a vector begin, and their number."""
        at = self.field(number)
        if not at:
            return 0, 0
        at += struct.unpack_from("<I", self.data, at)[0]
        return at + 4, struct.unpack_from("<I", self.data, at)[0]

    def integer(self, number: int, kind: str) -> int:
        """Gives an integer of a ``struct`` type, 0 by default."""
        at = self.field(number)
        return int(struct.unpack_from(f"<{kind}", self.data, at)[0]) if at else 0
