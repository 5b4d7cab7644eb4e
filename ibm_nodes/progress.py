"""A run of a loader without a trainer: what it hands out, how fast, and what bounds it."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.live import Live
from torchdata.nodes import Loader

from ibm_nodes.report import Report, run_line, run_panel
from ibm_nodes.stats import stats

FIRST_LINE_SECONDS = 1.0
LINE_SECONDS = 5.0
PANEL_SECONDS = 0.5
REPORT_SHARE = 0.05
"""How much of the time the taking of numbers may take."""
CONSUMER_SHARE = 0.1
"""A run that waits for data for less of the time than this is bounded by its consumer."""

STORE_KEYS = ("requests", "bytes", "seconds", "waited_seconds")

Show = Callable[["Meter"], None]


class Limits(NamedTuple):
    """Where a run stops; None is no limit."""

    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None


class Mark(NamedTuple):
    """What had been counted at a moment."""

    seconds: float
    waited_seconds: float
    tokens: int
    requests: int
    bytes: int
    store_seconds: float
    store_waited: float


class Meter:
    """Counts what a loader hands out, and how long the consumer waits for it.

    Args:
        loader: a loader with or without nodes of ours.
        batches_per_step: batches of this rank in an optimizer step.
    """

    def __init__(self, loader: Loader[Any], batches_per_step: int = 1) -> None:
        self.loader = loader
        self.batches_per_step = batches_per_step
        self.batches = self.tokens = 0
        self.waited_seconds = self.start_seconds = 0.0
        self.began = time.perf_counter()
        self.at_begin = self.at_first = self._mark(stats(loader))

    @property
    def seconds(self) -> float:
        """How long the run has lasted."""
        return time.perf_counter() - self.began

    @property
    def steps(self) -> int:
        """How many optimizer steps the batches were for."""
        return self.batches // self.batches_per_step

    def draw(self, batches: Iterator[Any]) -> int:
        """Takes a batch, and gives its number of tokens."""
        began = time.perf_counter()
        batch = next(batches)
        self.waited_seconds += time.perf_counter() - began
        num_tokens = _num_tokens(batch)
        self.batches += 1
        self.tokens += num_tokens
        if self.batches == 1:
            self.start_seconds = self.seconds
            self.at_first = self._mark(stats(self.loader))
        return num_tokens

    def reached(self, limits: Limits) -> bool:
        """Tells whether the run has come to a limit."""
        return (
            (limits.steps is not None and self.steps >= limits.steps)
            or (limits.tokens is not None and self.tokens >= limits.tokens)
            or (limits.seconds is not None and self.seconds >= limits.seconds)
        )

    def report(self) -> dict[str, Any]:
        """Gives all numbers as plain data; rates, shares and the bound are of the time after the first batch."""
        found = stats(self.loader)
        now = self._mark(found)
        since = self.at_first if self.batches > 1 else self.at_begin
        seconds = max(now.seconds - since.seconds, 1e-9)
        waited = now.waited_seconds - since.waited_seconds
        read = min(now.store_seconds - since.store_seconds, now.store_waited - since.store_waited, waited)
        return {
            "steps": self.steps,
            "batches": self.batches,
            "tokens": self.tokens,
            "seconds": now.seconds,
            "start_seconds": self.start_seconds,
            "tokens_per_second": (now.tokens - since.tokens) / seconds,
            "waited_seconds": now.waited_seconds,
            "waited_share": waited / seconds,
            "store_share": read / seconds,
            "bound": _bound(waited / seconds, read / seconds) if self.batches else None,
            "position": found["position"],
            "requests": now.requests - self.at_begin.requests,
            "bytes": now.bytes - self.at_begin.bytes,
            "packing": found["packing"],
            "datasets": found["datasets"],
        }

    def _mark(self, found: Report) -> Mark:
        return Mark(self.seconds, self.waited_seconds, self.tokens, *(found["store"][key] for key in STORE_KEYS))


def run(
    meter: Meter, limits: Limits, show: Show, *, pace: float | None = None, after: Callable[[int], None] | None = None
) -> str:
    """Draws batches, and says what stopped it: a limit was "reached", the data "ended", or Ctrl-C: "interrupted".

    Args:
        meter: counts, and has the loader.
        limits: where to stop.
        show: is given the meter now and then.
        pace: tokens a second that this rank's trainer would take; None takes all there are.
        after: is given the number of each optimizer step when it is done.
    """
    batches = iter(meter.loader)
    try:
        while not meter.reached(limits):
            num_tokens = meter.draw(batches)
            handed_out = time.perf_counter()
            show(meter)
            if pace is not None:
                time.sleep(max(0.0, handed_out + num_tokens / pace - time.perf_counter()))
            if after is not None and meter.batches % meter.batches_per_step == 0:
                after(meter.steps)
    except StopIteration:
        return "ended"
    except KeyboardInterrupt:
        return "interrupted"
    return "reached"


@contextlib.contextmanager
def panel(console: Console, title: str) -> Iterator[Show]:
    """Keeps a panel with the progress on a terminal, and removes it at the end."""
    began = time.perf_counter()
    latest: list[tuple[Report | None, float]] = [(None, 0.0)]

    def keep(report: Report, tokens_per_second: float) -> None:
        latest[0] = report, tokens_per_second

    with Live(
        get_renderable=lambda: run_panel(title, *latest[0], time.perf_counter() - began),
        console=console,
        refresh_per_second=4,
        transient=True,
    ):
        yield _every(PANEL_SECONDS, 0.0, keep)


def lines(console: Console) -> Show:
    """Writes the progress as a line every few seconds."""
    return _every(
        LINE_SECONDS, FIRST_LINE_SECONDS, lambda report, speed: console.out(run_line(report, speed), highlight=False)
    )


def _every(interval: float, first: float, put: Callable[[Report, float], None]) -> Show:
    """Gives a function that puts out a report and the speed since the last one, where it is due."""
    due, last_tokens, last_seconds = first, 0, 0.0

    def show(meter: Meter) -> None:
        nonlocal due, last_tokens, last_seconds
        if meter.seconds < due:
            return
        began = time.perf_counter()
        report = meter.report()
        put(report, (meter.tokens - last_tokens) / max(meter.seconds - last_seconds, 1e-9))
        last_tokens, last_seconds = meter.tokens, meter.seconds
        due = meter.seconds + max(interval, (time.perf_counter() - began) / REPORT_SHARE)

    return show


def _bound(waited_share: float, store_share: float) -> str:
    if waited_share < CONSUMER_SHARE:
        return "consumer"
    return "store" if store_share >= waited_share / 2 else "decoding"


def _num_tokens(batch: Any) -> int:
    tensor = batch.get("input_ids") if isinstance(batch, dict) else batch
    return tensor.numel() if isinstance(tensor, torch.Tensor) else 0
