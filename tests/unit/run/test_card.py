"""The model card's table, from a config and what a run has written."""

from jaxtune.config.schema import Config, Data, Dataset, Lora
from jaxtune.run.card import card_rows
from jaxtune.run.folder import RunFolder


def test_data_are_named_without_their_folders(tmp_path):
    """One path, several of an entry, or a URL."""
    several = ("/home/ada/chat.jsonl", "https://host/more.jsonl.gz")
    data = Data(datasets=(Dataset(path="/data/text"), Dataset(path=several)))
    rows = card_rows(Config(data=data, lora=Lora(enabled=True)), RunFolder(tmp_path), steps=3, tokens=1200)
    assert rows["data"] == "text, chat.jsonl, more.jsonl.gz"
    assert rows["steps"] == "3" and rows["tokens"].startswith("1,200") and "documents" not in rows
    assert rows["LoRA"].endswith("all-linear")
