"""Recipes: functions that assemble nodes, found by name through entry points."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

GROUP = "ibm_nodes.recipes"


def list_recipes() -> list[str]:
    """Gives the names of the installed recipes, sorted; any package can offer some, in the same entry point group."""
    return sorted(point.name for point in entry_points(group=GROUP))


def load_recipe(name: str) -> Callable[..., Any]:
    """Gives the recipe of a name: a function of keyword arguments that returns a ``Loader``.

    Raises:
        LookupError: if there is none; it says which there are.
    """
    for point in entry_points(group=GROUP, name=name):
        recipe: Callable[..., Any] = point.load()
        return recipe
    raise LookupError(f"no recipe {name!r}: there are {', '.join(list_recipes()) or 'none, is ibm-nodes installed?'}")
