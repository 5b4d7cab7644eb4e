"""Text for the benchmarks: JSON lines of made-up words by Zipf's law, and a byte-level BPE trained on some of them."""

import json
import pathlib

import corpus
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

NUM_WORDS, VOCAB_SIZE, NUM_TRAINED = 30_000, 16_000, 3000
END = "<|endoftext|>"
WORDS_PER_FILE = 1_000_000


def build(root: pathlib.Path, *, num_words: int, seed: int = 0) -> tuple[dict[str, str], str]:
    """Writes the texts and the tokenizer, unless they are there; gives URLs by dataset, and the tokenizer's path."""
    stamp, tokenizer = root / "text.json", root / "tokenizer.json"
    settings = [num_words, seed, NUM_WORDS, VOCAB_SIZE, corpus.MEAN_LENGTH, corpus.SIGMA]
    if not (stamp.exists() and json.loads(stamp.read_text()) == settings):
        stamp.unlink(missing_ok=True)
        words = _words(np.random.default_rng(seed))
        for at, (name, weight) in enumerate(corpus.WEIGHTS.items()):
            _write_dataset(root / "text" / name, words, int(num_words * weight), (seed, at))
        _train(texts(root, NUM_TRAINED)).save(str(tokenizer))
        stamp.write_text(json.dumps(settings))
    return {name: f"file://{root.resolve()}/text/{name}/" for name in corpus.WEIGHTS}, str(tokenizer)


def texts(root: pathlib.Path, limit: int) -> list[str]:
    """Reads the first texts of each dataset, ``limit`` in all, in the shares of the mix."""
    found = []
    for name, weight in corpus.WEIGHTS.items():
        lines = (line for path in sorted((root / "text" / name).iterdir()) for line in path.open())
        found += [json.loads(line)["text"] for _, line in zip(range(int(limit * weight)), lines, strict=False)]
    return found


def _words(rng: np.random.Generator) -> np.ndarray:
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    chances = 1 / np.arange(2, 2 + len(letters))
    lengths = rng.integers(2, 11, NUM_WORDS)
    drawn = iter(rng.choice(letters, lengths.sum(), p=chances / chances.sum()))
    return np.array(["".join(letter for letter, _ in zip(drawn, range(length), strict=False)) for length in lengths])


def _write_dataset(folder: pathlib.Path, words: np.ndarray, num_words: int, seed: tuple[int, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    chances = 1 / np.arange(10, 10 + len(words))
    steps = np.cumsum(chances / chances.sum())
    for number, begin in enumerate(range(0, num_words, WORDS_PER_FILE)):
        rng = np.random.default_rng((*seed, number))
        offsets, tokens = corpus.documents(rng, min(num_words - begin, WORDS_PER_FILE))
        drawn = words[np.searchsorted(steps, rng.random(len(tokens)) * steps[-1], "right")]
        with (folder / f"{number:05}.jsonl").open("w") as file:
            for first, last in zip(offsets[:-1], offsets[1:], strict=True):
                file.write(json.dumps({"text": " ".join(drawn[first:last]) + "."}) + "\n")


def _train(some: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        some,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return made
