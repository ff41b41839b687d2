"""The model card's table, recipe and metadata, from a config and a run's files."""

import dataclasses
import json

from jaxtune.config import read_recipe
from jaxtune.config.schema import CkptOptions, Config, DataOptions, Dataset, ExportOptions, ModelOptions, TrainOptions
from jaxtune.exports.card import card_datasets, card_evaluation, card_recipe, card_rows
from jaxtune.host.run_folder import RunFolder
from jaxtune.lora.options import LoraOptions
from jaxtune.optim.options import OptimOptions


def test_data_are_named_without_their_folders(tmp_path):
    """One path, an entry with several paths, or a URL whose query may be a key."""
    several = ("/home/ada/chat.jsonl", "https://host/more.jsonl.gz?key=secret")
    data = DataOptions(datasets=(Dataset(path="/data/text"), Dataset(path=several)))
    rows = card_rows(Config(data=data, lora=LoraOptions(enabled=True)), RunFolder(tmp_path), steps=3, tokens=1200)
    assert rows["data"] == "text, chat.jsonl, more.jsonl.gz"
    assert rows["steps"] == "3" and rows["tokens"].startswith("1,200") and "documents" not in rows
    assert rows["LoRA"].endswith("all-linear")


def test_the_recipe_can_be_run_again_and_says_nothing_of_the_machine(tmp_path):
    entry = Dataset(path="ada/chats", type="conversation", message_property_mappings=("role=who",))
    config = Config(
        model=ModelOptions(path="my/model"),
        data=DataOptions(datasets=(entry, Dataset(path="ada/more", prompt_format="/a/{b}\n", type="instruction"))),
        optim=OptimOptions(learning_rate=1e-4),
        train=TrainOptions(max_steps=7),
        lora=LoraOptions(enabled=True, target_modules=("q_proj", "v_proj")),
    )
    place = {"ckpt": CkptOptions(dir="/secret/place"), "export": ExportOptions(push_to_hub="ada/hidden")}
    ran = dataclasses.replace(
        config, **place, train=TrainOptions(max_steps=7, output_dir="/secret/runs", run_name="secret")
    )
    text = card_recipe(ran)
    assert text == card_recipe(config) and "secret" not in text and "hidden" not in text
    file = tmp_path / "again.yaml"
    file.write_text(text)
    assert read_recipe(str(file)).resolve() == config
    home = (str(tmp_path / "my data.jsonl"), "s3://key:secret@bucket/part.jsonl")
    data = DataOptions(datasets=(Dataset(path=home), Dataset(path="~/other.jsonl")))
    text = card_recipe(Config(model=ModelOptions(path="/home/ada/model"), data=data))
    assert "- my data.jsonl\n" in text and "- part.jsonl\n" in text and "path: other.jsonl\n" in text
    assert "path: model\n" in text and str(tmp_path) not in text and "secret" not in text and "ada" not in text


def test_hub_ids_and_the_last_evaluation_are_told_apart_from_the_rest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "too").mkdir(parents=True)
    paths = ("ada/chats", "here/too", "data/part.jsonl", "dummy", "/ada/chats", "ada/chats", ("a/b", "c/d"))
    config = Config(data=DataOptions(datasets=tuple(Dataset(path=path) for path in paths)))
    assert card_datasets(config) == ["ada/chats"]
    folder = RunFolder(tmp_path)
    assert card_evaluation(config, folder, 4) is None
    rows = [
        {"step": 2, "eval_loss": 3.0},
        {"step": 4, "loss": 1.0},
        {"step": 4, "eval_loss": 2.0, "eval_x": float("nan")},
    ]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"step": 6, "eval_loss": 1.0}]))
    alone = Config(data=DataOptions(datasets=(Dataset(path="ada/chats"),)))
    evaluation = card_evaluation(alone, folder, 4)
    assert evaluation is not None and evaluation.metrics == {"loss": 2.0}
    assert (evaluation.data, evaluation.hub_id) == ("chats, held-out part", "ada/chats")
    assert card_evaluation(config, folder, 4).hub_id is None
