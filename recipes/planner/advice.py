"""The first change that would help, found by planning again with each."""

from collections.abc import Iterator
from dataclasses import replace

from ibm_nodes.recipes.planner.job import Job
from ibm_nodes.recipes.planner.outcome import Outcome, largest_batch, outcome

GAIN = 1.05
"""How many times as fast a device must become for a change to be worth a word."""
MAX_NODES = 1 << 20


def first_change(found: Outcome) -> str | None:
    """Gives the first change, in order of what it costs the user, that makes a device at least 5 % faster and fits."""
    for text, job in _faster(found.job):
        changed = outcome(job)
        gain = changed.tokens_per_second / found.tokens_per_second
        if changed.fits and gain >= GAIN:
            return (
                f"{text}: {gain:.2f} times as fast, {changed.memory.total / 1e9:.1f} GB a device, "
                f"communication {changed.verdict}"
            )
    return None


def remedy(job: Job) -> str:
    """Gives the first change, in order of what it costs the user, with which a job fits."""
    for text, changed in _smaller(job):
        if outcome(changed).fits:
            return f"it would fit with {text}"
    return "no batch, sharding or number of nodes makes it fit: choose a smaller model or more memory"


def _faster(job: Job) -> Iterator[tuple[str, Job]]:
    yield "the limiter", replace(job, limiter=True)
    yield "reduction in bf16", replace(job, reduce_bytes=job.param_bytes)
    yield "strategy hybrid", replace(job, strategy="hybrid")
    yield "strategy node", replace(job, strategy="node")
    yield "strategy no-reshard", replace(job, strategy="no-reshard")
    yield "activation checkpointing none", replace(job, recompute=0.0)
    yield "activation checkpointing op", replace(job, recompute="op")
    most = largest_batch(job)
    if most > job.batch:
        batch = min(most, 2 * job.batch)
        yield f"batch {batch}, which changes the global batch", replace(job, batch=batch)
    accumulate = 2 * job.accumulate
    yield f"accumulate {accumulate}, which changes the global batch", replace(job, accumulate=accumulate)


def _smaller(job: Job) -> Iterator[tuple[str, Job]]:
    yield "the limiter", replace(job, limiter=True)
    yield "strategy full", replace(job, strategy="full")
    yield "activation checkpointing full", replace(job, recompute=1.0)
    if most := largest_batch(job):
        yield f"batch {most}", replace(job, batch=most)
    if job.strategy != "hybrid":
        nodes = 2 * job.cluster.nodes
        while nodes <= MAX_NODES:
            yield f"{nodes} nodes", replace(job, cluster=replace(job.cluster, nodes=nodes))
            nodes *= 2
