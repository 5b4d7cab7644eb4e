"""Models to start from, by name: shapes of Llama and T5; and any other by its import path."""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ibm_nodes.recipes.llama import Llama, LlamaShape
from ibm_nodes.recipes.t5 import T5, T5Shape

SHAPES: dict[str, LlamaShape | T5Shape] = {
    "tiny": LlamaShape(vocab_size=512, hidden=64, layers=4, heads=4, kv_heads=2, inner=160),
    "llama-1b": LlamaShape(vocab_size=32_000, hidden=2048, layers=22, heads=32, kv_heads=4, inner=5632),
    "llama-7b": LlamaShape(vocab_size=32_000, hidden=4096, layers=32, heads=32, kv_heads=32, inner=11_008),
    "llama-8b": LlamaShape(
        vocab_size=128_256, hidden=4096, layers=32, heads=32, kv_heads=8, inner=14_336, rope_theta=500_000.0
    ),
    "llama-13b": LlamaShape(vocab_size=32_000, hidden=5120, layers=40, heads=40, kv_heads=40, inner=13_824),
    "llama-34b": LlamaShape(vocab_size=32_000, hidden=8192, layers=48, heads=64, kv_heads=8, inner=22_016),
    "llama-70b": LlamaShape(vocab_size=32_000, hidden=8192, layers=80, heads=64, kv_heads=8, inner=28_672),
    "tiny-t5": T5Shape(vocab_size=512, hidden=64, layers=2, heads=4, inner=160, head_size=16),
    "t5-3b": T5Shape(vocab_size=32_128, hidden=2048, layers=24, heads=32, inner=5120),
    "t5-11b": T5Shape(vocab_size=32_128, hidden=4096, layers=24, heads=64, inner=10_240),
}
"""By name. Those of T5 are of version 1.1, whose sizes XL and XXL are known as 3B and 11B."""


def build_model(
    name: str, *, vocab_size: int | None = None, seed: int = 0, options: Mapping[str, Any] | None = None
) -> nn.Module:
    """Builds a model, with weights that depend on the seed alone; it leaves the global generators as they were.

    Args:
        name: one of ``SHAPES``, or ``package.module:name`` of a class or function that gives a module.
        vocab_size: of a shape, instead of its own.
        seed: of the weights.
        options: keyword arguments for what an import path names.

    Raises:
        LookupError: if there is no such model.
        ValueError: if something is given that this model does not take.
        TypeError: if what an import path names gives no module.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if ":" in name:
            if vocab_size is not None:
                raise ValueError(f"vocab_size must be among the options of {name}, if it takes one")
            return _import(name, options or {})
        if name not in SHAPES:
            raise LookupError(f"no model {name!r}: there are {', '.join(SHAPES)}, or give package.module:name")
        if options:
            raise ValueError(f"options must be given with an import path alone, got {', '.join(options)} for {name!r}")
        shape = SHAPES[name]
        if vocab_size is not None:
            shape = replace(shape, vocab_size=vocab_size)
        return Llama(shape) if isinstance(shape, LlamaShape) else T5(shape)


def _import(path: str, options: Mapping[str, Any]) -> nn.Module:
    module, _, name = path.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"no model {path!r}: {error}") from error
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise ValueError(f"options must be those of {path}, got {', '.join(options) or 'none'}: {error}") from error
    model = make(**options)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{path} must give a torch.nn.Module, got {type(model).__name__}")
    return model
