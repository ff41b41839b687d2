"""Exports of tiny models that servers load, and what jaxtune computes with them."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from batches import logits_on_host, make_batch
from tiny import write_model_folder
from vllm_program import SIZES

from jaxtune.config.schema import Config, DataOptions, ModelOptions, TrainOptions
from jaxtune.exports.write import export
from jaxtune.host.run_folder import RunFolder
from jaxtune.inference.answers import mesh_of, open_model
from jaxtune.lora.options import LoraOptions
from jaxtune.quant.options import ServeOptions
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model
from jaxtune.weights.served_linears import serve_weights
from jaxtune.weights.values import frozen_parameters, initial_parameters

WINDOWS = dict(sliding_window=16, layer_types=["sliding_attention", "full_attention"], pad_token_id=None)
EXPERTS = dict(moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Llama": dict(tie_word_embeddings=False),
    "Gemma3Text": dict(architectures=["Gemma3ForCausalLM"], query_pre_attn_scalar=64, **WINDOWS),
    "Qwen3Moe": EXPERTS,
    "GptOss": dict(num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False, **WINDOWS),
}
PROMPTS = [np.random.default_rng(length).integers(0, 256, length).tolist() for length in (40, 25, 7, 3)]


class Row(NamedTuple):
    """An export, and how vLLM loads it.

    Attributes:
        family: The family of the tiny model.
        form: "merged", "adapter", or the format of a merged export that is quantized.
        serve: The options of section `serve`, if the model is trained for the format.
        rank: The rank of the adapter.
        refused: vLLM's own words if it cannot load the export.
    """

    family: str
    form: str
    serve: ServeOptions = ServeOptions()
    rank: int = 16
    refused: str | None = None

    def __str__(self) -> str:
        block = f"-{self.serve.block_size}" if self.serve.format else ""
        return f"{self.family}-{self.form}{block}-rank{self.rank}"


class Exported(NamedTuple):
    """An export on disk, and what jaxtune computes with: a declared model and its weights."""

    job: dict[str, Any]
    model: Any
    weights: Any


def write_row(home: Path, row: Row) -> Exported:
    """Export a base with a random adapter that changes it much."""
    base, output = home / row.family, home / str(row)
    if not base.exists():
        write_model_folder(base, row.family, **SIZES, **FAMILIES[row.family])
    lora = LoraOptions(enabled=True, rank=row.rank)
    data, train = DataOptions(seq_len=64), TrainOptions(output_dir=str(home))
    config = Config(model=ModelOptions(path=str(base)), data=data, train=train, lora=lora, serve=row.serve)
    mesh = mesh_of([])
    model = declare_model(read_base(config), config, mesh)
    rng, adapter = np.random.default_rng(1), initial_parameters(model, config)
    drawn = {name: rng.normal(scale=0.08, size=value.shape) for name, value in sorted(adapter.items())}
    adapter = {name: jax.device_put(drawn[name].astype(value.dtype), value.sharding) for name, value in adapter.items()}
    parameters, kind = {**frozen_parameters(model, config), **adapter}, "peft" if row.form == "adapter" else "hf"
    quantize = row.form if row.form not in ("merged", "adapter") else None
    run, merge = RunFolder(home / "run"), kind == "hf"
    export(model, parameters, config, run, output, kind, merge=merge, quantize=quantize, steps=1, tokens=1)
    folder, adapter_folder = (base, str(output)) if kind == "peft" else (output, None)
    if quantize and not row.serve.format:  # what was written, because the run's own weights are not quantized
        opened = open_model(str(output), mesh)
        model, parameters = opened.model, opened.parameters
    job = {"folder": str(folder), "adapter": adapter_folder, "prompts": PROMPTS}
    return Exported(job, model, serve_weights(model.linears, parameters))


def logprobs(exported: Exported, documents: list[list[int]], dtype: str) -> list[np.ndarray]:
    """Return jaxtune's log-probabilities of all tokens after each token of each document."""
    rows = np.concatenate(documents)[None]
    batch = make_batch(rows, jax.sharding.get_mesh(), [len(document) for document in documents])
    values = jax.nn.log_softmax(logits_on_host(exported.model, exported.weights, batch, jnp.dtype(dtype))[0])
    return np.split(np.asarray(values), np.cumsum([len(document) for document in documents])[:-1])


def of_prompts(values: list[np.ndarray], prompts: list[list[int]] = PROMPTS) -> np.ndarray:
    """Return the log-probabilities of the prompts' tokens but the first."""
    return np.concatenate(
        [value[np.arange(len(prompt) - 1), prompt[1:]] for value, prompt in zip(values, prompts, strict=True)]
    )
