"""Flags of the command line, made from the signature of a recipe."""

import argparse
import collections.abc
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

SINGULAR = {"datasets": "data", "weights": "weight", "storage_options": "storage-option"}
"""Flags that are given once for each entry of a mapping."""
SECRET = re.compile("key|secret|token|password|credential", re.IGNORECASE)


def add_flags(parser: argparse.ArgumentParser, recipe: Callable[..., Any]) -> None:
    """Adds a flag for each argument of a recipe that text can give; what is not given keeps the recipe's default.

    Mappings become flags that are repeated, ``--data name=url``. Arguments of other classes, such as a device mesh, are
    left out.

    Raises:
        TypeError: if the recipe needs an argument that cannot be a flag.
    """
    described = _descriptions(inspect.getdoc(recipe) or "")
    for parameter in inspect.signature(recipe, eval_str=True).parameters.values():
        required = parameter.default is parameter.empty
        options = _options(parameter)
        if options is None:
            if required:
                raise TypeError(
                    f"the recipe needs {parameter.name!r}, of a class that no flag can give: call the recipe from Python"
                )
            continue
        flag = "--" + SINGULAR.get(parameter.name, parameter.name).replace("_", "-")
        text = described.get(parameter.name, "").replace("%", "%%")
        if not required and parameter.default is not None:
            text += f" (default: {parameter.default})"
        parser.add_argument(
            flag, dest=parameter.name, required=required, default=argparse.SUPPRESS, help=text.strip(), **options
        )


def arguments(recipe: Callable[..., Any], namespace: argparse.Namespace) -> dict[str, Any]:
    """Gives the recipe's arguments, as they were parsed.

    Raises:
        ValueError: if an entry of a mapping is given twice.
    """
    given = {name: vars(namespace)[name] for name in inspect.signature(recipe).parameters if name in namespace}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = _mapping(name, value)
    return given


def secrets(options: Mapping[str, Any]) -> Iterator[str]:
    """Gives the texts in storage options that must never be shown, the nested ones too."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from secrets(value)
        elif isinstance(value, str) and value and SECRET.search(name):
            yield value


def _options(parameter: inspect.Parameter) -> dict[str, Any] | None:
    """Gives what ``add_argument`` takes for the first class of the parameter's annotation that text can give."""
    for kind in _alternatives(parameter.annotation):
        if kind is bool:
            return {"action": argparse.BooleanOptionalAction}
        if kind in (int, float, str):
            return {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT"}[kind]}
        if typing.get_origin(kind) is typing.Literal:
            return {"choices": typing.get_args(kind)}
        if typing.get_origin(kind) in (dict, collections.abc.Mapping):
            value = typing.get_args(kind)[1]
            if value is Any:
                return {"action": "append", "type": _option, "metavar": "KEY=VALUE"}
            return {"action": "append", "type": _pair(value), "metavar": f"NAME={'URL' if value is str else 'X'}"}
    return None


def _alternatives(annotation: Any) -> Sequence[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _pair(kind: Callable[[str], Any]) -> Callable[[str], tuple[str, Any]]:
    def parse(text: str) -> tuple[str, Any]:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise argparse.ArgumentTypeError(f"must be name=value, got {text!r}")
        try:
            return name, kind(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be name=number, got {text!r}") from None

    return parse


def _option(text: str) -> tuple[str, Any]:
    """Parses key=value; says nothing of the value, which may be a secret."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError("must be key=value, such as endpoint_url=http://127.0.0.1:9000")
    if SECRET.search(key.rpartition(".")[2]):
        return key, value  # also where it is all digits
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _mapping(name: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a mapping of pairs; a key with dots names a place in a nested one."""
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        *path, last = key.split(".") if name == "storage_options" else [key]
        place: Any = mapping
        for part in path:
            place = place.setdefault(part, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict) or last in place:
            raise ValueError(f"--{SINGULAR.get(name, name)} must give {key!r} once, got it twice")
        place[last] = value
    return mapping


def _descriptions(docstring: str) -> dict[str, str]:
    """Gives what the section "Args:" of a docstring says of each argument."""
    section = re.search(r"^Args:\n((?: .*\n?|\n)+)", docstring, re.MULTILINE)
    entries = re.findall(r"^    (\w+): ((?:.*\n?)(?:^     .*\n?)*)", section[1] if section else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
