"""What the command line shows: a run's progress and summary, the table of a check, and numbers in words."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ibm_nodes.quarantine import describe

Report = Mapping[str, Any]

MAX_WORLD_SIZES = 40
BOUNDS = {
    "store": "the store: more ranks, larger blocks or a nearer bucket would help",
    "decoding": "decoding, mixing and packing on this rank's cores: more ranks would help",
    "consumer": "the consumer: data was ready when it was asked for",
}
DATASET_HEAD = ("dataset", "tokens", "share", "weight", "passes")
CHECKPOINT_HEAD = ("step", "state", "ranks", "position", "bytes", "lineage")
STEP_HEAD = ("dataset", "tokens", "documents", "share", "weight", "passes", "epoch")
CHECK_HEAD = ("dataset", "files", "bytes", "tokens", "weight", "passes", "largest id", "column")


def count(number: float) -> str:
    """Writes a number with three digits and a letter, such as 1.23 M."""
    for letter in ("", " k", " M", " G"):
        if number < 999.5:
            return f"{number:.3g}{letter}"
        number /= 1000
    return f"{number:.3g} T" if number < 999.5 else f"{number:,.0f} T"


def size(number: float) -> str:
    """Writes a number of bytes, such as 1.2 MiB."""
    if number < 1024:
        return f"{number:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        number /= 1024
        if number < 1024:
            return f"{number:.1f} {unit}"
    return f"{number / 1024:,.1f} TiB"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns the cells of rows, the first of each to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells))
    return lines


def run_line(report: Report, tokens_per_second: float) -> str:
    """Writes the progress of a run as one line."""
    parts = [f"step {report['steps']:,}", f"{count(report['tokens'])} tokens", f"{count(tokens_per_second)} tokens/s"]
    for row in _datasets(report):
        name, _, share, weight, passes = row
        parts.append(f"{name} {share} (weight {weight}), {passes} passes")
    return " | ".join([*parts, f"waited {report['waited_seconds']:.1f} s"])


def run_panel(title: str, report: Report | None, tokens_per_second: float, seconds: float) -> Group:
    """Draws the progress of a run on a terminal."""
    clock = f"  {datetime.timedelta(seconds=int(seconds))}  "
    if report is None:
        return Group(Text.assemble((title, "bold"), clock, "waiting for the first batch"))
    head = Text.assemble(
        (title, "bold"),
        f"{clock}step {report['steps']:,}  {count(report['tokens'])} tokens  ",
        (f"{count(tokens_per_second)} tokens/s", "bold"),
        f"  waited {report['waited_seconds']:.1f} s for data",
    )
    table = Table(box=None, header_style="dim")
    for name in DATASET_HEAD:
        table.add_column(name, justify="left" if name == "dataset" else "right")
    for row in _datasets(report):
        table.add_row(*row)
    return Group(head, table)


def run_summary(report: Report) -> list[str]:
    """Writes what a run did, and what bounded it."""
    steps = f"{report['steps']:,} step{'s' if report['steps'] != 1 else ''}"
    lines = [f"{steps}, {report['tokens']:,} tokens in {report['seconds']:.1f} s"]
    if not report["batches"]:
        return [f"{lines[0]}: no batch came"]
    lines[0] += (
        f": {count(report['tokens_per_second'])} tokens/s on this rank, after {report['start_seconds']:.1f} s for the "
        "first batch"
    )
    lines += columns([DATASET_HEAD, *_datasets(report)])
    lines += _used_up(report)
    packing = report["packing"]
    lines.append(
        f"packed {packing['documents']:,} documents: {packing['truncated']:.2%} truncated, {packing['dropped']:.2%} "
        f"dropped; {packing['padding']:.2%} of the samples is padding"
    )
    waited = f"{report['waited_share']:.0%} of the time, {report['store_share']:.0%} for the store"
    lines.append(f"read {size(report['bytes'])} in {report['requests']:,} requests; waited for data {waited}")
    return [*lines, f"bounded by {BOUNDS[report['bound']]}"]


def check_summary(report: Report) -> list[str]:
    """Writes what a check found."""
    rows = [CHECK_HEAD]
    for name, entry in report["datasets"].items():
        largest_id, vocab_size = entry["largest_id"], entry["vocab_size"]
        rows.append(
            (
                name,
                f"{entry['files']:,}",
                size(entry["bytes"]),
                "?" if entry["tokens"] is None else f"~{count(entry['tokens'])}",
                f"{entry['share']:.1%}",
                "-" if entry["passes"] is None else f"~{entry['passes']:.3g}",
                "?" if largest_id is None else f"{largest_id:,}" + (f" of {vocab_size:,}" if vocab_size else ""),
                f"{entry['column']}: {entry['type'] or '?'}",
            )
        )
    return [*columns(rows), "", *(f"{name}: {text}" for name, text in _facts(report).items())]


def checkpoint_list(entries: Sequence[Report]) -> list[str]:
    """Writes the table of what is saved, by step."""
    rows = [CHECKPOINT_HEAD]
    for entry in entries:
        position, missing = entry["position"], len(entry["missing"])
        rows.append(
            (
                f"{entry['step']:,}",
                f"{missing:,} of {entry['world_size']:,} files missing" if missing else "complete",
                f"{entry['world_size']:,}",
                "?" if position is None else f"{position:,}",
                size(entry["bytes"]),
                entry["lineage"],
            )
        )
    lines = columns(rows)
    for entry in entries:
        lines += [f"step {entry['step']:,} lacks {name}" for name in entry["missing"]]
        lines += [f"step {entry['step']:,}: {entry['fault']}"] if entry["fault"] else []
    return lines


def checkpoint_step(report: Report) -> list[str]:
    """Writes what one saved step holds."""
    rows: list[tuple[str, ...]] = [STEP_HEAD]
    for (name, tokens, *others), entry in zip(_datasets(report), report["datasets"].values(), strict=True):
        documents = f"{entry['documents']:,}" if "documents" in entry else "?"
        low, high = entry.get("epochs", (0, 0))
        rows.append((name, tokens, documents, *others, f"{low}" if low == high else f"{low} to {high}"))
    sizes = report["bytes_per_rank"]
    batch = report["settings"].get("global_batch_size")
    return [
        f"step {report['step']:,}: {report['position']:,} samples, {count(report['tokens'])} tokens drawn, "
        f"{report['num_shards']:,} logical shards" + (f", batches of {batch:,} samples" if batch else ""),
        *columns(rows),
        *_used_up(report),
        *_scheduled(report["schedule"]),
        f"bytes a rank: {size(min(sizes))} to {size(max(sizes))}, {size(sum(sizes))} on {len(sizes):,} ranks",
        *(
            f"quarantined of {place['dataset']}: {describe(place['first'], place['end'])} of {place['file']}, in "
            f"{place['shards']} logical shard{'s' if place['shards'] != 1 else ''}: {place['reason']}"
            for place in report["quarantined"]
        ),
    ]


def _scheduled(schedule: Report | None) -> list[str]:
    """Writes the weights and the length of samples that are in force, and where they change."""
    if schedule is None:
        return []
    counted = [entry["seq_len"] for entry in schedule["seq_lens"]] != [1]
    line = ", in a line to the next" if schedule["interpolate"] else ""
    lines = [f"weights in force: {_shares(schedule['weights'])}"]
    if len(schedule["entries"]) > 1:
        for entry in schedule["entries"]:
            at = _from(entry) if counted else f"sample {entry['sample']:,}"
            lines.append(f"weights from {at} on: {_shares(entry['weights'])}{line}")
        lines[-1] = lines[-1].removesuffix(line)
    lines += [
        f"weights set in the run, from sample {entry['sample']:,} on: {_shares(entry['weights'])}"
        for entry in schedule["changes"]
    ]
    if counted:
        lines.append(f"seq_len in force: {schedule['seq_len']:,}")
    if len(schedule["seq_lens"]) > 1:
        lines += [f"seq_len from {_from(entry)} on: {entry['seq_len']:,}" for entry in schedule["seq_lens"]]
    return lines


def _from(entry: Report) -> str:
    return f"sample {entry['sample']:,} ({count(entry['tokens'])} tokens)"


def _shares(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in weights.items())


def _used_up(report: Report) -> list[str]:
    used_up = {name: entry["used_up"] for name, entry in report["datasets"].items() if entry.get("used_up")}
    return [f"{name} is used up in {share:.0%} of the logical shards" for name, share in used_up.items()]


def trace_summary(report: Report) -> list[str]:
    """Writes the documents of each sample of a step."""
    since = f"since step {report['since']:,}" if report["since"] else "since the start"
    lines = [
        f"step {report['step']:,}: samples {report['begin']:,} to {report['end'] - 1:,} of {report['num_shards']:,} "
        f"logical shards, replayed {since}"
    ]
    for sample in report["samples"]:
        lines.append(f"row {sample['row']:,}: sample {sample['sample']:,}, logical shard {sample['shard']:,}")
        lines += _documents(sample)
    return lines


def show_summary(report: Report) -> list[str]:
    """Writes the documents of the first samples."""
    lines = []
    for sample in report["samples"]:
        lines.append(f"sample {sample['sample']:,} of logical shard {sample['shard']:,}")
        lines += _documents(sample)
    return lines


def _documents(sample: Report) -> list[str]:
    lines = []
    for document in sample["documents"]:
        lines.append(
            f"  {document['at']:,}: {document['dataset']}, {document['url']}, {document['place']}, "
            f"tokens {document['begin']:,} to {document['end']:,}" + (" after BOS" if document["bos"] else "")
        )
        if "text" in document:
            lines.append(f"    {document['text']!r}")
    return lines


def _facts(report: Report) -> dict[str, str]:
    sizes = [str(size) for size in report["world_sizes"]]
    if len(sizes) > MAX_WORLD_SIZES:
        sizes[MAX_WORLD_SIZES // 2 : -MAX_WORLD_SIZES // 2] = ["..."]
    memory = size(report["memory_bytes"])
    facts = {
        "logical shards": f"{report['num_shards']:,}",
        "world sizes that work": ", ".join(sizes) or "none",
        "memory of a rank": f"~{memory} at world size {report['world_size']}, beside Python and torch",
    }
    if report["num_samples"] and report["global_batch_size"]:
        steps = report["num_samples"] / report["global_batch_size"]
        facts["steps"] = f"{steps:,.0f} for {count(report['num_tokens'])} tokens"
    again = {name: entry["resume_bytes"] for name, entry in report["datasets"].items() if entry["resume_bytes"]}
    if again:
        facts["resuming reads again"] = ", ".join(f"up to {size(most)} of {name}" for name, most in again.items())
    return facts


def _datasets(report: Report) -> list[tuple[str, ...]]:
    """Gives the rows of the table of datasets."""
    return [
        (
            name,
            count(entry.get("tokens", 0)),
            f"{entry.get('share', 1):.1%}",
            f"{entry.get('weight', 1):.1%}",
            f"{entry['passes']:.3f}",
        )
        for name, entry in report["datasets"].items()
    ]
