"""Listings beside checkpoints: which files each dataset had, kept once for all steps, by digest."""

import logging
from typing import Any

from ibm_nodes.listing import Listing, decode_listing
from ibm_nodes.sharder import Sharder
from ibm_nodes.storage import Options, read_whole, write

logger = logging.getLogger(__name__)


def claim(root: str, sharder: Sharder[Any], claimed: set[str]) -> dict[str, Listing]:
    """Gives the listings that this rank has to keep now, by place, and notes that it does.

    Each is one rank's and one save's, without a word to the others.
    """
    mine = {
        _place(root, digest): listing
        for digest, listing in sharder.used_listings().items()
        if int(digest, 16) % sharder.world_size == sharder.rank
    }
    new = {place: listing for place, listing in mine.items() if place not in claimed}
    claimed.update(new)
    return new


def write_claimed(listings: dict[str, Listing], claimed: set[str], storage_options: Options) -> None:
    """Writes listings; if that fails, the next save may claim them again."""
    try:
        for place, listing in listings.items():
            write(place, listing.encode(), storage_options)
    except BaseException:
        claimed.difference_update(listings)
        raise


def read(url: str, digest: str, storage_options: Options = None) -> Listing | None:
    """Reads the listing that was kept of a dataset, or gives None if it is not there or damaged."""
    place = _place(url.rstrip("/"), digest)
    try:
        return decode_listing(read_whole(place, storage_options), place)
    except FileNotFoundError:
        return None
    except ValueError as error:
        logger.warning("a saved listing is left out: %s", error)
        return None


def _place(root: str, digest: str) -> str:
    return f"{root}/listings/{digest}.jsonl.gz"
