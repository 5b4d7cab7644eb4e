"""Composable ``torchdata.nodes`` that stream training data from object storage, the same at any world size."""

from ibm_nodes.batcher import Batcher, CausalLMCollator
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
    "Reader",
    "Sample",
    "Schedule",
    "ShardFile",
    "Sharder",
    "Shuffler",
    "StoredObject",
    "Tokenizer",
    "filler",
    "list_dataset",
    "list_recipes",
    "load_recipe",
    "set_weights",
    "stats",
]
