"""The snippets of docs/extending.md run in order, and their assertions hold."""

import json
import re
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from batches import make_batch
from tiny import write_model_folder

from jaxtune.models import families

PAGE = (Path(__file__).parents[3] / "docs" / "extending.md").read_text(encoding="utf-8")


def test_every_snippet_runs_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_model_folder(tmp_path / "smol", architectures=["LlamaForCausalLM"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "smol"}))
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(snippets) == PAGE.count("```") // 2 >= 6
    names = {"__name__": "extending"}
    with mock.patch.dict(families.FAMILIES):
        for snippet in snippets:
            exec(compile(snippet, "docs/extending.md", "exec"), names)
        # The value of the loss, from the gradients that the page computes.
        batch = make_batch(np.arange(64).reshape(2, 32), jax.sharding.get_mesh())
        batch = jax.tree.map(lambda x: x[None], batch)
        result = jax.jit(names["program"].gradients)(names["parameters"], {}, batch, jnp.int32(0))
    plain = np.log(256) * result.sums.weight  # random weights: every token is about equally likely
    assert 0.9 * plain < result.sums.loss < plain * 1.1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.gradients))
