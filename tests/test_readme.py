"""The README's code runs as it stands, but for the names of buckets."""

import pathlib
import re
import threading

import corpora
import pytest

from ibm_nodes import load_recipe

README = pathlib.Path(__file__).parent.parent / "README.md"
DOCS = sorted((README.parent / "docs").glob("*.md"))


def block(heading: str) -> str:
    section = README.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.search(r"```python\n(.*?)```", section, re.S).group(1)


@pytest.fixture
def urls(tmp_path):
    for name, first in (("web", 0), ("code", 60)):
        rows = corpora.documents([3, 40, 0, 90, 300] * 12, first=first)
        corpora.write(f"file://{tmp_path}/corpora/{name}/", [corpora.every(rows, 7)] * 2, "parquet")
    return {"s3://corpora/": f"file://{tmp_path}/corpora/", "s3://runs/": f"file://{tmp_path}/runs/"}


def run(code: str, urls: dict[str, str], **names: object) -> dict[str, object]:
    for old, new in urls.items():
        code = code.replace(old, new)
    exec(compile(code, "README.md", "exec"), names)
    return names


class Stop(Exception):
    pass


def test_the_training_loop_saves_and_goes_on(urls):
    code = block("A training loop").replace("4096", "64").replace("global_batch_size=1024", "global_batch_size=8")
    code = re.sub(r"    storage_options=.*\n", "", code).replace("% 1000", "% 5")
    code += "\nloader.close()\n"
    seen: list[list[int]] = []

    def train_until(count):
        def train(input_ids, labels):
            if len(seen) == count:
                raise Stop
            seen.append(input_ids.flatten().tolist())

        return train

    with pytest.raises(Stop):
        run(code, urls, train=train_until(13))
    for thread in threading.enumerate():  # a program would wait for its last save at its end
        if thread.name == "ibm_nodes-save":
            thread.join()
    first = list(seen)
    del seen[10:]  # what came after the last save
    with pytest.raises(Stop):
        run(code, urls, train=train_until(13))
    assert seen == first


def test_the_graph_composed_by_hand_yields_batches(urls):
    code = block("Composing by hand").replace("4096", "64").replace("1024", "8")
    names = run(code, urls, rank=0, world_size=2)
    with names["loader"] as loader:
        assert next(iter(loader))["input_ids"].shape == (4, 64)


def test_the_node_of_the_users_own_keeps_the_contracts(urls):
    from ibm_nodes import Reader

    names = run(block("A node of your own"), urls, Reader=Reader)
    assert all(len(document.tokens) >= 64 for document, _ in zip(names["one_shard"](0, 4), range(5), strict=False))


def test_the_loop_of_the_page_on_weights_changes_them(urls):
    code = (README.parent / "docs" / "mixing.md").read_text().split("```python\n")[1].split("```")[0]
    code = code.replace("4096", "64").replace("1024", "8").replace("10**12", "2000").replace("50_000", "3")
    datasets = {name: f"{urls['s3://corpora/']}{name}/" for name in ("web", "code")}
    count = iter(range(6))

    def train(batch):
        if next(count) == 5:
            raise Stop

    names: dict[str, object] = {"datasets": datasets, "train": train}
    with pytest.raises(Stop):
        exec(compile(code, "mixing.md", "exec"), names)
    with names["loader"] as loader:
        assert loader.state_dict()["schedule"]["changes"] == [(103 * 8, {"web": 0.5, "code": 0.5})]


def test_the_page_on_packing_has_a_length_that_changes(urls):
    code = (README.parent / "docs" / "packing.md").read_text().split("```python\nloader =")[1].split("```")[0]
    code = code.replace("4096", "64").replace("8192", "128").replace("32768", "32").replace("1024", "8")
    code = code.replace("11 * 10**11", "2100").replace("10**12", "1000")
    datasets = {name: f"{urls['s3://corpora/']}{name}/" for name in ("web", "code")}
    names = {"datasets": datasets, "weights": dict.fromkeys(datasets, 1), "load_recipe": load_recipe}
    exec(compile(f"loader = {code}", "packing.md", "exec"), names)
    with names["loader"] as loader:
        found = [batch["input_ids"].shape[1] for batch, _ in zip(loader, range(5), strict=False)]
    assert found == [64, 64, 128, 128, 32]


def test_every_file_that_is_named_exists():
    for page in (README, *DOCS, README.parent / "CONTRIBUTING.md"):
        for name in re.findall(r"`((?:tests|benchmarks|docs|recipes)/[\w/.-]+\w)`", page.read_text()):
            assert (README.parent / name).exists(), f"{page.name} names {name}"
        for target in re.findall(r"\]\(([\w/.-]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
