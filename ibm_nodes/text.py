"""Text: tokenizers, and what a person reads of tokens, by a tokenizer or byte by byte."""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ibm_nodes.storage import Options, read_whole

ToText = Callable[[Sequence[int]], str]

NUM_BYTES = 256


def bytes_to_text(tokens: Sequence[int]) -> str:
    """Reads tokens as UTF-8, each id below 256 as a byte; another id is written as a number in angle brackets."""
    parts = bytearray()
    for token in tokens:
        parts += bytes([token]) if token < NUM_BYTES else f"<{token}>".encode()
    return parts.decode("utf-8", "replace")


def load_tokenizer(url: str, storage_options: Options = None) -> tuple[Any, str]:
    """Gives a tokenizer, and a hash of its file. Nothing but the file is read: no hub is asked.

    Args:
        url: a ``tokenizer.json``: a path on a disk, or a URL at any store that fsspec knows.
        storage_options: fsspec's options for the store.

    Raises:
        ImportError: if the library ``tokenizers`` is not installed.
        FileNotFoundError, PermissionError, OSError: if it cannot be read.
        ValueError: if it is no ``tokenizer.json``.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(
            "tokenizers must be installed to use a tokenizer, and is not: pip install 'ibm-nodes[text]'"
        ) from error
    data = read_whole(url, storage_options)
    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises no narrower class
        raise ValueError(
            f"{url} is no tokenizer.json of the library tokenizers ({error}): give the file that its save() wrote"
        ) from error
    return tokenizer, hashlib.blake2b(data, digest_size=8).hexdigest()


def tokenizer_to_text(url: str, storage_options: Options = None) -> ToText:
    """Gives a function that decodes tokens; an id that the tokenizer does not know is written in angle brackets.

    Special tokens are written too. Arguments and errors are those of ``load_tokenizer``.
    """
    tokenizer, _ = load_tokenizer(url, storage_options)

    def to_text(tokens: Sequence[int]) -> str:
        runs = itertools.groupby(tokens, lambda token: tokenizer.id_to_token(token) is not None)
        return "".join(
            tokenizer.decode(list(run), skip_special_tokens=False) if known else "".join(f"<{token}>" for token in run)
            for known, run in runs
        )

    return to_text
