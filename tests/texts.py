"""Texts that tests tokenize, and a tokenizer that was trained on them."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ibm_nodes import storage

TEXTS = [f"Document {number}: naïve ☃ — {'yes no ' * (number % 4)}end." for number in range(60)]
END = "<|endoftext|>"
BEGIN = "<|begin|>"


def train() -> Tokenizer:
    """A byte-level BPE that puts BEGIN before a text if it may."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=[END, BEGIN], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $0", special_tokens=[(BEGIN, 1)])
    return made


def save(url: str, storage_options=None, **changes: int) -> str:
    """Writes the tokenizer's file; gives its URL."""
    made = train()
    if "max_length" in changes:
        made.enable_truncation(changes["max_length"])
        made.enable_padding(length=changes["max_length"])
    storage.write(url, made.to_str().encode(), storage_options)
    return url
