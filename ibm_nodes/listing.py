"""Listing: the objects of a dataset, which the order of its documents depends on."""

import contextvars
import hashlib
import itertools
import posixpath
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from ibm_nodes import listing_file
from ibm_nodes.once import Once
from ibm_nodes.storage import Object, Options, find, is_at_hand, read, read_whole, write

T = TypeVar("T")

FROM_STORE = "from_store"
CACHED_FILES = 512
CACHED_BLOCKS = 4096
COMPANIONS = {".bin": ".idx"}
"""Objects that are no data but without which those beside them, of the same name with the first ending, are none."""


class Listing:
    """The objects of a dataset, sorted by key: what the order of its documents depends on.

    Args:
        url: the prefix, or one object.
        objects: what is under it.
        storage_options: fsspec's options for its store. They never show in a state, an error or a repr.
        companions: what lies beside the objects and is needed to read them.

    Attributes:
        starts: where each object begins in the dataset's bytes, and, last, their sum.
        digest: a hash of keys and sizes.
        reported: bad places that were logged, so that each is once.
    """

    def __init__(
        self,
        url: str,
        objects: Sequence[Object],
        storage_options: Options = None,
        companions: Sequence[Object] = (),
    ) -> None:
        self.url = url
        self.objects = sorted(objects, key=lambda item: item.key)
        self.companions = sorted(companions, key=lambda item: item.key)
        self.starts = [0, *itertools.accumulate(item.size for item in self.objects)]
        text = "\n".join(f"{item.key}\0{item.size}" for item in (*self.objects, *self.companions))
        self.digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        self.storage_options = storage_options
        self.reported: set[tuple[str, int, int | None]] = set()
        self._files: Once[Any] = Once(CACHED_FILES)
        self._blocks: Once[Any] = Once(CACHED_BLOCKS, weak=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return Listing, (self.url, self.objects, self.storage_options, self.companions)

    def __str__(self) -> str:
        return f"{len(self.objects)} files of {self.starts[-1]} bytes (listing {self.digest})"

    def write(self, url: str, storage_options: Options = None) -> None:
        """Writes it to a file, for ``Reader(listing=...)``; each object stays pinned to the version listed.

        Args:
            url: the file, at any store that fsspec knows.
            storage_options: fsspec's options for its store.
        """
        write(url, listing_file.encode(self.url, self._is_one, self.objects, self.companions), storage_options)

    def encode(self) -> bytes:
        """Gives keys and sizes as the bytes of such a file, which are the same wherever the objects lie."""
        objects, companions = ([item._replace(version=None) for item in each] for each in self._both)
        return listing_file.encode("", False, objects, companions)

    @property
    def _both(self) -> tuple[list[Object], list[Object]]:
        return self.objects, self.companions

    @property
    def _is_one(self) -> bool:
        return [item.url for item in self.objects] == [self.url]

    def file(self, key: Any, make: Callable[[], T]) -> T:
        """Gives what ``make`` opens, once for all who ask with the same key."""
        opened: T = self._files.get(key, make)
        return opened

    def opened(self, key: Any) -> Any:
        """Gives what ``file`` has opened with that key, or None."""
        return self._files.peek(key)

    def block(self, key: Any, make: Callable[[], T]) -> T:
        """Gives what ``make`` reads, once for all who hold it at the same time."""
        block: T = self._blocks.get(key, make)
        return block

    def read(self, item: Object, start: int, end: int) -> bytes | bytearray:
        """Reads bytes [start, end) of an object, as it was listed.

        Raises:
            OSError: if it has changed, is gone, or cannot be read.
        """
        return read(item, start, end, self.storage_options)


class StoredObject:
    """An object of a listing, which a format reads in ranges.

    Attributes:
        url: its full URL.
        key: its place under the prefix.
        size: its bytes.
    """

    def __init__(self, listing: Listing, item: Object) -> None:
        self._listing, self._item = listing, item
        self.url, self.key, self.size = item.url, item.key, item.size

    def is_at_hand(self, start: int, end: int) -> bool:
        """Tells whether bytes [start, end) are in memory, and reading them takes no time to speak of."""
        return is_at_hand(self._item, start, end, self._listing.storage_options)

    def read(self, start: int, end: int) -> bytes | bytearray:
        """Reads bytes [start, end), as the object was listed.

        Raises:
            ValueError: if the object ends before: then it is damaged, and says so of itself.
            OSError: if it has changed, is gone, or cannot be read.
        """
        if not 0 <= start <= end <= self.size:
            raise ValueError(
                f"{self.url} is damaged: it refers to its bytes {start} to {end}, and was listed with {self.size}"
            )
        try:
            return self._listing.read(self._item, start, end)
        except BaseException as error:
            vars(error)[FROM_STORE] = True  # which its class does not tell: pyarrow raises OSError for damaged data
            raise

    def companion(self) -> "StoredObject":
        """Gives the object that lies beside this one and is needed to read it.

        Raises:
            FileNotFoundError: if it was not listed.
        """
        url = _companion(self.url)
        for item in self._listing.companions:
            if item.url == url:
                return StoredObject(self._listing, item)
        raise FileNotFoundError(f"{url} is not there: {self.url} cannot be read without it; put it beside that file")


def came_from_store(error: BaseException) -> BaseException | None:
    """Gives what a read of an object raised, if an error is that, or was raised from that."""
    cause: BaseException | None = error
    while cause is not None and FROM_STORE not in vars(cause):
        cause = cause.__cause__
    return cause


class ListingSession:
    """Within it, readers of the same prefix share one listing: ``with session: reader.reset(state)``.

    Args:
        saved: gives the listing that a state was saved with, by its digest, or None where it is not known.
        expected: of datasets that other states were saved with, by name, the description of their listings.

    Attributes:
        used: the listings that data were read by, by digest.
    """

    def __init__(
        self, saved: Callable[[str], Listing | None] | None = None, expected: Mapping[str, str] | None = None
    ) -> None:
        self.saved = saved or (lambda digest: None)
        self.expected = expected or {}
        self.used: dict[str, Listing] = {}
        self._listings: Once[Listing] = Once(None)
        self._tokens: list[contextvars.Token[ListingSession | None]] = []

    def __enter__(self) -> "ListingSession":
        self._tokens.append(_session.set(self))
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        _session.reset(self._tokens.pop())

    def listing(
        self, url: str, storage_options: Options, suffixes: tuple[str, ...], given: Listing | str | None = None
    ) -> Listing:
        """Gives the listing of a prefix, made or read from the given file at the first call, or the given one."""
        if isinstance(given, Listing):
            return given
        return self.share(
            (url, suffixes, given), storage_options, lambda: load_listing(url, storage_options, suffixes, given)
        )

    def share(self, key: tuple[Any, ...], storage_options: Options, make: Callable[[], Listing]) -> Listing:
        """Gives the listing of a key and of a store's options, made at the first call."""
        return self._listings.get((key, repr(sorted((storage_options or {}).items(), key=str))), make)


def listings_in(state: Any) -> dict[str, str]:
    """Gives the descriptions of listings that readers' states in a state name, of each dataset of which there is one.

    So readers that have no state yet, in logical shards that were not visited, take the files of the others.
    """
    found: dict[str, set[str]] = {}
    _find_listings(state, found)
    return {name: next(iter(texts)) for name, texts in found.items() if len(texts) == 1}


def _find_listings(state: Any, found: dict[str, set[str]]) -> None:
    if isinstance(state, dict):
        if "listing" in state and "name" in state:
            found.setdefault(state["name"], set()).update({state["listing"]} - {None})
        state = list(state.values())
    for value in state if isinstance(state, list | tuple) else ():
        if isinstance(value, dict | tuple):
            _find_listings(value, found)


_session: contextvars.ContextVar[ListingSession | None] = contextvars.ContextVar("session", default=None)


def current_session() -> ListingSession:
    """Gives the session that the caller is in, or a new one."""
    return _session.get() or ListingSession()


def load_listing(
    url: str, storage_options: Options = None, suffixes: tuple[str, ...] = ("",), given: str | None = None
) -> Listing:
    """Lists a prefix as ``list_objects`` does, or reads the file that was written of it and asks the store nothing."""
    if given is None:
        return list_objects(url, storage_options, suffixes)
    entries = listing_file.decode(read_whole(given, storage_options), given)
    listing = _place(entries, url, storage_options)
    objects = [item for item in listing.objects if item.url == url or _is_data(item.key, suffixes)]
    if not objects:
        raise FileNotFoundError(
            f"no data under {url} in the listing {given}: it has {len(listing.objects)} other objects; give the one of "
            f"a prefix with files that end in one of {', '.join(suffixes)}"
        )
    needed = {_companion(item.url) for item in objects}
    return Listing(url, objects, storage_options, [item for item in listing.companions if item.url in needed])


def decode_listing(data: bytes, place: str) -> Listing:
    """Gives the keys and sizes that ``Listing.encode`` made bytes of; nothing can be read by them.

    Raises:
        ValueError: if they are damaged, or something else; names the place.
    """
    entries = listing_file.decode(data, place)
    objects, companions = ([Object("", *entry) for entry in each] for each in (entries.objects, entries.companions))
    return Listing("", objects, None, companions)


def _place(entries: listing_file.Entries, url: str, storage_options: Options) -> Listing:
    """Gives the objects as they lie under a prefix; elsewhere than they were listed they have other versions."""
    folder, urls = url.rstrip("/"), {}
    if entries.is_one:
        folder, urls = posixpath.dirname(url), {posixpath.basename(url): url}
        if not urls.keys() == {key for key, _, _ in entries.objects}:
            raise ValueError(f"{url} cannot be read by a listing of the one file {entries.objects[0][0]!r}: list it")
    is_there = url.rstrip("/") == entries.url.rstrip("/")
    objects, companions = (
        [
            Object(urls.get(key, f"{folder}/{key}" if folder else key), key, size, version if is_there else None)
            for key, size, version in each
        ]
        for each in (entries.objects, entries.companions)
    )
    return Listing(url, objects, storage_options, companions)


def list_objects(url: str, storage_options: Options = None, suffixes: tuple[str, ...] = ("",)) -> Listing:
    """Lists a prefix afresh, in one go.

    Left out: empty objects, and below the prefix names that begin with ``_`` or ``.`` and endings not in
    ``suffixes``. A URL of one object is always read.

    Raises:
        FileNotFoundError: if there is nothing to read.
        PermissionError, ConnectionError, OSError: as the store says.
    """
    found = find(url, storage_options)
    objects = [item for item in found if item.size and (item.url == url or _is_data(item.key, suffixes))]
    needed = {_companion(item.url) for item in objects} - {""}
    companions = [item for item in found if item.url in needed]
    if url in {item.url for item in objects} and needed:
        companions = [
            item._replace(key=posixpath.basename(item.url)) for item in find(next(iter(needed)), storage_options)
        ]
    if not objects:
        seen = f"{len(found)} other objects" if found else "nothing"
        raise FileNotFoundError(
            f"no data under {url}: it holds {seen}; give a prefix with files that end in one of {', '.join(suffixes)}"
        )
    return Listing(url, objects, storage_options, companions)


def _companion(url: str) -> str:
    """Gives the URL of an object's companion, or nothing where it has none."""
    root, ending = posixpath.splitext(url)
    return root + COMPANIONS[ending] if ending in COMPANIONS else ""


def _is_data(key: str, suffixes: tuple[str, ...]) -> bool:
    hidden = any(part.startswith(("_", ".")) for part in key.split("/"))
    return not hidden and key.lower().endswith(suffixes)
