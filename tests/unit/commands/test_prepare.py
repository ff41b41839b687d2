"""jaxtune prepare: counts, and samples as token(id|label|weight)."""

import json
import re

from tiny import byte_tokenizer

from jaxtune import prepare

RECIPE = """
from jaxtune.config import dataset, new_config

def get_config(folder):
    config = new_config()
    config.model.path = folder + "/model"
    config.data.datasets = (dataset(path=folder + "/data.jsonl"),)
    config.data.seq_len = 64
    config.train.output_dir = folder + "/runs"
    config.optim.power = 2.0
    config.optim.schedule = "polynomial"
    return config
"""


def test_prepare_prints_counts_and_shows_what_is_trained(tmp_path, capsys):
    byte_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "data.jsonl").write_text(json.dumps({"instruction": "H", "output": "Y"}) + "\n")
    (tmp_path / "recipe.py").write_text(RECIPE)
    command = [f"--config={tmp_path}/recipe.py:{tmp_path}", "--ids", "--config.optim.schedule=constant"]
    assert prepare.main(command) == 0
    out = capsys.readouterr().out
    assert "left out: recipe: optim.power = 2.0: has no effect" in out
    assert "data.jsonl: instruction from instruction, output" in out
    template = "chat template: the tokenizer's own, because chat.template is unset; the assistant's turns are found in"
    assert f"{template} the rendered text\n" in out
    assert "1 document, 23 tokens (2 trained) in 1 row, 35.9% full" in out
    assert "H(39|-100|0) <|im_end|>(258|-100|0) \\n(198|-100|0)" in out
    assert "Y(56|56|1) <|im_end|>(258|258|1) \\n(198|-100|0)" in out

    assert prepare.main([*command[:1], "--config.data.seq_len=22", "--config.data.truncation=right"]) == 0
    shown = capsys.readouterr().out.partition("sample 0, ")[2]
    assert shown == (
        f"{tmp_path}/data.jsonl:1: \n  context | <|im_start|>user\\nH<|im_end|>\\n<|im_start|>assistant\\n"
        "\n  trained | Y<|im_end|>\n  ... and 1 tokens more\n"
    )

    shards = [f"--shard={shard}" for shard in ("0/2", "1/2", "2/2", "a")]
    assert [prepare.main([*command, "--config.data.datasets[0].samples=1", shard]) for shard in shards] == [0, 0, 2, 2]
    printed = capsys.readouterr()
    assert "1 document in the 1 parts of shard 0/2; of all 1 parts 1 are there" in printed.out
    assert "0 documents in the 0 parts of shard 1/2" in printed.out
    assert "--shard=2/2: must be I/N" in printed.err and "--shard=a: must be I/N" in printed.err

    stream = [*command, "--config.data.streaming=yes", "--config.train.max_steps=1", "--config.data.window_rows=2"]
    assert prepare.main([*stream, "--show=1"]) == 0
    out = capsys.readouterr().out
    assert (
        "only the first rows of the training data, which are not cached" in out
        and f"sample 0, {tmp_path}/data.jsonl:1: " in out
        and "H(39|-100|0)" in out
    )
    assert prepare.main([*stream, "--shard=0/2"]) == 2 and "there are no shards" in capsys.readouterr().err

    for name in ("b", "c"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name}{i}"}}\n' for i in range(3)))
    several = RECIPE.replace(
        'dataset(path=folder + "/data.jsonl"),', '*(dataset(path=folder + f"/{n}.jsonl") for n in "bc"),'
    )
    (tmp_path / "several.py").write_text(several)
    assert prepare.main([f"--config={tmp_path}/several.py:{tmp_path}", "--show=3"]) == 0
    out = capsys.readouterr().out
    printed = re.findall(r"sample (\d), \S*/(\w.jsonl:\d): ", out)
    assert "chat template" not in out, "running text has no messages"
    assert printed == [("0", "b.jsonl:1"), ("3", "c.jsonl:1"), ("1", "b.jsonl:2")]

    (tmp_path / "data.jsonl").write_text('{"instruction": "H"')
    assert prepare.main(command) == 2
    assert f"jaxtune: error: {tmp_path}/data.jsonl:1: not JSON" in capsys.readouterr().err
