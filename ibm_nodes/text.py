"""Text: what a person reads of tokens, by a tokenizer or byte by byte."""

import itertools
import os
from collections.abc import Callable, Sequence

from ibm_nodes.storage import Options, read_whole

ToText = Callable[[Sequence[int]], str]

NUM_BYTES = 256


def bytes_to_text(tokens: Sequence[int]) -> str:
    """Reads tokens as UTF-8, each id below 256 as a byte; another id is written as a number in angle brackets."""
    parts = bytearray()
    for token in tokens:
        parts += bytes([token]) if token < NUM_BYTES else f"<{token}>".encode()
    return parts.decode("utf-8", "replace")


def tokenizer_to_text(url: str, storage_options: Options = None) -> ToText:
    """Gives a function that decodes tokens; an id that the tokenizer does not know is written in angle brackets.

    Special tokens are written too. Nothing but the file is read: no hub is asked.

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
            "tokenizers must be installed to decode with a tokenizer, and is not: pip install 'ibm-nodes[text]'"
        ) from error
    data = read_whole(url if "://" in url else f"file://{os.path.abspath(url)}", storage_options)
    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises no narrower class
        raise ValueError(
            f"{url} is no tokenizer.json of the library tokenizers ({error}): give the file that its save() wrote"
        ) from error

    def to_text(tokens: Sequence[int]) -> str:
        runs = itertools.groupby(tokens, lambda token: tokenizer.id_to_token(token) is not None)
        return "".join(
            tokenizer.decode(list(run), skip_special_tokens=False) if known else "".join(f"<{token}>" for token in run)
            for known, run in runs
        )

    return to_text
