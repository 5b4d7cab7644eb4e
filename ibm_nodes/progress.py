"""A run of a loader with nobody training: what it handed out, how fast, and what bounded it."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torchdata.nodes import Loader

from ibm_nodes.stats import stats

LINE_SECONDS = 5.0
LIVE_SECONDS = 0.5
STATS_SHARE = 0.05
"""Share of the time that taking numbers may take."""
CONSUMER_SHARE = 0.1
"""The consumer bounds a run which waits for data less than this share of the time."""
