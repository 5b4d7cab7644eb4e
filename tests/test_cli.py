"""The command line: its flags, a run's progress and summary, what a check finds, and what it says to bad input."""

import inspect
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import corpora
import pyarrow as pa
import pytest
import torch
from torchdata.nodes import BaseNode

from ibm_nodes import Batcher, Loader, checkpoint, cli, flags, list_recipes, load_recipe, progress, report, storage

SCRIPT = str(Path(sys.executable).with_name("ibm-nodes"))
SEQ_LEN, BATCH = 64, 24
SMALL = ["--seq-len", str(SEQ_LEN), "--eos-id", "2", "--global-batch-size", str(BATCH), "--num-shards", "24"]


@pytest.fixture
def no_progress(monkeypatch):
    """Lines of progress come after a second, which a busy machine may take for the shortest run."""
    monkeypatch.setattr(progress, "FIRST_LINE_SECONDS", 1e9)


@pytest.fixture
def fails(ibm_nodes):
    """Runs a command that must fail with one sentence on stderr and nothing else; gives the sentence."""

    def run(*argv, out=False):
        code, output, error = ibm_nodes(*argv)
        assert code == 1
        assert out or not output
        assert error.startswith("ibm-nodes: ")
        assert error.count("\n") == 1
        return error.removeprefix("ibm-nodes: ").rstrip("\n")

    return run


@pytest.fixture
def data(tmp_path):
    """Two datasets on the disk, 300 x 50 and 40 x 30 tokens, and the flags to run their mix."""
    root = f"file://{tmp_path}/"
    corpora.write(f"{root}web/", [[corpora.documents([50] * 100, first=100 * n, stride=60)] for n in range(3)], "arrow")
    corpora.write(
        f"{root}code/", [[corpora.documents([30] * 20, first=20 * n, stride=60)] for n in range(2)], "parquet"
    )
    return [
        "--data",
        f"web={root}web/",
        "--data",
        f"code={root}code/",
        "--weight",
        "web=0.75",
        "--weight",
        "code=0.25",
        *SMALL,
    ]


def one(url, *more):
    """The flags to run one dataset."""
    return ["run", "pretrain", "--data", f"x={url}", "--weight", "x=1", *SMALL, *more]


def put_table(url, storage_options=None, **columns_):
    """Writes a dataset of one Arrow file."""
    storage.write(f"{url}0.arrow", corpora.arrow([pa.table(columns_)]), storage_options)
    return url


def recipe_of(monkeypatch, recipe):
    """Makes a function the recipe of every name."""
    monkeypatch.setattr(cli, "load_recipe", lambda name: recipe)


class Tensors(BaseNode):
    """Yields dicts of 8 tokens, each after some time."""

    def __init__(self, count, seconds=0.0):
        super().__init__()
        self.count, self.seconds = count, seconds

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.at = initial_state["at"] if initial_state else 0

    def next(self):
        if self.at >= self.count:
            raise StopIteration
        time.sleep(self.seconds)
        self.at += 1
        return {"input_ids": torch.zeros(2, 4)}

    def get_state(self):
        return {"at": self.at}


# The list of recipes, and flags


def test_lists_the_recipes_with_what_they_return_and_their_first_line(ibm_nodes):
    code, out, error = ibm_nodes("recipes")
    assert (code, error) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == list_recipes()
    for line, name in zip(lines, list_recipes(), strict=True):
        assert line.split()[1] == ("model" if name == "fsdp-ethernet" else "loader")
        assert line.endswith("  " + inspect.getdoc(load_recipe(name)).splitlines()[0])


def test_lists_recipes_that_return_models_and_those_that_cannot_be_loaded(ibm_nodes, monkeypatch):
    def model() -> torch.nn.Module:
        """Builds a model."""

    def load(name):
        if name == "broken":
            raise ImportError("no module named 'nowhere'")
        return model

    monkeypatch.setattr(cli, "list_recipes", lambda: ["broken", "some"])
    monkeypatch.setattr(cli, "load_recipe", load)
    assert ibm_nodes("recipes") == (
        0,
        "broken  cannot be loaded: no module named 'nowhere'\nsome    model   Builds a model.\n",
        "",
    )


def test_help_describes_each_argument_of_the_recipe_that_text_can_give(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["run", "pretrain", "--help"])
    assert exit.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    parameters = inspect.signature(load_recipe("pretrain")).parameters
    for name in parameters:
        flag = "--" + flags.SINGULAR.get(name, name).replace("_", "-") + " "
        assert (flag in text) == (name not in ("mesh", "text"))
    assert "tokens in a sample." in text
    assert "of the order of documents, the mix and the shuffle. (default: 0)" in text


def record(
    datasets: Mapping[str, str],
    *,
    ratio: float,
    size: int | None = None,
    order: Literal["a", "b"] = "a",
    fast: bool = True,
    weights: Mapping[str, float] | None = None,
    counts: dict[str, int] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    mesh: io.BytesIO | None = None,
) -> Loader[Any]:
    """Gives what it was given.

    Args:
        ratio: 50 % or
            so.
    """


def parse(*given):
    return flags.arguments(record, flags.parser("record", record).parse_args([*given]))


def test_what_is_not_given_is_left_to_the_recipe():
    assert parse("--data", "a=b", "--ratio", "2") == {"datasets": {"a": "b"}, "ratio": 2.0}


def test_flags_give_what_the_annotations_say():
    given = ["--data", "a=s3://x/?y=1", "--data", "b=c", "--ratio", "nan", "--size", "7", "--order", "b", "--no-fast"]
    found = parse(*given, "--weight", "a=0.5", "--weight", "b=1e-3", "--counts", "a=3")
    assert str(found.pop("ratio")) == "nan"
    assert found == {
        "datasets": {"a": "s3://x/?y=1", "b": "c"},
        "size": 7,
        "order": "b",
        "fast": False,
        "weights": {"a": 0.5, "b": 0.001},
        "counts": {"a": 3},
    }


def test_storage_options_nest_at_dots_and_are_json_where_they_can_be_but_secrets():
    texts = ["anon=false", "endpoint_url=http://h:1", "client_kwargs.region_name=eu", "client_kwargs.verify=null"]
    texts += [
        "key=123",
        "secret=true",
        "client_kwargs.aws_session_token=1e3",
        'config_kwargs={"a": {"b": [1]}}',
        "profile=",
    ]
    found = parse("--data", "a=b", "--ratio", "1", *(part for text in texts for part in ("--storage-option", text)))
    assert found["storage_options"] == {
        "anon": False,
        "endpoint_url": "http://h:1",
        "client_kwargs": {"region_name": "eu", "verify": None, "aws_session_token": "1e3"},
        "key": "123",
        "secret": "true",
        "config_kwargs": {"a": {"b": [1]}},
        "profile": "",
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--data", "a"], "argument --data: must be name=value, got 'a'"),
        (["--data", "=a"], "argument --data: must be name=value, got '=a'"),
        (["--data", "a="], "argument --data: must be name=value, got 'a='"),
        (["--data", "a=b", "--data", "a=c", "--ratio", "1"], "--data must give 'a' once, got it twice"),
        (["--weight", "a=b"], "argument --weight: must be name=number, got 'a=b'"),
        (["--size", "1.5"], "argument --size: invalid int value: '1.5'"),
        (["--order", "c"], "argument --order: invalid choice: 'c' (choose from "),
        (["--rat", "1"], "the following arguments are required: --data, --ratio"),
        (["--data", "a=b", "--ratio", "1", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["--storage-option", "hunter2"], "argument --storage-option: must be key=value, such as "),
        (
            ["--data", "a=b", "--ratio", "1", *["--storage-option", "a=1", "--storage-option", "a.b=1"]],
            "--storage-option must",
        ),
        (["--steps", "0"], "argument --steps: must be a number above 0, got '0'"),
        (["--seconds", "inf"], "argument --seconds: must be a number above 0, got 'inf'"),
        (["--tokens", "3Q"], "argument --tokens: must be a number above 0, got '3Q'"),
    ],
)
def test_says_what_is_wrong_with_a_flag(fails, monkeypatch, given, message):
    recipe_of(monkeypatch, record)
    assert fails("run", "record", *given).startswith(message)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run"], f"run must be given the name of a recipe: there are {', '.join(list_recipes())}"),
        (["run", "nope"], f"no recipe 'nope': there are {', '.join(list_recipes())}"),
        (["walk"], "argument COMMAND: invalid choice: 'walk' (choose from "),
        (["recipes", "more"], "unrecognized arguments: more"),
        (["run", "quickstart", "--save-every", "3"], "--save-every must come with --checkpoint URL"),
    ],
)
def test_says_what_is_wrong_with_a_command(fails, argv, message):
    assert fails(*argv).startswith(message)


def test_shows_its_help_where_there_is_no_command(ibm_nodes):
    code, out, _ = ibm_nodes()
    assert code == 0
    assert "recipes" in out
    assert "run NAME" in out


def test_refuses_recipes_that_flags_cannot_serve(fails, monkeypatch):
    def needs(mesh: io.BytesIO) -> Loader[Any]: ...

    def same(steps: int) -> Loader[Any]: ...

    def unknown(steps: "Nowhere") -> Loader[Any]: ...  # noqa: F821

    def model(size: int) -> torch.nn.Module:
        return torch.nn.Identity()

    messages = {
        needs: "the recipe needs 'mesh', which no flag can give: call the recipe from Python",
        same: "recipe 'x' has an argument that is named as a flag of every run: argument --steps: conflicting",
        unknown: "the annotations of a recipe must be names of its module: name 'Nowhere'",
        model: "recipe 'x' gives a Identity, not a loader to run: call it from Python",
    }
    for recipe, message in messages.items():
        recipe_of(monkeypatch, recipe)
        assert fails("run", "x", "--size", "1").startswith(message)


@pytest.mark.parametrize(
    ("text", "value"), [("7", 7), ("3e11", 3 * 10**11), ("300B", 3 * 10**11), ("1.5k", 1500), ("2T", 2 * 10**12)]
)
def test_reads_numbers_with_letters(text, value):
    options = flags.parser("record", record).parse_args(["--data", "a=b", "--ratio", "1", "--tokens", text])
    assert options.run_tokens == value


# Runs


def test_a_run_of_some_steps_gives_their_numbers(ibm_nodes, data, no_progress):
    code, out, error = ibm_nodes("run", "pretrain", *data, "--steps", 40, "--json")
    assert (code, error) == (0, "")
    found = json.loads(out)
    assert {name: found[name] for name in ("recipe", "end", "steps", "batches", "tokens", "position")} == {
        "recipe": "pretrain",
        "end": "reached",
        "steps": 40,
        "batches": 40,
        "tokens": 40 * BATCH * SEQ_LEN,
        "position": 40 * BATCH,
    }
    assert 0 < found["start_seconds"] <= found["waited_seconds"] <= found["seconds"]
    assert found["bytes"] > 0
    web, code = found["datasets"]["web"], found["datasets"]["code"]
    assert web["weight"] == pytest.approx(0.75)
    assert web["share"] == pytest.approx(0.75, abs=0.02)
    assert web["share"] + code["share"] == pytest.approx(1)
    assert web["passes"] == pytest.approx(web["documents"] / 300, rel=0.1)
    assert code["passes"] == pytest.approx(code["documents"] / 40, rel=0.2)


def test_a_run_stops_at_a_number_of_tokens_on_all_ranks_or_after_some_time(ibm_nodes, data):
    ranks = ["--rank", 1, "--world-size", 4, "--micro-batch-size", 2]
    _, out, _ = ibm_nodes("run", "pretrain", *data, *ranks, "--tokens", 5 * BATCH * SEQ_LEN - 1, "--json")
    found = json.loads(out)
    assert (found["steps"], found["batches"], found["tokens"]) == (5, 15, 5 * BATCH * SEQ_LEN // 4)
    began = time.monotonic()
    _, out, _ = ibm_nodes("run", "pretrain", *data, "--seconds", 0.5)
    passed = time.monotonic() - began
    assert 0.5 < passed < 5
    said = re.match(r"[\d,]+ steps?, [\d,]+ tokens in (\d\.\d) s: ", out)
    assert 0.5 <= float(said[1]) <= passed + 0.1  # as rounded


def test_a_run_ends_where_the_data_does(ibm_nodes, monkeypatch):
    recipe_of(monkeypatch, lambda: Loader(Tensors(3)))
    code, out, _ = ibm_nodes("run", "x", "--json")
    assert code == 0
    assert json.loads(out)["end"] == "ended"
    assert json.loads(out)["tokens"] == 24
    recipe_of(monkeypatch, lambda: Loader(Tensors(0)))
    assert "no batch came" in ibm_nodes("run", "x")[1]


def test_says_that_the_consumer_bounded_a_run(ibm_nodes, data):
    _, out, _ = ibm_nodes("run", "pretrain", *data, "--steps", 12, "--pace", 5_000)
    assert "\nbounded by the consumer: " in out
    found = json.loads(ibm_nodes("run", "pretrain", *data, "--steps", 12, "--pace", 5_000, "--json")[1])
    assert found["bound"] == "consumer"
    assert found["tokens_per_second"] < 6_000


def test_says_that_decoding_bounded_a_run(ibm_nodes, monkeypatch):
    recipe_of(monkeypatch, lambda: Loader(Batcher(Tensors(30, 0.01), batch_size=1, collate=lambda items: items[0])))
    _, out, _ = ibm_nodes("run", "x")
    assert "\nbounded by decoding, " in out
    assert re.search(r"waited for data (9\d|100)% of the time, 0% for the store", out)


def test_says_that_the_store_bounded_a_run(ibm_nodes, monkeypatch, tmp_path):
    from ibm_nodes import storage

    read = storage._read_local

    def slow(*arguments):
        time.sleep(0.3)
        return read(*arguments)

    monkeypatch.setattr(storage, "_read_local", slow)
    url = corpora.write(
        f"file://{tmp_path}/x/", [[corpora.documents([SEQ_LEN] * 4, first=4 * n)] for n in range(96)], "arrow"
    )
    _, out, _ = ibm_nodes(*one(url), "--steps", 12, "--buffer-size", 1, "--prefetch-factor", 1)
    assert "\nbounded by the store: " in out


def test_goes_on_from_the_newest_checkpoint(ibm_nodes, data, tmp_path):
    saves = f"file://{tmp_path}/saves"
    run = ["run", "pretrain", *data, "--checkpoint", saves, "--json"]
    assert json.loads(ibm_nodes(*run, "--steps", 5, "--save-every", 2)[1])["position"] == 5 * BATCH
    saved = [path.name for path in (tmp_path / "saves").glob("step-*")]
    assert sorted(saved) == [f"step-{step:08}" for step in (2, 4, 5)]
    assert json.loads(ibm_nodes(*run, "--steps", 3)[1])["position"] == 8 * BATCH
    assert checkpoint.latest(saves) == 8


def test_does_not_save_in_the_middle_of_a_step(ibm_nodes, data, tmp_path, monkeypatch):
    def interrupt(meter):
        if meter.batches == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(progress, "lines", lambda console: interrupt)
    saves = f"file://{tmp_path}/saves"
    code, out, _ = ibm_nodes(
        "run", "pretrain", *data, "--micro-batch-size", BATCH // 3, "--checkpoint", saves, "--save-every", 1
    )
    assert code == cli.INTERRUPTED
    assert out.startswith("1 step, ")
    assert checkpoint.latest(saves) == 1


def test_writes_plain_lines_where_there_is_no_terminal(ibm_nodes, data, monkeypatch):
    monkeypatch.setattr(progress, "FIRST_LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    code, out, _ = ibm_nodes("run", "pretrain", *data, "--steps", 3)
    assert code == 0
    web = r"web [\d.]+% \(weight 75.0%\), [\d.]+ passes"
    line = rf"step 1 \| [\d.]+ k tokens \| [\d.]+( [kM])? tokens/s \| {web} \| code .* \| waited \d.\d s"
    assert re.fullmatch(line, out.splitlines()[0])
    assert "\x1b" not in out
    _, out, error = ibm_nodes("run", "pretrain", *data, "--steps", 3, "--json")
    assert json.loads(out)["steps"] == 3
    assert error.startswith("step 1 | ")


def environment(**more):
    return {**os.environ, "PYTHONUNBUFFERED": "", "TERM": "xterm", **more}


def test_draws_a_panel_on_a_terminal_and_leaves_the_summary(data):
    terminal, side = pty.openpty()
    command = [SCRIPT, "run", "pretrain", *data, "--seconds", "2"]
    with subprocess.Popen(command, stdout=side, stderr=side, env=environment(COLUMNS="120", LINES="40")) as process:
        os.close(side)
        text = b""
        while select.select([terminal], [], [], 60)[0]:
            try:
                text += os.read(terminal, 65536)
            except OSError:  # the other end is closed
                break
    os.close(terminal)
    assert process.returncode == 0
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text.decode())
    assert re.search(r"pretrain  0:00:01  step [\d,]+  ", shown)
    assert re.search(r" web +[\d.]+ [kM] +\d\d\.\d% +75\.0% +\d+\.\d\d\d", shown)
    assert "\r\nbounded by " in shown


def start(*argv):
    """Starts a command, and waits for its first line."""
    process = subprocess.Popen(
        [SCRIPT, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    line = process.stdout.readline()
    return process, line


def test_ctrl_c_gives_the_summary_and_code_130(data):
    process, line = start("run", "pretrain", *data)
    assert line.startswith("step ")
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=10)
    assert (process.returncode, error) == (130, "")
    assert re.match(r"[\d,]+ steps, [\d,]+ tokens in ", out)
    assert "\nbounded by " in out


def test_ends_in_silence_when_it_is_terminated_or_its_reader_has_gone(data):
    process, _ = start("run", "pretrain", *data)
    process.terminate()
    assert process.communicate(timeout=10) == ("", "")
    assert process.returncode == 143
    process, _ = start("run", "pretrain", *data, "--seconds", "2")
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(10) == 1


# Bad input


def test_ctrl_c_before_the_first_batch_says_so(ibm_nodes, monkeypatch):
    def recipe():
        raise KeyboardInterrupt

    recipe_of(monkeypatch, recipe)
    assert ibm_nodes("run", "x") == (130, "", "ibm-nodes: stopped\n")


def test_errors_are_one_line_with_their_notes_and_without_the_quotes_of_a_key_error(fails, monkeypatch):
    def recipe():
        error = KeyError("no such\n  thing")
        error.add_note("in row 3")
        error.add_note("of x")
        raise error

    recipe_of(monkeypatch, recipe)
    assert fails("run", "x") == "no such thing (in row 3; of x)"


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    def recipe():
        raise ZeroDivisionError

    recipe_of(monkeypatch, recipe)
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", "x"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--weight", "web=0", "--weight", "code=0"], "must not all be zero"),
        (["--weight", "web=-1", "--weight", "code=1"], "must be finite and not negative, got -1.0 for 'web'"),
        (["--weight", "web=nan", "--weight", "code=1"], "must be finite and not negative, got nan for 'web'"),
        (["--weight", "web=inf", "--weight", "code=1"], "must be finite and not negative, got inf for 'web'"),
        (["--weight", "web=1"], "got none for ['code']"),
        (["--weight", "web=1", "--weight", "code=1", "--weight", "wab=1"], "got weights for ['wab']"),
    ],
)
def test_bad_weights(fails, data, changes, message):
    flags_of_data = [*data[:4], *data[8:]]
    sentence = fails("run", "pretrain", *flags_of_data, *changes, "--steps", 1)
    assert sentence.startswith("weights must ")
    assert message in sentence


@pytest.mark.parametrize("weights", [["web=0", "code=3"], ["web=30", "code=20"]], ids=str)
def test_a_weight_of_zero_and_any_sum_are_fine(ibm_nodes, data, weights, no_progress):
    given = [part for weight in weights for part in ("--weight", weight)]
    code, out, error = ibm_nodes("run", "pretrain", *data[:4], *data[8:], *given, "--steps", 20, "--json")
    assert (code, error) == (0, "")
    web = json.loads(out)["datasets"]["web"]
    assert web["share"] == pytest.approx(web["weight"], abs=0.03)


@pytest.mark.parametrize(("world_size", "next_smaller"), [(5, 4), (7, 6), (11, 8), (23, 12), (48, 24)])
def test_a_world_size_that_does_not_divide_names_the_next_smaller_one_that_does(fails, data, world_size, next_smaller):
    sentence = fails("run", "pretrain", *data, "--rank", 0, "--world-size", world_size)
    assert str(world_size) in sentence
    assert re.search(rf"next smaller .*\b{next_smaller}\b", sentence)


@pytest.mark.parametrize("check", [[], ["--check"]], ids=["run", "check"])
class TestBadData:
    """What a run says to data that it cannot read, and a check too."""

    @pytest.fixture
    def root(self, tmp_path):
        return f"file://{tmp_path}/"

    def test_no_such_folder_and_an_empty_prefix(self, fails, root, check):
        assert fails(*one(f"{root}nowhere/", *check)).startswith(f"no data under {root}nowhere/: it holds nothing")
        storage.write(f"{root}other/readme.txt", b"hello")
        assert f"no data under {root}other/: it holds 1 other" in fails(*one(f"{root}other/", *check))

    def test_no_such_column_names_the_integer_lists(self, fails, root, check):
        url = put_table(f"{root}x/", ids=[[1, 2]], text=["abc"], more=[[3]], score=[0.5])
        sentence = fails(*one(url, "--steps", 1, *check), out=check)
        assert (
            sentence
            == f"no column 'tokens' in {url}0.arrow: give column, one of its columns of integer lists: 'ids', 'more'"
        )

    def test_a_column_of_text_and_one_of_numbers(self, fails, root, check):
        url = put_table(f"{root}x/", ids=[[1, 2]], text=["abc"], score=[0.5])
        sentence = fails(*one(url, "--steps", 1, "--column", "text", *check), out=check)
        assert sentence.startswith(f"column 'text' of {url}0.arrow holds text, not token ids: tokenize it first")
        sentence = fails(*one(url, "--steps", 1, "--column", "score", *check), out=check)
        assert sentence.startswith(f"column 'score' of {url}0.arrow holds double, not lists of integers")

    def test_negative_ids(self, fails, root, check):
        url = put_table(f"{root}x/", tokens=[[1, 2], [], [3, -4]])
        sentence = fails(*one(url, "--steps", 1, *check), out=check)
        assert sentence.startswith("token ids must not be negative, got -4 in row 2: ")
        assert f"{url}0.arrow" in sentence

    def test_ids_beyond_the_vocabulary(self, fails, root, check):
        url = put_table(f"{root}x/", tokens=[[1, 2], [3], [99, 100]])
        sentence = fails(*one(url, "--steps", 1, "--vocab-size", 100, *check), out=check)
        assert sentence.startswith("token ids must be below 100, got 100 in row 2: ")
        assert f"{url}0.arrow" in sentence

    def test_no_token_at_all(self, fails, root, check):
        url = put_table(f"{root}x/", tokens=pa.array([[], None, []], pa.list_(pa.int32())))
        sentence = fails(*one(url, "--steps", 1, *check), out=check)
        assert sentence.startswith(f"dataset 'x' at {url} has no token in column 'tokens'")

    @pytest.mark.parametrize("name", ["0.arrow", "0.parquet"])
    def test_a_file_that_cannot_be_read(self, fails, root, check, name):
        storage.write(f"{root}x/{name}", b"no such format" * 10)
        assert f"{root}x/{name} is not a" in fails(*one(f"{root}x/", "--steps", 1, *check), out=check)

    def test_stores_that_nobody_knows(self, fails, check):
        assert "nostore" in fails(*one("nostore://x/", *check))


def s3_flags(options, **changes):
    given = {**options, **changes}
    given |= {f"client_kwargs.{key}": value for key, value in given.pop("client_kwargs").items()}
    return [
        part for key, value in given.items() if value is not None for part in ("--storage-option", f"{key}={value}")
    ]


@pytest.mark.parametrize("check", [[], ["--check"]], ids=["run", "check"])
@pytest.mark.parametrize(
    ("url", "changes"),
    [
        ("s3://no-such-bucket/x/", {}),
        ("{bucket}x/", {"key": "unknown-key"}),
        ("{bucket}x/", {"secret": "another-secret"}),
        ("{bucket}x/", {"key": None, "secret": None, "anon": "true"}),
        ("{bucket}x/", {"key": None, "secret": None, "profile": "nobody"}),
        ("{bucket}empty/", {}),
    ],
    ids=["no bucket", "unknown key", "wrong secret", "anonymous", "no profile", "empty"],
)
def test_an_object_store_that_refuses(fails, bucket, monkeypatch, url, changes, check):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    options = bucket.storage_options
    put_table(f"{bucket.url}x/", options, tokens=[[1, 2, 3]])
    url = url.format(bucket=bucket.url)
    sentence = fails(*one(url, *s3_flags(options, **changes), *check))
    assert url in sentence
    assert ": " in sentence.replace(url, "")
    for secret in (options["key"], options["secret"], "another-secret", "unknown-key"):
        assert secret not in sentence


def test_reads_and_saves_on_an_object_store_and_never_shows_the_credentials(ibm_nodes, bucket):
    options = bucket.storage_options
    put_table(f"{bucket.url}x/", options, tokens=[list(range(SEQ_LEN))] * 50)
    for more in (
        ["--steps", 2, "--json"],
        ["--steps", 2, "--checkpoint", f"{bucket.url}saves"],
        ["--check"],
        ["--check", "--json"],
    ):
        code, out, error = ibm_nodes(*one(f"{bucket.url}x/", *more, *s3_flags(options)))
        assert code == 0
        assert not any(options[name] in out + error for name in ("key", "secret"))
    assert checkpoint.latest(f"{bucket.url}saves", storage_options=options) == 2


@pytest.mark.parametrize(
    "given",
    [
        ["--storage-option", "secret=hunter2hunter2"],
        ["--storage-option=secret=hunter2hunter2"],
        ["--storage-options", "secret=hunter2hunter2"],
        ["--storage-option", 'client_kwargs={"aws_secret_access_key": "hunter2hunter2"}'],
    ],
    ids=str,
)
def test_hides_credentials_that_an_error_would_show(fails, monkeypatch, given):
    def recipe(storage_options: Mapping[str, Any] | None = None) -> Loader[Any]:
        raise OSError(f"cannot connect with {storage_options!r}, which is hunter2hunter2")

    recipe_of(monkeypatch, recipe)
    assert "hunter2" not in fails("run", "x", *given)


# Checks


def test_a_check_finds_what_an_oracle_does(ibm_nodes, data, tmp_path):
    code, out, error = ibm_nodes(
        "run", "pretrain", *data, "--check", "--tokens", "1M", "--vocab-size", 20_000, "--json"
    )
    assert (code, error) == (0, "")
    found = json.loads(out)
    for name, weight in (("web", 0.75), ("code", 0.25)):
        entry, rows = found["datasets"][name], corpora.read(f"file://{tmp_path}/{name}/")
        files = [path for path in (tmp_path / name).iterdir()]
        num_tokens = sum(map(len, rows.values()))
        assert (entry["files"], entry["bytes"]) == (len(files), sum(path.stat().st_size for path in files))
        assert entry["tokens"] == pytest.approx(num_tokens, rel=0.05)
        assert entry["share"] == pytest.approx(weight)
        assert entry["passes"] == pytest.approx(1e6 * weight / num_tokens, rel=0.05)
        assert (entry["column"], entry["type"], entry["vocab_size"]) == ("tokens", "lists of int32", 20_000)
        largest_ids = {max(max(rows[place]) for place in rows if place[0] == url) for url in {url for url, _ in rows}}
        assert entry["largest_id"] in largest_ids  # a file has one block here
        assert entry["resume_bytes"] == max(path.stat().st_size for path in files)
    assert found["problems"] == []
    assert (found["num_shards"], found["global_batch_size"], found["seq_len"]) == (24, BATCH, SEQ_LEN)


@pytest.mark.parametrize(
    ("num_shards", "batch", "micro"), [(24, 24, None), (24, 24, 2), (36, 24, None), (36, 24, 3), (7, 24, None)]
)
def test_the_world_sizes_of_a_check_are_those_that_build(ibm_nodes, data, num_shards, batch, micro):
    more = ["--num-shards", num_shards, "--global-batch-size", batch, *(["--micro-batch-size", micro] if micro else [])]
    found = json.loads(ibm_nodes("run", "pretrain", *data, *more, "--check", "--json")[1])
    urls = {text.partition("=")[0]: text.partition("=")[2] for text in (data[1], data[3])}
    settings = {
        "seq_len": SEQ_LEN,
        "eos_id": 2,
        "num_shards": num_shards,
        "global_batch_size": batch,
        "micro_batch_size": micro,
    }
    works = []
    for world_size in range(1, 40):
        try:
            load_recipe("pretrain")(urls, weights={"web": 1, "code": 1}, **settings, rank=0, world_size=world_size)
            works.append(world_size)
        except ValueError:
            pass
    assert found["world_sizes"] == works


def test_memory_of_a_check_holds_the_blocks_and_buffers_of_the_rank(ibm_nodes, tmp_path):
    url = f"file://{tmp_path}/x/"
    corpora.write(url, [[[[1] * 1000] * 1000]] * 24, "arrow")
    sizes = {}
    for world_size in (1, 2, 12):
        out = ibm_nodes(*one(url, "--check", "--world-size", world_size, "--buffer-size", 50, "--json"))[1]
        sizes[world_size] = json.loads(out)["memory_bytes"]
    blocks, buffers = 24 * 1000 * 1000 * 4, 24 * 50 * SEQ_LEN * 4
    assert blocks + buffers < sizes[1] < 2.5 * (blocks + buffers)
    assert sizes[2] == pytest.approx(sizes[1] / 2, rel=0.1)
    assert sizes[12] == pytest.approx(sizes[1] / 12, rel=0.1)


def test_a_check_is_a_table_and_its_facts(ibm_nodes, data):
    code, out, error = ibm_nodes("run", "pretrain", *data, "--check", "--tokens", "100M", "--world-size", 4)
    assert (code, error) == (0, "")
    head, web, code_, *facts = out.splitlines()
    assert head.split() == "dataset files bytes tokens weight passes largest id column".split()
    assert re.fullmatch(r"web +3 +[\d.]+ KiB +~1\d(\.\d)? k +75.0% +~[\d.e+]+ +[\d,]+ +tokens: lists of int32", web)
    assert facts[1:3] == ["logical shards: 24", "world sizes that work: 1, 2, 3, 4, 6, 8, 12, 24"]
    assert re.fullmatch(r"memory of a rank: ~[\d.]+ [KM]iB at world size 4, beside Python and torch", facts[3])
    assert facts[4] == f"steps: {1e8 / BATCH / SEQ_LEN:,.0f} for 100 M tokens"
    assert re.fullmatch(r"resuming reads again: up to [0-9.]+ KiB of web, up to [0-9.]+ KiB of code", facts[5])


def test_a_check_shows_all_that_would_fail(ibm_nodes, tmp_path):
    root = f"file://{tmp_path}/"
    put_table(f"{root}high/", tokens=[[5, 300]])
    put_table(f"{root}odd/", ids=[[1]])
    put_table(f"{root}fine/", tokens=[[1]])
    put_table(f"{root}unused/", ids=[[1]])
    given = [part for name in ("high", "odd", "fine", "unused") for part in ("--data", f"{name}={root}{name}/")]
    given += [part for weight in ("high=1", "odd=1", "fine=1", "unused=0") for part in ("--weight", weight)]
    given += ["--seq-len", 8, "--eos-id", 99, "--vocab-size", 100, "--global-batch-size", 24]
    code, out, error = ibm_nodes("run", "pretrain", *given, "--check", "--world-size", 5)
    assert code == 1
    assert [line.split()[0] for line in out.splitlines()[1:5]] == ["high", "odd", "fine", "unused"]
    assert "300 of 100" in out
    sentences = error.splitlines()
    assert "5" in sentences[0]
    assert sentences[1].startswith("ibm-nodes: token ids must be below 100, got 300 in row 0")
    assert sentences[2].startswith(f"ibm-nodes: no column 'tokens' in {root}odd/0.arrow")
    assert len(sentences) == 3


def test_a_check_passes_over_blocks_without_tokens(ibm_nodes, tmp_path):
    url = f"file://{tmp_path}/x/"
    empty = [[] for _ in range(5000)]
    storage.write(f"{url}0.arrow", corpora.arrow(corpora.tables([empty, empty])))
    storage.write(f"{url}1.arrow", corpora.arrow([]))
    storage.write(f"{url}2.parquet", corpora.parquet(corpora.tables([[[], [7, 9]]])))
    code, out, _ = ibm_nodes(*one(url, "--check", "--json"))
    assert code == 0
    assert json.loads(out)["datasets"]["x"]["largest_id"] == 9


def test_a_check_needs_something_to_look_at(fails, monkeypatch):
    recipe_of(monkeypatch, lambda: Loader(Tensors(1)))
    assert fails("run", "x", "--check").startswith("a recipe must have a Reader in its loader to be checked")


# Numbers


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (7.25, "7.25"),
        (999, "999"),
        (1000, "1 k"),
        (999_600, "1 M"),
        (12_340_000, "12.3 M"),
        (3e11, "300 G"),
        (1e14, "100 T"),
        (1e16, "10,000 T"),
    ],
)
def test_numbers_are_written_with_three_digits(number, text):
    assert report.count(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (2 << 50, "2,048.0 TiB")],
)
def test_bytes_are_written_in_powers_of_1024(number, text):
    assert report.size(number) == text


def test_a_long_list_of_world_sizes_is_cut_in_the_middle(ibm_nodes, data):
    _, out, _ = ibm_nodes("run", "pretrain", *data, "--num-shards", 720720, "--global-batch-size", 720720, "--check")
    (line,) = [line for line in out.splitlines() if line.startswith("world sizes")]
    assert line.startswith("world sizes that work: 1, 2, 3, 4, 5, ")
    assert ", ..., " in line
    assert line.endswith(", 360360, 720720")


STOPPED_WHILE_IT_TIDIES_UP = """
import os, sys, time
from ibm_nodes import cli

class Tidy:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        time.sleep(0.2)

def command(*_):
    Tidy()
    time.sleep(20)

cli._command = command
sys.exit(cli.main())
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_stop_that_comes_while_an_object_is_tidied_up_is_not_lost(number, code):
    command = [sys.executable, "-c", STOPPED_WHILE_IT_TIDIES_UP, str(int(number))]
    environment = {**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=15, env=environment)
    assert (done.returncode, done.stderr) == (code, "ibm-nodes: stopped\n" if number == signal.SIGINT else "")
