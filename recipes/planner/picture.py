"""The picture of a sweep: scaling efficiency with the limiter and without."""

from collections.abc import Sequence

from ibm_nodes.recipes.planner.sweep import Row


def draw(path: str, title: str, name: str, rows: Sequence[Row]) -> None:
    """Writes the picture to a file, of the kind that its name's end says.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if the end of the name is of no kind of picture.
        OSError: if the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install 'ibm-nodes[plot]'") from error
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    limited = [(row.value, 100 * row.limited.scaling) for row in rows if row.limited.fits]
    free = [(row.value, 100 * row.unlimited.scaling, row.unlimited.job.batch) for row in rows if row.unlimited]
    if limited:
        batches = sorted({row.limited.job.batch for row in rows})
        label = f"with the limiter, batch {_span(batches)}"
        axes.plot(*zip(*limited, strict=True), marker="o", color="#0f62fe", label=label)
    if free:
        values, scaling, used = zip(*free, strict=True)
        label = f"without it, largest batch that fits: {_span(sorted(set(used)))}"
        axes.plot(values, scaling, marker="s", linestyle="--", color="#da1e28", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks([row.value for row in rows], [f"{row.value:,}" for row in rows])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, 105)
    axes.set_xlabel(name.replace("_", " "))
    axes.set_ylabel("speed of a device, % of one node's")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if limited or free:
        axes.legend()
    figure.savefig(path, dpi=150)


def _span(batches: Sequence[int]) -> str:
    return f"{batches[0]}" if batches[0] == batches[-1] else f"{batches[0]} to {batches[-1]}"
