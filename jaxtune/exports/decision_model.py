"""A decision model with a linear head as transformers' JevForDecision: a base model in `model`, and the head `proj`."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from jaxtune import hf
from jaxtune.columns import HEAD_ROWS, QUESTION_ROWS
from jaxtune.json_file import read_json


def jev_tensors(tensors: Iterator[hf.OutputTensor], hidden: int) -> Iterator[hf.OutputTensor]:
    """Yield a classifier's tensors by JevForDecision's names; its head has a bias, which is 0 here."""
    for tensor in tensors:
        if tensor.name != "score.weight":
            yield tensor
            continue
        assert tensor.shape == (HEAD_ROWS, hidden), tensor.shape
        yield tensor._replace(name="proj.weight")
        bias = partial(np.zeros, HEAD_ROWS, tensor.dtype)
        yield hf.OutputTensor("proj.bias", (HEAD_ROWS,), tensor.dtype, bias, take_part=bias)


def write_jev_config(folder: Path, hidden: int) -> None:
    """Put the folder's config.json, which describes the base model, inside one of JevForDecision."""
    base = read_json(folder / "config.json")
    described = {
        "architectures": ["JevForDecision"],
        "model_type": "jev",
        "dtype": base.get("dtype") or base.get("torch_dtype"),
        "hidden_size": hidden,
        "num_verbalizers": HEAD_ROWS,
        "offsets": {kind: rows.start for kind, rows in QUESTION_ROWS.items()},
        "text_config": base,
    }
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
