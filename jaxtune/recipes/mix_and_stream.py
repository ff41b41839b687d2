"""LoRA fine-tuning of a Qwen3 model on a stream of conversations, with web text mixed in; one GPU.

Hardware: a GPU of 24 GB or more (RTX 4090), as for qwen_lora. Only validation data is downloaded beforehand. Three
of four samples are conversations; a dataset that ends restarts.

    python -m jaxtune.train --config=mix_and_stream
    python -m jaxtune.train --config=mix_and_stream:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.config import dataset
from jaxtune.recipes import qwen_lora


def get_config(model="Qwen/Qwen3-0.6B"):
    """Return the config of qwen_lora on two streams, in shares of 3 to 1."""
    config = qwen_lora.get_config(model)
    config.data.streaming = True
    config.data.mixing = "interleave_over"
    config.data.datasets = (
        dataset(path="HuggingFaceTB/smoltalk", subset="all", type="conversation", weight=3.0),
        dataset(path="HuggingFaceFW/fineweb-edu", subset="sample-10BT", type="text", weight=1.0),
    )
    config.data.validation_split = 0.0
    held_out = {"path": "HuggingFaceTB/smoltalk", "subset": "all", "split": "test", "samples": 1000}
    config.data.eval_datasets = (dataset(**held_out, type="conversation"),)
    config.train.max_steps = 1000  # a stream has no end
    return config
