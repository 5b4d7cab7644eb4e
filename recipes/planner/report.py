"""What a command gives back: text to read, and the same as data."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Report(NamedTuple):
    """What the recipes ``plan`` and ``manifest`` return.

    Args:
        text: what the command line shows.
        data: the same as plain data, which ``--json`` writes.
    """

    text: str
    data: Any


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns the cells of rows, the first of each to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        )
        for first, *others in rows
    ]
