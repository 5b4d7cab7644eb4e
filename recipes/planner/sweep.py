"""A sweep: the same job for several values of one of its numbers, with the limiter and without."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ibm_nodes.recipes.planner.job import Job
from ibm_nodes.recipes.planner.outcome import Outcome, largest_batch, outcome
from ibm_nodes.recipes.planner.report import columns

SWEPT = ("nodes", "batch", "seq_len", "accumulate")
HEAD = ("GB", "step s", "tokens/s", "MFU", "scaling", "network", "no limiter")


@dataclass(frozen=True)
class Row:
    """One value of a sweep.

    Args:
        value: the value.
        limited: what comes of the job with the limiter.
        unlimited: the same without, with the largest batch that fits then, if it is smaller; None if none fits.
    """

    value: int
    limited: Outcome
    unlimited: Outcome | None


def parse_sweep(text: str) -> tuple[str, list[int]]:
    """Reads a name and its values, such as nodes=8,16,32.

    Raises:
        ValueError: if it is not that.
    """
    name, _, values = text.partition("=")
    try:
        numbers = [int(value) for value in values.split(",")]
    except ValueError:
        numbers = []
    if name not in SWEPT or not numbers or min(numbers) < 1:
        raise ValueError(
            f"sweep must be one of {', '.join(SWEPT)} with numbers above 0, such as nodes=8,16,32, got {text!r}"
        )
    return name, numbers


def run_sweep(values: Sequence[int], make: Callable[[int], Job]) -> list[Row]:
    """Plans the job that ``make`` gives for each value."""
    rows = []
    for value in values:
        job = make(value)
        free = replace(job, limiter=False)
        most = min(job.batch, largest_batch(free))
        rows.append(
            Row(value, outcome(replace(job, limiter=True)), outcome(replace(free, batch=most)) if most else None)
        )
    return rows


def sweep_data(name: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Gives a sweep as plain data; speed is None where memory does not fit."""
    return [
        {
            name: row.value,
            "memory_bytes": row.limited.memory.total,
            "fits": row.limited.fits,
            **_speed(row.limited if row.limited.fits else None),
            "no_limiter": _speed(row.unlimited) | {"batch": row.unlimited.job.batch if row.unlimited else None},
        }
        for row in rows
    ]


def _speed(found: Outcome | None) -> dict[str, Any]:
    return {
        "step_seconds": found and found.seconds,
        "tokens_per_second": found and found.tokens_per_second,
        "mfu": found and found.mfu,
        "scaling": found and found.scaling,
        "verdict": found and found.verdict,
    }


def sweep_text(name: str, rows: Sequence[Row]) -> str:
    """Writes a sweep as a table."""
    table: list[tuple[str, ...]] = [(name.replace("_", " "), *HEAD)]
    for row in rows:
        found = row.limited
        cells = [f"{found.memory.total / 1e9:.1f}"]
        if found.fits:
            cells += [f"{found.seconds:.3g}", f"{found.tokens_per_second:,.0f}", f"{found.mfu:.1%}"]
            cells += [f"{found.scaling:.0%}", found.verdict]
        else:
            cells += ["-", "-", "-", "-", "memory does not fit"]
        table.append((f"{row.value:,}", *cells, _without(row)))
    return "\n".join(
        [
            *columns(table),
            "scaling: speed of a device as a share of its speed on one node",
            "no limiter: the same without it, with the largest batch that fits then",
        ]
    )


def _without(row: Row) -> str:
    found = row.unlimited
    return f"{found.scaling:.0%} (batch {found.job.batch})" if found else "memory does not fit"
