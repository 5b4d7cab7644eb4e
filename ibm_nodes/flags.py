"""Flags of the command line, made from the signature of a recipe.

A little longer than other modules: all that reads or describes a flag is here.
"""

import argparse
import collections.abc
import contextlib
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
RUN = "run_"
"""What the names of the flags of every run begin with once they are parsed, to keep them from the recipe's."""
SINGULAR = {
    "datasets": "data",
    "weights": "weight",
    "storage_options": "storage-option",
    "model_options": "model-option",
}
"""Flags that are given once for each entry of a mapping."""
SECRET = re.compile("key|secret|token|password|credential", re.IGNORECASE)


class Pair(NamedTuple):
    """An entry of a mapping."""

    key: Any
    value: Any


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors as ValueError, and takes no abbreviations."""

    def __init__(self, **more: Any) -> None:
        super().__init__(allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        """Raises a fault of the usage."""
        raise ValueError(f"{message} (see {self.prog} --help)")


def signature(recipe: Callable[..., Any]) -> inspect.Signature:
    """Gives a recipe's signature, with classes for annotations.

    Raises:
        TypeError: if an annotation names what is not there.
    """
    try:
        return inspect.signature(recipe, eval_str=True)
    except NameError as error:
        raise TypeError(f"the annotations of a recipe must be names of its module: {error}") from error


def parser(name: str, recipe: Callable[..., Any]) -> Parser:
    """Gives the parser of ``ibm-nodes run NAME``: the flags of every run, then the recipe's.

    Each argument of the recipe that text can give is a flag; what is not given keeps the recipe's default. Mappings are
    flags that are repeated, ``--data name=url`` or ``--seq-len-schedule 1T=8192``, and so are ranges, ``--skip 48:72``
    or, in steps of 24 samples each, ``--skip 3:4@24``. Arguments of other classes, such as a device mesh, are left out.

    Raises:
        TypeError: if the recipe needs an argument that cannot be a flag, or one is named as a flag of every run.
    """
    first = (inspect.getdoc(recipe) or "").partition("\n\n")[0]
    made = Parser(prog=f"ibm-nodes run {name}", description=first.replace("%", "%%"))
    group = made.add_argument_group("flags of every run")
    number, amount = _above_zero(int), _above_zero(_count)

    def add(flag: str, **more: Any) -> None:
        group.add_argument(flag, dest=RUN + flag.strip("-").replace("-", "_"), **more)

    add("--steps", type=number, metavar="N", help="stop after N optimizer steps; else go on until Ctrl-C")
    add("--seconds", type=_above_zero(float), metavar="X", help="stop after X seconds")
    add(
        "--tokens",
        type=amount,
        metavar="N",
        help="stop after N tokens on all ranks, such as 300B; length of the run to check",
    )
    add("--pace", type=amount, metavar="N", help="take N tokens a second on this rank, as a trainer would")
    add("--checkpoint", metavar="URL", help="go on from the newest checkpoint there, if there is any; save at the end")
    add("--save-every", type=number, metavar="N", help="save every N optimizer steps as well")
    add("--check", action="store_true", help="only read a block of each dataset, and say what a run would meet")
    add("--digest", action="store_true", help="write a hash of this rank's input ids after each optimizer step")
    add("--json", action="store_true", help="write the result as one line of JSON")
    _add_recipe(made, name, recipe, "run")
    return made


def trace_parser(name: str, recipe: Callable[..., Any]) -> Parser:
    """Gives the parser of ``ibm-nodes trace NAME``: which step to look into, then the recipe's flags.

    Raises:
        TypeError: as ``parser`` does.
    """
    made = Parser(prog=f"ibm-nodes trace {name}", description="Names the documents of a step's global batch.")
    group = made.add_argument_group("flags of every trace")
    number = _above_zero(int)

    def add(flag: str, **more: Any) -> None:
        group.add_argument(flag, dest=RUN + flag.strip("-").replace("-", "_"), **more)

    add("--step", type=number, metavar="N", required=True, help="the optimizer step to look into; the first one is 1")
    add(
        "--checkpoint",
        metavar="URL",
        help="replay from the newest step that was saved there before; else from the start",
    )
    add("--row", type=_from_zero, metavar="K", help="only sample K of the global batch, counted from 0")
    _add_text(group, recipe)
    _add_recipe(made, name, recipe, "trace")
    return made


def command_parser(
    prog: str, description: str, groups: Mapping[str, tuple[Callable[..., Any], Collection[str]]]
) -> Parser:
    """Gives the parser of a command that calls several functions, the flags of each in a group.

    Args:
        prog: what the user typed.
        description: what the command does.
        groups: by the title of their flags, functions and which arguments of theirs the command gives itself.

    Raises:
        TypeError: if two functions have an argument of the same name, or an argument cannot be a flag.
    """
    made = Parser(prog=prog, description=description.replace("%", "%%"))
    for title, (function, left_out) in groups.items():
        try:
            _add_flags(made.add_argument_group(title), function, left_out)
        except argparse.ArgumentError as error:
            raise TypeError(f"an argument of the {title} is named as another one of {prog}: {error}") from error
    return made


def show_parser(name: str, recipe: Callable[..., Any]) -> Parser:
    """Gives the parser of ``ibm-nodes show NAME``: how much to show, then the recipe's flags.

    Raises:
        TypeError: as ``parser`` does.
    """
    made = Parser(prog=f"ibm-nodes show {name}", description="Names the documents of the first samples.")
    group = made.add_argument_group("flags of every show")
    group.add_argument(
        "--samples", dest=RUN + "samples", type=_above_zero(int), default=5, metavar="N", help="how many (default: 5)"
    )
    _add_text(group, recipe)
    _add_recipe(made, name, recipe, "show")
    return made


def _add_text(group: Any, recipe: Callable[..., Any]) -> None:
    """Adds the flags for what samples are written as; where the recipe has a tokenizer, text is decoded with that."""
    group.add_argument(
        "--text",
        dest=RUN + "text",
        action="store_true",
        help="write the tokens as text too; without a tokenizer each id below 256 is the byte that it is",
    )
    if "tokenizer" not in signature(recipe).parameters:
        group.add_argument(
            "--tokenizer",
            dest=RUN + "tokenizer",
            metavar="URL",
            help="write the tokens as text, decoded with this tokenizer.json; needs the library tokenizers",
        )
    group.add_argument("--json", dest=RUN + "json", action="store_true", help="write the result as one line of JSON")


def add_storage_options(parser: argparse.ArgumentParser) -> None:
    """Adds the flag for the options of a store to the parser of a command without a recipe."""
    parser.add_argument(
        "--storage-option",
        dest="storage_options",
        action="append",
        type=_option,
        default=[],
        metavar="KEY=VALUE",
        help="fsspec's options for the store: key, secret, endpoint_url, anon, profile ...",
    )


def storage_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """Gives the options of the store, as they were parsed by the flag that ``add_storage_options`` adds.

    Raises:
        ValueError: if one is given twice.
    """
    return _mapping("storage_options", namespace.storage_options)


def _add_recipe(made: Parser, name: str, recipe: Callable[..., Any], command: str) -> None:
    try:
        _add_flags(made, recipe)
    except argparse.ArgumentError as error:
        raise TypeError(
            f"recipe {name!r} has an argument that is named as a flag of every {command}: {error}"
        ) from error


def _add_flags(parser: argparse._ActionsContainer, recipe: Callable[..., Any], left_out: Collection[str] = ()) -> None:
    described = _descriptions(inspect.getdoc(recipe) or "")
    for parameter in signature(recipe).parameters.values():
        if parameter.name in left_out:
            continue
        required = parameter.default is parameter.empty
        options = _options(parameter)
        if options is None:
            if required:
                raise TypeError(
                    f"the recipe needs {parameter.name!r}, which no flag can give: call the recipe from Python"
                )
            continue
        flag = "--" + SINGULAR.get(parameter.name, parameter.name).replace("_", "-")
        text = described.get(parameter.name, "").replace("%", "%%")
        if not required and parameter.default is not None:
            text += f" (default: {parameter.default})"
        parser.add_argument(
            flag, dest=parameter.name, required=required, default=argparse.SUPPRESS, help=text.strip(), **options
        )


def arguments(
    recipe: Callable[..., Any], namespace: argparse.Namespace, left_out: Collection[str] = ()
) -> dict[str, Any]:
    """Gives the recipe's arguments, as they were parsed, without those that are no flags.

    Raises:
        ValueError: if an entry of a mapping is given twice.
    """
    names = [name for name in signature(recipe).parameters if name in namespace and name not in left_out]
    given = {name: vars(namespace)[name] for name in names}
    for name, value in given.items():
        if isinstance(value, list) and isinstance(value[0], Pair):
            given[name] = _mapping(name, value)
    return given


def secrets_in(given: Sequence[str]) -> list[str]:
    """Gives the texts that storage options hold, as they were typed, and that must never be shown."""
    found = []
    for flag, text in zip(["", *given], given, strict=False):
        if text.startswith("--storage-option"):
            text = text.partition("=")[2]
        elif not flag.startswith("--storage-option"):
            continue
        key, _, value = text.partition("=")
        if value and SECRET.search(key):
            found.append(value)
    return found


def secrets(options: Mapping[str, Any]) -> Iterator[str]:
    """Gives the texts in storage options that must never be shown, the nested ones too."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from secrets(value)
        elif isinstance(value, str) and value and SECRET.search(name):
            yield value


def _above_zero(kind: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        with contextlib.suppress(ValueError, OverflowError):
            if (value := kind(text)) > 0 and math.isfinite(value):
                return value
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")

    return parse


def _from_zero(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (value := int(text)) >= 0:
            return value
    raise argparse.ArgumentTypeError(f"must be a number from 0 on, got {text!r}")


def _count(text: str) -> int:
    """Reads 300000000000, 3e11 or 300B."""
    unit = UNITS.get(text[-1:].upper(), 1)
    return round(float(text if unit == 1 else text[:-1]) * unit)


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
            return {"action": "append", **_entry(parameter, *typing.get_args(kind))}
        if typing.get_origin(kind) is collections.abc.Sequence:
            return _sequence(kind)
    return None


def _entry(parameter: inspect.Parameter, key: Any, value: Any) -> dict[str, Any]:
    if key is int:
        return {"type": _counted, "metavar": "AMOUNT=N"}
    if value is Any:
        return {"type": _option, "metavar": "KEY=VALUE"}
    return {"type": _pair(value), "metavar": f"NAME={_values(parameter, value)}"}


def _sequence(kind: Any) -> dict[str, Any] | None:
    if kind == Sequence[tuple[int, int]]:
        return {"action": "append", "type": _range, "metavar": "BEGIN:END[@N]"}
    return {"type": _numbers, "metavar": "N,N"} if kind == Sequence[int] else None


def _values(parameter: inspect.Parameter, kind: type) -> str:
    if kind is not str:
        return "X"
    return "URL" if parameter.name in ("datasets", "listing") else "TEXT"


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas between them, got {text!r}") from None


def _alternatives(annotation: Any) -> Sequence[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _pair(kind: Callable[[str], Any]) -> Callable[[str], Pair]:
    def parse(text: str) -> Pair:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise argparse.ArgumentTypeError(f"must be name=value, got {text!r}")
        try:
            return Pair(name, kind(value))
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be name=number, got {text!r}") from None

    return parse


def _counted(text: str) -> Pair:
    amount, _, value = text.partition("=")
    with contextlib.suppress(ValueError, OverflowError):
        return Pair(_count(amount), int(value))
    raise argparse.ArgumentTypeError(f"must be AMOUNT=NUMBER, such as 1T=8192, got {text!r}")


def _range(text: str) -> tuple[int, int]:
    """Parses BEGIN:END, samples counted from 0, or BEGIN:END@N, steps of N samples each, counted from 1."""
    found = re.fullmatch(r"(\d+):(\d+)(?:@(\d+))?", text)
    begin, end, size = found.groups() if found else (0, 0, None)
    begin, end = int(begin), int(end)
    if size is not None:
        begin, end = (begin - 1) * int(size), (end - 1) * int(size)
    if not 0 <= begin < end:
        raise argparse.ArgumentTypeError(
            f"must be BEGIN:END, samples from 0 on, or BEGIN:END@N, steps of N samples each from 1 on, got {text!r}"
        )
    return begin, end


def _option(text: str) -> Pair:
    """Parses key=value; says nothing of the value, which may be a secret."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError("must be key=value, such as endpoint_url=http://127.0.0.1:9000")
    if SECRET.search(key.rpartition(".")[2]):
        return Pair(key, value)  # also where it is all digits
    try:
        return Pair(key, json.loads(value))
    except json.JSONDecodeError:
        return Pair(key, value)


def _mapping(name: str, pairs: Sequence[Pair]) -> dict[Any, Any]:
    """Makes a mapping of pairs; a key with dots names a place in a nested one."""
    mapping: dict[Any, Any] = {}
    for key, value in pairs:
        *path, last = key.split(".") if name == "storage_options" else [key]
        place: Any = mapping
        for part in path:
            place = place.setdefault(part, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict) or last in place:
            raise ValueError(f"--{SINGULAR.get(name, name).replace('_', '-')} must give {key!r} once, got it twice")
        place[last] = value
    return mapping


def _descriptions(docstring: str) -> dict[str, str]:
    """Gives what the section "Args:" of a docstring says of each argument."""
    section = re.search(r"^Args:\n((?: .*\n?|\n)+)", docstring, re.MULTILINE)
    entries = re.findall(r"^    (\w+): ((?:.*\n?)(?:^     .*\n?)*)", section[1] if section else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
