"""The command line: ``ibm-nodes recipes`` and ``ibm-nodes run NAME``."""

import argparse
import contextlib
import functools
import inspect
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib.metadata import version
from typing import Any, NoReturn

from rich.console import Console
from torchdata.nodes import Loader

from ibm_nodes import checkpoint, flags, progress
from ibm_nodes.check import check
from ibm_nodes.recipe import list_recipes, load_recipe
from ibm_nodes.report import check_summary, run_summary

Recipe = Callable[..., Any]

ERRORS = (ValueError, LookupError, TypeError, OSError, ImportError)
"""What bad input and a store that fails raise; anything else is a fault of ours, and keeps its traceback."""
INTERRUPTED = 130

say = functools.partial(print, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and gives its exit code: 1 for bad input, with one sentence on stderr; 130 for Ctrl-C."""
    hidden: list[str] = []
    if argv is None:
        signal.signal(signal.SIGTERM, _terminate)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # text of a corpus, on a terminal that may know ASCII alone
    try:
        return _command(sys.argv[1:] if argv is None else list(argv), hidden)
    except BrokenPipeError:  # who read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        _ignore_cut_off_calls()
        print("ibm-nodes: stopped", file=sys.stderr)
        return INTERRUPTED
    except ERRORS as error:
        print(f"ibm-nodes: {_sentence(error, hidden)}", file=sys.stderr)
        return 1


def _ignore_cut_off_calls() -> None:
    """Keeps a stop silent that came between the making of a coroutine and its start, inside of fsspec."""
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)


def _terminate(number: int, frame: object) -> NoReturn:
    _ignore_cut_off_calls()
    sys.exit(128 + number)  # as an exception, so that servers are stopped and files removed


def _command(argv: list[str], hidden: list[str]) -> int:
    parser = flags.Parser(prog="ibm-nodes", description="Streams training data from object storage, by recipe.")
    parser.add_argument("--version", action="version", version=f"ibm-nodes {version('ibm-nodes')}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    commands.add_parser("recipes", help="list the recipes", description="Lists the recipes that are installed.")
    run = commands.add_parser(
        "run",
        help="run a recipe: ibm-nodes run NAME [flags]",
        description="Runs a recipe: streams from its loader, and says how fast it went and what bounded it.",
        epilog="The flags depend on the recipe: ibm-nodes run NAME --help",
    )
    run.add_argument("name", nargs="?", metavar="NAME", help="a recipe that ibm-nodes recipes lists")
    run.add_argument("flags", nargs=argparse.REMAINDER, metavar="...", help="its flags")
    namespace = parser.parse_args(argv)
    if namespace.command == "run":
        if namespace.name is None:
            raise ValueError(f"run must be given the name of a recipe: there are {', '.join(list_recipes())}")
        return _run(namespace.name, namespace.flags, hidden)
    if namespace.command == "recipes":
        return _recipes()
    parser.print_help()
    return 0


def _recipes() -> int:
    width = max(map(len, list_recipes()), default=0)
    for name in list_recipes():
        try:
            recipe = load_recipe(name)
            text = f"{_returns(recipe):6}  {(inspect.getdoc(recipe) or '').partition(chr(10))[0]}"
        except (ImportError, AttributeError, TypeError) as error:
            text = f"cannot be loaded: {error}"
        say(f"{name:{width}}  {text}".rstrip())
    return 0


def _returns(recipe: Recipe) -> str:
    kind = flags.signature(recipe).return_annotation
    kind = getattr(kind, "__origin__", kind)
    return "loader" if isinstance(kind, type) and issubclass(kind, Loader) else "model"


def _run(name: str, given: list[str], hidden: list[str]) -> int:
    recipe = load_recipe(name)
    if not given and hasattr(recipe, "tour"):
        return 0 if recipe.tour(say) else 1
    hidden += flags.secrets_in(given)
    options = flags.parser(name, recipe).parse_args(given)
    arguments = flags.arguments(recipe, options)
    hidden += flags.secrets(arguments.get("storage_options", {}))
    if options.run_save_every and not options.run_checkpoint:
        raise ValueError("--save-every must come with --checkpoint URL: there is no place to save to")
    if options.run_check:
        return _check(name, recipe, arguments, options, hidden)
    return _stream(name, recipe, arguments, options)


def _loader(name: str, recipe: Recipe, arguments: dict[str, Any]) -> Loader[Any]:
    loader = recipe(**arguments)
    if not isinstance(loader, Loader):
        raise TypeError(f"recipe {name!r} gives a {type(loader).__name__}, not a loader to run: call it from Python")
    return loader


def _settings(recipe: Recipe, arguments: dict[str, Any]) -> dict[str, Any]:
    """Gives all arguments, with the defaults of those that are not given."""
    bound = flags.signature(recipe).bind(**arguments)
    bound.apply_defaults()
    return bound.arguments


def _check(name: str, recipe: Recipe, arguments: dict[str, Any], options: argparse.Namespace, hidden: list[str]) -> int:
    world_size = arguments.get("world_size", 1)
    problems: list[Exception] = []
    if "world_size" in arguments:
        arguments.setdefault("rank", 0)
    try:
        loader = _loader(name, recipe, arguments)
    except ValueError as error:
        if world_size <= 1:
            raise
        problems.append(error)  # which may be of the world size alone: what would another one meet?
        loader = _loader(name, recipe, {**arguments, "rank": 0, "world_size": 1})
    settings = _settings(recipe, arguments)
    report, found = check(loader, settings, world_size=world_size, num_tokens=options.run_tokens)
    sentences = [_sentence(error, hidden) for error in problems + found]
    if options.run_json:
        say(json.dumps({"recipe": name, **report, "problems": sentences}))
    else:
        say("\n".join(check_summary(report)))
    for sentence in sentences:
        print(f"ibm-nodes: {sentence}", file=sys.stderr)
    return 1 if sentences else 0


def _stream(name: str, recipe: Recipe, arguments: dict[str, Any], options: argparse.Namespace) -> int:
    console = Console(stderr=options.run_json)
    on_terminal = console.file.isatty() and not console.is_dumb_terminal
    with contextlib.ExitStack() as stack:
        with console.status("listing the datasets") if on_terminal else contextlib.nullcontext():
            loader = _loader(name, recipe, arguments)
        stack.callback(getattr(loader, "close", lambda: None))
        world_size, batches_per_step = _division(loader, _settings(recipe, arguments))
        saver = _Saver(loader, options, arguments.get("storage_options"))
        meter = progress.Meter(loader, batches_per_step)
        num_tokens = options.run_tokens and -(-options.run_tokens // world_size)
        limits = progress.Limits(options.run_steps, num_tokens, options.run_seconds)
        with progress.panel(console, name) if on_terminal else contextlib.nullcontext(progress.lines(console)) as show:
            end = progress.run(meter, limits, show, pace=options.run_pace, after=saver.after)
        saver.finish(meter)
        report = {"recipe": name, "end": end, **meter.report()}
    say(json.dumps(report) if options.run_json else "\n".join(run_summary(report)))
    return INTERRUPTED if end == "interrupted" else 0


class _Saver:
    """Loads the newest checkpoint of a run, and saves the steps that are to be saved; does nothing without a URL."""

    def __init__(self, loader: Loader[Any], options: argparse.Namespace, storage_options: Any) -> None:
        self.loader = loader
        self.url, self.every = options.run_checkpoint, options.run_save_every
        self.storage_options = (
            storage_options if "://" in (self.url or "") and not self.url.startswith("file:") else None
        )
        self.first = 0
        self.saved: Future[None] | None = None
        if self.url and (
            found := checkpoint.load(loader, self.url, missing="start", storage_options=self.storage_options)
        ):
            self.first = found.step

    def after(self, steps: int) -> None:
        """Saves a step if its number says so."""
        if self.every and steps % self.every == 0:
            self._save(steps)

    def finish(self, meter: progress.Meter) -> None:
        """Saves the last step, unless it was not finished, and waits until all is written."""
        if self.url and meter.batches and meter.batches % meter.batches_per_step == 0:
            self._save(meter.steps)
        if self.saved is not None:
            self.saved.result()

    def _save(self, steps: int) -> None:
        self.saved = checkpoint.save(
            self.loader, self.url, step=self.first + steps, storage_options=self.storage_options
        )


def _division(loader: Loader[Any], settings: dict[str, Any]) -> tuple[int, int]:
    """Gives the number of ranks, and how many batches of this rank are an optimizer step."""
    node: Any = loader.root
    world_size, batch_size = 1, None
    while node is not None:
        world_size = getattr(node, "world_size", world_size)
        batch_size = getattr(node, "batch_size", batch_size)
        node = getattr(node, "source", None)
    global_batch_size = settings.get("global_batch_size")
    if not (global_batch_size and batch_size):
        return world_size, 1
    return world_size, max(1, global_batch_size // (world_size * batch_size))


def _sentence(error: BaseException, hidden: Sequence[str]) -> str:
    """Writes an error and its notes as one line, without secrets."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    notes = getattr(error, "__notes__", [])
    text = " ".join((text or type(error).__name__).split()) + (f" ({'; '.join(notes)})" if notes else "")
    for secret in sorted(hidden, key=len, reverse=True):
        text = re.sub(rf"(?<![\w/+]){re.escape(secret)}(?![\w/+])", "***", text) if secret else text
    return text


if __name__ == "__main__":
    sys.exit(main())
