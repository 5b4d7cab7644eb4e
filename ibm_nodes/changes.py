"""Changes: what becomes of a dataset whose files are not those that a state was saved with."""

from collections.abc import Callable, Sequence
from functools import partial

from ibm_nodes.listing import Listing, ListingSession
from ibm_nodes.storage import Object

ON_CHANGE = ("error", "keep", "restart")
NUM_NAMED = 4


def check_on_change(on_change: str, epochs: int | None) -> None:
    """Checks what is to become of a dataset that has changed.

    Raises:
        ValueError: if there is no such way, or it does not go with epochs.
    """
    if on_change not in ON_CHANGE:
        raise ValueError(f"on_change must be one of {', '.join(ON_CHANGE)}, got {on_change!r}")
    if on_change == "restart" and epochs is not None:
        raise ValueError(
            f'on_change="restart" must come with epochs=None, got {epochs}: logical shards in which the dataset has '
            "ended would not begin again"
        )


def settle(
    listing: Callable[[], Listing], *, name: str, expected: str | None, keep: bool, session: ListingSession
) -> Listing:
    """Gives the listing that a dataset is read by.

    Args:
        listing: gives what there is now.
        name: the dataset's name.
        expected: the description of the listing that its state was saved with, or None.
        keep: take the files of then, if all of them are there, and do not refuse.
        session: knows the listings of then, and takes note of what is used.

    Raises:
        ValueError: naming the files that differ.
    """
    now = listing()
    if expected is not None and expected != str(now):
        then = session.saved(expected.rpartition(" ")[2].rstrip(")"))
        if not keep or then is None:
            raise ValueError(_refusal(name, expected, then, now, keep))
        key = "kept", now.url, expected
        now = session.share(key, now.storage_options, partial(_keep, then, now, name))
    session.used[now.digest] = now
    return now


def _refusal(name: str, expected: str, then: Listing | None, now: Listing, keep: bool) -> str:
    changed = f"dataset {name!r} was saved with {expected} under {now.url}, now there are {now}"
    if keep:
        return f'{changed}, and on_change="keep" needs the listing of then: {_differences(then, now)}'
    return (
        f"{changed}: {_differences(then, now)}. Documents would be lost or repeated: bring the files back, give "
        'on_change="keep" to read the files of then alone, or "restart" to begin this dataset again'
    )


def _keep(then: Listing, now: Listing, name: str) -> Listing:
    """Gives the files of then, pinned to the versions of now."""
    found = {item.key: item for item in (*now.objects, *now.companions)}
    wanted = [*then.objects, *then.companions]
    gone = [item.key for item in wanted if item.key not in found]
    resized = _resized(wanted, found)
    if gone or resized:
        parts = [("missing", gone), ("of another size", resized)]
        raise ValueError(
            f"dataset {name!r} cannot be kept as it was saved: {_words(parts)}; bring these files back, or give "
            'on_change="restart" to begin this dataset again'
        )
    objects, companions = ([found[item.key] for item in each] for each in (then.objects, then.companions))
    return Listing(now.url, objects, now.storage_options, companions)


def _differences(then: Listing | None, now: Listing) -> str:
    if then is None:
        return (
            "which files differ cannot be told, since only the digests of listings are in a state: "
            f"checkpoint.save keeps listings beside its checkpoints; or compare those that ibm-nodes list {now.url} "
            "--out FILE writes, and give Reader the one of then as listing"
        )
    before, after = ({item.key: item for item in (*each.objects, *each.companions)} for each in (then, now))
    parts = [
        ("added", [key for key in after if key not in before]),
        ("removed", [key for key in before if key not in after]),
        ("of another size", _resized(list(before.values()), after)),
    ]
    return _words(parts)


def _resized(before: Sequence[Object], after: dict[str, Object]) -> list[str]:
    return [
        f"{item.key} ({item.size} bytes, now {after[item.key].size})"
        for item in before
        if item.key in after and item.size != after[item.key].size
    ]


def _words(parts: Sequence[tuple[str, list[str]]]) -> str:
    return "; ".join(
        f"{what} {', '.join(keys[:NUM_NAMED])}"
        + (f" and {len(keys) - NUM_NAMED} more" if len(keys) > NUM_NAMED else "")
        for what, keys in parts
        if keys
    )
