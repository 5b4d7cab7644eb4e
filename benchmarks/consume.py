"""Draws batches from local Arrow files and does nothing else, for tools that count what that takes.

python benchmarks/consume.py NUM_BATCHES DIRECTORY
"""

import itertools
import pathlib
import sys

import corpus
import pipeline

from ibm_nodes import Loader

TOKENS, NUM_SHARDS = 3_000_000, 8


def main() -> None:
    """Builds the corpus, unless it is there, and draws."""
    num_batches, directory = int(sys.argv[1]), pathlib.Path(sys.argv[2])
    urls = corpus.build(directory, num_tokens=TOKENS, layouts=["arrow"], tokens_per_file=TOKENS // 10)["arrow"]
    with Loader(pipeline.batcher(urls, NUM_SHARDS)) as loader:
        for _ in itertools.islice(loader, num_batches):
            pass


if __name__ == "__main__":
    main()
