"""The recipe of a run that fd87697 stopped after step 4 of 8."""

from jaxtune.config import dataset, new_config


def get_config():
    """Adapters on a model of 2 layers; every path is relative to this folder."""
    config = new_config()
    config.model.path = "model"
    config.model.dtype = "float32"
    config.precision.recipe = "fp32"
    config.data.datasets = (dataset(path="chat.jsonl", type="conversation"),)
    config.data.validation_split = 0.1
    config.data.seq_len = 64
    config.train.max_steps = 8
    config.train.micro_batch_size = 2
    config.optim.learning_rate = 1e-2
    config.lora.enabled = True
    config.lora.rank = 2
    config.lora.dropout = 0.1
    config.ckpt.save_steps = 4
    config.export.at_end = False
    return config
