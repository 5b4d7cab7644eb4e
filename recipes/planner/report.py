"""What a command gives back: text to read, and the same as data."""

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ibm_nodes import flags


class Report(NamedTuple):
    """What ``plan`` and ``manifest`` return.

    Args:
        text: what the command line shows.
        data: the same as plain data, which ``--json`` writes.
    """

    text: str
    data: Any


def tell(function: Callable[..., Report], given: Sequence[str], say: Callable[[str], None]) -> int:
    """Runs a function that gives a report as the command of its name, and gives the exit code.

    Raises:
        ValueError, LookupError, TypeError, OSError, ImportError: as the function does, and for flags that are none.
    """
    name = function.__name__
    first = (inspect.getdoc(function) or "").partition("\n\n")[0]
    parser = flags.command_parser(f"ibm-nodes {name}", first, {f"what to {name}": (function, ())})
    parser.add_argument("--json", action="store_true", help="write the result as one line of JSON")
    options = parser.parse_args(given)
    report = function(**flags.arguments(function, options))
    say(json.dumps(report.data) if options.json else report.text)
    return 0


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns the cells of rows, the first of each to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        )
        for first, *others in rows
    ]
