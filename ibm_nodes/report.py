"""What the command line shows: numbers in words, a run's progress and summary, and the table of a check."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

Report = Mapping[str, Any]

BOUNDS = {
    "store": "the store: most of the wait was for reads; more ranks, larger blocks or a nearer bucket would help",
    "decoding": "decoding: most of the wait was for decoding, mixing and packing on this rank's cores; more ranks would help",
    "consumer": "the consumer: data was ready when it was asked for",
}


def count(number: float) -> str:
    """Writes a number with three digits and a letter: 1.23 M."""
    for letter in ("", " k", " M", " G"):
        if abs(number) < 999.5:
            return f"{number:.3g}{letter}"
        number /= 1000
    return f"{number:,.3g} T" if number < 999.5 else f"{number:,.0f} T"


def size(number: float) -> str:
    """Writes a number of bytes: 1.2 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TiB"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns the cells of rows: the first and the last column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *middle, last in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True))]
        lines.append("  ".join([*cells, last]).rstrip())
    return lines


def run_line(report: Report, tokens_per_second: float) -> str:
    """Writes the progress of a run as one line."""
    parts = [f"step {report['steps']:,}", f"{count(report['tokens'])} tokens", f"{count(tokens_per_second)} tokens/s"]
    for name, entry in report["datasets"].items():
        parts.append(f"{name} {_shares(entry)}, {entry['passes']:.3g} passes")
    return " | ".join([*parts, f"waited {report['waited_seconds']:.1f} s"])


def run_panel(title: str, report: Report | None, tokens_per_second: float, seconds: float) -> Group:
    """Draws the progress of a run for a terminal."""
    clock = datetime.timedelta(seconds=int(seconds))
    if report is None:
        return Group(Text.assemble((title, "bold"), f"  {clock}  waiting for the first batch"))
    head = Text.assemble(
        (title, "bold"),
        f"  {clock}  step {report['steps']:,}  {count(report['tokens'])} tokens  ",
        (f"{count(tokens_per_second)} tokens/s", "bold"),
        f"  waited {report['waited_seconds']:.1f} s for data",
    )
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("dataset", "tokens", "share", "weight", "passes"):
        table.add_column(name, justify="left" if name == "dataset" else "right")
    for name, entry in report["datasets"].items():
        table.add_row(
            name,
            count(entry.get("tokens", 0)),
            f"{entry.get('share', 1):.1%}",
            f"{entry.get('weight', 1):.1%}",
            f"{entry['passes']:.3f}",
        )
    return Group(head, table)


def run_summary(report: Report) -> list[str]:
    """Writes what a run did, and what bounded it."""
    lines = [
        f"{report['steps']:,} steps, {report['tokens']:,} tokens in {report['seconds']:.1f} s: "
        f"{count(report['tokens_per_second'])} tokens/s on this rank; the first batch came after {report['start_seconds']:.1f} s"
    ]
    rows = [("dataset", "tokens", "share", "weight", "passes", "")]
    for name, entry in report["datasets"].items():
        share, weight = f"{entry.get('share', 1):.1%}", f"{entry.get('weight', 1):.1%}"
        rows.append((name, count(entry.get("tokens", 0)), share, weight, f"{entry['passes']:.3f}", ""))
    lines += columns(rows) if report["datasets"] else []
    store = report["store"]
    lines.append(f"read {size(store['bytes'])} in {store['requests']:,} requests")
    if report["bound"]:
        lines.append(f"waited for data {report['waited_share']:.0%} of the time, for reads {report['store_share']:.0%}")
        lines.append(f"bounded by {BOUNDS[report['bound']]}")
    return lines
