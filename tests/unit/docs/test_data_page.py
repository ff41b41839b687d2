"""Every sample in docs/reference/data.md becomes what the page shows."""

from pathlib import Path

import pytest
from pages import DOCS, blocks
from tiny import byte_tokenizer

from jaxtune.config import dataset, new_config, resolve
from jaxtune.data.cache.documents import tokenize
from jaxtune.prepare import describe

BLOCKS = list(blocks((DOCS / "reference" / "data.md").read_text(encoding="utf-8")))
# A sample, the entry for it, and what `prepare` shows.
LAYOUTS = [tuple(block.code for block in BLOCKS[i : i + 3]) for i in range(0, len(BLOCKS), 3)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(("sample", "entry", "shown"), LAYOUTS, ids=range(len(LAYOUTS)))
def test_a_layout_is_rendered_and_masked_as_the_page_says(tokenizer, tmp_path, monkeypatch, sample, entry, shown):
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text(sample, encoding="utf-8")
    config = new_config()
    config.model.path = "model"
    config.data.datasets = (eval(entry, {"dataset": dataset}),)
    labels = ()
    if "classification" in entry:
        config.model.head = "classification"
        labels = ("bad", "good") if "bad" in sample else ("LABEL_0",)
    if "preference" in entry:
        config.preference.loss = "kto" if "unpaired" in entry else "sigmoid"
    documents = tokenize(
        resolve(config, "docs/reference/data.md").data.datasets, tokenizer, tmp_path / "cache", labels=labels
    )
    of_unit = [describe(documents, i, tokenizer, 10_000, ids=False, labels=labels) for i in range(documents.units[1])]
    lines = "".join(map(str, of_unit)).strip().splitlines()
    assert [line.strip() for line in lines] == [line.rstrip() for line in shown.splitlines()]


def test_every_block_of_the_page_is_one_of_these():
    assert [block.language for block in BLOCKS] == ["json", "python", "text"] * len(LAYOUTS)
    assert len(LAYOUTS) >= 20
