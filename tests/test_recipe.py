"""Recipes are found by name."""

import pytest

from ibm_nodes import list_recipes, load_recipe


def test_lists_the_recipes_that_are_installed():
    assert {"pretrain", "quickstart"} <= set(list_recipes())
    assert list_recipes() == sorted(list_recipes())


def test_a_name_gives_the_function():
    from ibm_nodes.recipes.pretrain import pretrain

    assert load_recipe("pretrain") is pretrain


def test_an_unknown_name_is_an_error_that_says_which_there_are():
    with pytest.raises(LookupError, match="no recipe 'pretran': there are .*pretrain.*quickstart"):
        load_recipe("pretran")
