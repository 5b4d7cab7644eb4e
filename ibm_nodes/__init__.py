"""Composable ``torchdata.nodes`` that stream training data from object storage, the same at any world size."""

from ibm_nodes.attention import document_ids, flex_block_mask
from ibm_nodes.batcher import Batcher
from ibm_nodes.collator import CausalLMCollator
from ibm_nodes.end_together import EndTogether
from ibm_nodes.filter import Filter
from ibm_nodes.formats import Lists, ShardFile, list_dataset
from ibm_nodes.items import Document, Place, Sample, filler
from ibm_nodes.listing import Listing, StoredObject
from ibm_nodes.loader import Loader
from ibm_nodes.mapper import Mapper
from ibm_nodes.mixer import Mixer
from ibm_nodes.packer import Packer
from ibm_nodes.prefetcher import Prefetcher
from ibm_nodes.prompt_masker import PromptMasker
from ibm_nodes.reader import Reader
from ibm_nodes.recipe import list_recipes, load_recipe
from ibm_nodes.schedule import Schedule
from ibm_nodes.settings import set_weights
from ibm_nodes.sharder import Sharder
from ibm_nodes.shuffler import Shuffler
from ibm_nodes.stats import stats
from ibm_nodes.tokenizer import Tokenizer

__all__ = [
    "Batcher",
    "CausalLMCollator",
    "Document",
    "EndTogether",
    "Filter",
    "Listing",
    "Lists",
    "Loader",
    "Mapper",
    "Mixer",
    "Packer",
    "Place",
    "Prefetcher",
    "PromptMasker",
    "Reader",
    "Sample",
    "Schedule",
    "ShardFile",
    "Sharder",
    "Shuffler",
    "StoredObject",
    "Tokenizer",
    "document_ids",
    "filler",
    "flex_block_mask",
    "list_dataset",
    "list_recipes",
    "load_recipe",
    "set_weights",
    "stats",
]
