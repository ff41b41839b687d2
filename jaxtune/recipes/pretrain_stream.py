"""Pretraining of a Llama model from random weights on a stream of web text; one GPU, or several.

Hardware: GPUs of 24 GB or more (RTX 4090), as for llama_pretrain. The text is downloaded and tokenised while the model
trains: it needs no disk space, and a resumed run skips the text it has seen.

The argument is a Hugging Face folder or hub id; only its config.json and tokenizer are used.

    python -m jaxtune.train --config=pretrain_stream
    python -m jaxtune.train --config=pretrain_stream:PATH_OR_HUB_ID '--config.data.datasets[0].path=FOLDER'
"""

from jaxtune.config import dataset
from jaxtune.recipes import llama_pretrain


def get_config(model="HuggingFaceTB/SmolLM2-135M"):
    """Return the config of llama_pretrain on FineWeb-Edu, with separate validation data."""
    config = llama_pretrain.get_config(model)
    config.data.streaming = True
    config.data.datasets = (dataset(path="HuggingFaceFW/fineweb-edu", subset="sample-10BT", type="text"),)
    config.data.validation_split = 0.0
    wikitext = {"path": "Salesforce/wikitext", "subset": "wikitext-103-raw-v1", "split": "validation"}
    config.data.eval_datasets = (dataset(**wikitext, type="text"),)
    return config
