"""A config of another system trains as the recipe that says the same, to the last bit."""

import json
from pathlib import Path

from runs import call, losses

EXAMPLE = Path(__file__).parents[1] / "golden" / "foreign" / "surogate.yaml"
RECIPE = """
from jaxtune.config import dataset, new_config

def get_config():
    config = new_config()
    config.model.path = {model!r}
    config.data.datasets = (dataset(path={data!r}, type="conversation", messages_field="conversations"),)
    config.data.validation_split = 0.1
    config.data.chat_template = "chatml"
    config.data.truncation = "delete"
    config.data.seq_len = 64
    config.train.micro_batch_size = 2
    config.train.grad_accum_steps = 4
    config.train.max_steps = 4
    config.train.output_dir = {output!r}
    config.optim.name = "adamw_8bit"
    config.optim.learning_rate = 2e-4
    config.optim.schedule = "cosine"
    config.optim.warmup_ratio = 0.03
    config.optim.weight_decay = 0.1
    config.lora.enabled = True
    config.lora.rank = 16
    config.lora.alpha = 32.0
    config.lora.dropout = 0.05
    config.parallel.zero = 1
    config.device.gpus = 1
    config.memory.remat = "block"
    config.eval.steps = 100
    return config
"""


def test_surogates_example_and_the_same_recipe_have_bit_equal_losses(home):
    data = home / "finetome.jsonl"
    rows = [json.loads(line)["messages"] for line in (home / "chat.jsonl").read_text().splitlines()]
    data.write_text("".join(json.dumps({"conversations": messages}) + "\n" for messages in rows))
    fields = {"model": str(home / "model"), "data": str(data), "output": str(home / "runs")}
    (home / "same.py").write_text(RECIPE.format(**fields))
    sizes = ["--config.data.seq_len=64", "--config.train.max_steps=4", f"--config.train.output_dir={home / 'runs'}"]
    paths = [f"--config.model.path={home / 'model'}", f"--config.data.datasets[0].path={data}"]
    printed = call("jaxtune.train", str(EXAMPLE), *paths, *sizes)
    call("jaxtune.train", f"--config={home / 'same.py'}")
    assert losses(home / "runs" / "surogate") == losses(home / "runs" / "same")
    assert len(losses(home / "runs" / "surogate")) >= 4
    assert "lora_dropout = 0.05 -> lora.dropout = 0.05" in printed
