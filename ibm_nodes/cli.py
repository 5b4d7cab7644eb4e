"""The command line: ``ibm-nodes recipes``, ``run``, ``show``, ``trace`` and ``train NAME``, ``list`` and others.

Longer than other modules, since all commands share one treatment of bad input, signals and exit codes; what they do and
print lies in modules of its own.
"""

import argparse
import contextlib
import functools
import hashlib
import inspect
import json
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from importlib.metadata import entry_points, version
from typing import Any, NoReturn

import torch
from rich.console import Console
from torchdata.nodes import Loader

from ibm_nodes import checkpoint, flags, inspect_checkpoint, progress
from ibm_nodes.check import check
from ibm_nodes.formats import FORMATS, list_dataset
from ibm_nodes.recipe import list_recipes, load_recipe
from ibm_nodes.report import check_summary, checkpoint_list, checkpoint_step, run_summary, show_summary, trace_summary
from ibm_nodes.settings import describe
from ibm_nodes.text import ToText, bytes_to_text, tokenizer_to_text
from ibm_nodes.trace import Trace, documents, trace

Recipe = Callable[..., Any]

ERRORS = (ValueError, LookupError, TypeError, OSError, ImportError)
"""What bad input and a store that fails raise; anything else is a fault of ours, and keeps its traceback."""
INTERRUPTED = 130
STOP_AGAIN_SECONDS = 0.05
DIGEST_BYTES = 8
OF_RECIPES = {
    "run": (
        "run a recipe: ibm-nodes run NAME [flags]",
        "Runs a recipe: streams from its loader, and says how fast it went and what bounded it.",
    ),
    "show": (
        "show the first samples: ibm-nodes show NAME --samples 5 [flags]",
        "Names the documents of the first samples of a recipe, and decodes their text.",
    ),
    "trace": (
        "name the documents of a step: ibm-nodes trace NAME --step N [flags]",
        "Names the documents of a step's global batch, by a replay of the logical shards concerned.",
    ),
    "train": (
        "train a model on a recipe's data: ibm-nodes train NAME [flags]",
        "Trains a model on this process; on many: torchrun -m ibm_nodes.recipes.train NAME [flags]",
    ),
}
"""Commands that take the name of a recipe: their help, and what they do."""
BESIDE_RECIPES = {
    "plan": "say whether a model fits a cluster, and its traffic hides: ibm-nodes plan [flags]",
    "manifest": "write the manifest of a training run on Kubernetes: ibm-nodes manifest [flags]",
}
"""Commands that parse all that follows them."""

say = functools.partial(print, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and gives its exit code: 1 for bad input, with one sentence on stderr; 130 for Ctrl-C."""
    hidden: list[str] = []
    if argv is None:
        signal.signal(signal.SIGTERM, _terminate)
        sys.unraisablehook = _stop_again
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


def _stop_again(unraisable: Any) -> None:
    """Sends a stop once more that came while an object was finalized, where Python drops all exceptions."""
    if unraisable.exc_type in (KeyboardInterrupt, SystemExit):
        number = signal.SIGINT if unraisable.exc_type is KeyboardInterrupt else signal.SIGTERM
        threading.Timer(STOP_AGAIN_SECONDS, os.kill, (os.getpid(), number)).start()
    else:
        sys.__unraisablehook__(unraisable)


def _command(argv: list[str], hidden: list[str]) -> int:
    parser = flags.Parser(prog="ibm-nodes", description="Streams training data from object storage, by recipe.")
    parser.add_argument("--version", action="version", version=f"ibm-nodes {version('ibm-nodes')}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    commands.add_parser("recipes", help="list the recipes", description="Lists the recipes that are installed.")
    for name, (text, description) in OF_RECIPES.items():
        _add_of_recipe(commands, name, text, description)
    _add_list(commands)
    _add_checkpoint(commands)
    for name, text in BESIDE_RECIPES.items():
        commands.add_parser(name, help=text, add_help=False)
    if argv and argv[0] in BESIDE_RECIPES:
        return _load_command(argv[0])(argv[1:], say)
    hidden += flags.secrets_in(argv)
    namespace = parser.parse_args(argv)
    if namespace.command == "list":
        return _list(namespace, hidden)
    if namespace.command == "checkpoint":
        return _checkpoint(namespace, hidden)
    if namespace.command in OF_RECIPES:
        return _of_recipe(namespace, hidden)
    if namespace.command == "recipes":
        return _recipes()
    parser.print_help()
    return 0


def _of_recipe(namespace: argparse.Namespace, hidden: list[str]) -> int:
    if namespace.name is None:
        names = ", ".join(list_recipes())
        raise ValueError(f"{namespace.command} must be given the name of a recipe: there are {names}")
    if namespace.command == "train":
        return _load_command("train")([namespace.name, *namespace.flags], say)
    do = {"run": _run, "show": _first_samples, "trace": _trace}[namespace.command]
    return do(namespace.name, namespace.flags, hidden)


def _load_command(name: str) -> Callable[[Sequence[str], Callable[[str], None]], int]:
    """Gives a command that lies beside the recipes, which this module is not to import."""
    for point in entry_points(group="ibm_nodes.commands", name=name):
        command: Callable[[Sequence[str], Callable[[str], None]], int] = point.load()
        return command
    raise LookupError(f"no command {name!r}: ibm-nodes is not installed as a whole")


def _add_of_recipe(commands: Any, name: str, text: str, description: str) -> None:
    command = commands.add_parser(
        name,
        help=text,
        description=description,
        epilog=f"The flags depend on the recipe: ibm-nodes {name} NAME --help",
    )
    command.add_argument("name", nargs="?", metavar="NAME", help="a recipe that ibm-nodes recipes lists")
    command.add_argument("flags", nargs=argparse.REMAINDER, metavar="...", help="its flags, and those of the command")


def _add_list(commands: Any) -> None:
    command = commands.add_parser(
        "list",
        help="list the files of a dataset: ibm-nodes list URL --out FILE",
        description="Says how many data files are under a URL, and writes a listing of them, for --listing NAME=FILE.",
    )
    command.add_argument("url", metavar="URL", help="prefix, or one file")
    command.add_argument("--out", metavar="FILE", help="write the listing to this path or URL")
    command.add_argument("--format", choices=tuple(FORMATS), help="only the files of this format; else of all formats")
    flags.add_storage_options(command)


def _list(namespace: argparse.Namespace, hidden: list[str]) -> int:
    options = flags.storage_options(namespace)
    hidden += flags.secrets(options)
    found = list_dataset(namespace.url, format=namespace.format, storage_options=_of_url(namespace.url, options))
    say(f"{len(found.objects):,} files, {found.starts[-1]:,} bytes under {namespace.url}")
    if namespace.out:
        found.write(namespace.out, _of_url(namespace.out, options))
    return 0


def _add_checkpoint(commands: Any) -> None:
    about = commands.add_parser(
        "checkpoint", help="look into checkpoints: show URL, verify URL", description="Looks into saved checkpoints."
    )
    actions = about.add_subparsers(dest="action", title="actions", metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="list the steps, and say what one holds",
        description="Lists what is saved under a URL, and says what the newest complete step holds.",
    )
    verify = actions.add_parser(
        "verify",
        help="read every file, and say what cannot be loaded",
        description="Reads every file of all complete steps, and exits with 1 if one cannot be loaded.",
    )
    for action in (show, verify):
        action.add_argument("url", metavar="URL", help="where the checkpoints of a run are")
        action.add_argument("--step", type=int, metavar="N", help="only this step")
        flags.add_storage_options(action)
    show.add_argument("--json", action="store_true", help="write the result as one line of JSON")


def _checkpoint(namespace: argparse.Namespace, hidden: list[str]) -> int:
    options = flags.storage_options(namespace)
    hidden += flags.secrets(options)
    options_of_url = _of_url(namespace.url, options)
    if namespace.action == "verify":
        whole, reasons = inspect_checkpoint.verify(namespace.url, namespace.step, options_of_url)
        for text in whole:
            say(text)
    else:
        reasons = _show(namespace, options_of_url, hidden)
    for reason in reasons:
        print(f"ibm-nodes: {_sentence(ValueError(reason), hidden)}", file=sys.stderr)
    return 1 if reasons else 0


def _show(namespace: argparse.Namespace, storage_options: Any, hidden: list[str]) -> list[str]:
    entries = inspect_checkpoint.survey(namespace.url, storage_options)
    found, reasons = None, []
    if namespace.step is not None or any(entry["complete"] for entry in entries):
        try:
            found = inspect_checkpoint.describe_step(namespace.url, namespace.step, storage_options)
        except inspect_checkpoint.FAULTS as error:
            reasons.append(_sentence(error, hidden))
    if namespace.json:
        say(json.dumps({"url": namespace.url, "steps": entries, "newest": found, "problems": reasons}))
    else:
        say("\n".join([*checkpoint_list(entries), *(["", *checkpoint_step(found)] if found else [])]))
    return reasons


def _of_url(url: str, storage_options: Any) -> Any:
    """Gives the options where a URL is one of a store; a path on a disk takes none."""
    return storage_options if "://" in url and not url.startswith("file:") else None


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
        if options.run_digest:
            meter = _DigestMeter(loader, batches_per_step, saver.first, functools.partial(console.out, highlight=False))
        num_tokens = options.run_tokens and -(-options.run_tokens // world_size)
        limits = progress.Limits(options.run_steps, num_tokens, options.run_seconds)
        with progress.panel(console, name) if on_terminal else contextlib.nullcontext(progress.lines(console)) as show:
            end = progress.run(meter, limits, show, pace=options.run_pace, after=saver.after)
        saver.finish(meter)
        report = {"recipe": name, "end": end, **meter.report()}
    say(json.dumps(report) if options.run_json else "\n".join(run_summary(report)))
    return INTERRUPTED if end == "interrupted" else 0


def _first_samples(name: str, given: list[str], hidden: list[str]) -> int:
    recipe = load_recipe(name)
    options = flags.show_parser(name, recipe).parse_args(given)
    loader, arguments = _loader_to_trace(name, recipe, options, hidden)
    to_text = _to_text(options, arguments)
    report = _trace_report(trace(loader, step=1, global_batch_size=options.run_samples), to_text)
    say(json.dumps({"recipe": name, **report}) if options.run_json else "\n".join(show_summary(report)))
    return 0


def _trace(name: str, given: list[str], hidden: list[str]) -> int:
    recipe = load_recipe(name)
    options = flags.trace_parser(name, recipe).parse_args(given)
    loader, arguments = _loader_to_trace(name, recipe, options, hidden)
    to_text = _to_text(options, arguments)
    batch_size = _settings(recipe, arguments).get("global_batch_size") or describe(loader).get("global_batch_size")
    if batch_size is None:
        raise TypeError(f"recipe {name!r} has no global_batch_size, and no Batcher that would tell what a step holds")
    found = trace(
        loader,
        step=options.run_step,
        global_batch_size=batch_size,
        url=options.run_checkpoint,
        row=options.run_row,
        storage_options=_of_url(options.run_checkpoint or "", arguments.get("storage_options", {})),
    )
    report = {"step": found.step, "since": found.since, **_trace_report(found, to_text)}
    if options.run_json:
        say(json.dumps({"recipe": name, **report, "changes": found.changes}))
    else:
        say("\n".join(trace_summary(report)))
    for change in found.changes:
        print(f"ibm-nodes: since step {found.since} was saved, {_hide(change, hidden)}", file=sys.stderr)
    return 0


def _loader_to_trace(
    name: str, recipe: Recipe, options: argparse.Namespace, hidden: list[str]
) -> tuple[Any, dict[str, Any]]:
    """Gives the recipe's loader, and its arguments as they were typed."""
    arguments = flags.arguments(recipe, options)
    hidden += flags.secrets(arguments.get("storage_options", {}))
    if "world_size" in arguments:
        arguments.setdefault("rank", 0)
    return _loader(name, recipe, arguments), arguments


def _to_text(options: argparse.Namespace, arguments: dict[str, Any]) -> ToText | None:
    """Gives what makes text of tokens, if that is asked for."""
    given = getattr(options, "run_tokenizer", None)
    if not (options.run_text or given):
        return None
    url = given or arguments.get("tokenizer")
    if url is None:
        return bytes_to_text
    return tokenizer_to_text(url, _of_url(url, arguments.get("storage_options", {})))


def _trace_report(found: Trace, to_text: ToText | None) -> dict[str, Any]:
    samples = [
        {
            "row": traced.row,
            "sample": traced.number,
            "shard": traced.shard,
            "documents": documents(traced.sample, to_text=to_text),
        }
        for traced in found.samples
    ]
    return {"begin": found.begin, "end": found.end, "num_shards": found.num_shards, "samples": samples}


class _DigestMeter(progress.Meter):
    """Writes a hash of this rank's input ids after each optimizer step, equal for all sizes of micro batches."""

    def __init__(self, loader: Loader[Any], batches_per_step: int, first: int, put: Callable[[str], None]) -> None:
        super().__init__(loader, batches_per_step)
        self.first, self.put = first, put
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def draw(self, batches: Iterator[Any]) -> int:
        """Takes a batch, and gives its number of tokens."""
        tap = _Tap(batches)
        num_tokens = super().draw(tap)
        ids = tap.last.get("input_ids") if isinstance(tap.last, dict) else tap.last
        if not isinstance(ids, torch.Tensor):
            raise TypeError(f"batches must have a tensor input_ids to be hashed, got {type(tap.last).__name__}")
        self._hash.update(ids.to("cpu", torch.int64).contiguous().numpy().data)
        if self.batches % self.batches_per_step == 0:
            self.put(f"step {self.first + self.steps} {self._hash.hexdigest()}")
            self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        return num_tokens


class _Tap(Iterator[Any]):
    """Hands on what an iterator gives, and keeps the last of it."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self.last: Any = None

    def __next__(self) -> Any:
        self.last = next(self.source)
        return self.last


class _Saver:
    """Loads the newest checkpoint of a run, and saves the steps that are to be saved; does nothing without a URL."""

    def __init__(self, loader: Any, options: argparse.Namespace, storage_options: Any) -> None:
        self.loader = loader
        self.url, self.every = options.run_checkpoint, options.run_save_every
        self.storage_options = _of_url(self.url or "", storage_options)
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
    return _hide(text, hidden)


def _hide(text: str, hidden: Sequence[str]) -> str:
    for secret in sorted(hidden, key=len, reverse=True):
        text = re.sub(rf"(?<![\w/+]){re.escape(secret)}(?![\w/+])", "***", text) if secret else text
    return text


if __name__ == "__main__":
    sys.exit(main())
