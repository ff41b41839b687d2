"""The smallest files of other systems that are translated, to which tests add lines."""

import pathlib

from jaxtune.config import read_recipe

SUROGATE = "model: my/model\ndatasets: [{path: a.jsonl, type: conversation}]\nsequence_len: 512\n"
XORL = "model: {model_path: my/model}\ndata: {datasets: [{path: a.jsonl}]}\ntrain: {output_dir: out}\n"
ERNIEKIT = "model_name_or_path: my/model\ntrain_dataset_path: a.jsonl\nmax_seq_len: 64\nbf16: true\n"
QEFFICIENT = (
    "model: {model_name: my/model}\n"
    "dataset: {json_file_path: a.json, prompt_template: 'Sum up: {text}', completion_template: '{summary}'}\n"
    "optimizers: {lr: 1e-4}\n"
)
TRL = "model_name_or_path: my/model\ndataset_name: a/b\nmax_length: 64\n"
AXOLOTL = "base_model: my/model\ndatasets: [{path: a.jsonl, type: chat_template}]\nlearning_rate: 1e-4\n"


def resolve_text(text: str, dialect: str | None = None, overrides=()):
    pathlib.Path("its.yaml").write_text(text)
    return read_recipe("its.yaml", dialect=dialect).resolve(overrides)
